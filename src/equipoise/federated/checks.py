"""What a client looks at in a request before anything is spent: its number and its tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from equipoise.federated.errors import Refused
from equipoise.methods.base import Parameters

__all__ = ["check_number", "checked"]

_WORDS = {"params": "parameters", "control": "control variates"}


def checked(mine: Parameters, params: Parameters, what: str = "params") -> dict[str, Tensor]:
    """The server's tensors, in type and place of the client's.

    Args:
        mine: the client's parameters.
        params: what came.
        what: "params" or "control", for the words.

    Raises:
        Refused: other names or shapes, or numbers that are not finite.
    """
    if not isinstance(params, Mapping) or set(params) != set(mine):
        found = sorted(map(repr, params)) if isinstance(params, Mapping) else type(params).__name__
        raise Refused(
            f"the server's {_WORDS[what]} are {found!s:.400}, the client's {sorted(mine)}; nothing was spent"
        )
    values = {}
    for name, parameter in mine.items():
        value = params[name]
        if isinstance(value, Tensor) and (value.is_nested or value.is_meta):
            raise Refused(f"{what}[{name!r}] is a nested tensor or has no values; nothing was spent")
        if not isinstance(value, Tensor) or value.shape != parameter.shape:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise Refused(
                f"{what}[{name!r}] has shape {shape}, the client's {tuple(parameter.shape)}; nothing was "
                "spent"
            )
        if not value.is_floating_point() or value.layout is not torch.strided:
            raise Refused(
                f"{what}[{name!r}] is a tensor of {value.dtype} in layout {value.layout}; dense floating "
                "point numbers are exchanged. Nothing was spent"
            )
        moved = value.detach().to(parameter.device, parameter.dtype)  # may overflow: checked afterwards
        if not bool(torch.isfinite(moved).all()):
            raise Refused(f"{what}[{name!r}] holds numbers that are not finite; nothing was spent")
        values[name] = moved
    return values


def check_number(round_number: int) -> None:
    """See that rounds are numbered.

    Raises:
        Refused: it is no number of a round.
    """
    if isinstance(round_number, bool) or not isinstance(round_number, int) or not 1 <= round_number < 2**63:
        shown = "a whole number beyond 64 bits" if isinstance(round_number, int) else repr(round_number)
        raise Refused(f"round_number is {shown:.80}: rounds are numbered 1, 2, ...; nothing was spent")
