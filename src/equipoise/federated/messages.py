"""Requests, replies and refusals, and the checks that every request passes before anything is spent.

A request holds the round's number, the global model, and `extras`: numbers or named tensors that the strategy
sends with the model, such as a clip norm or a control variate. A reply holds the parameters, or what the
client's method sends in their place, and `reports`: released numbers. The in-process driver and Flower move
the same two types.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from equipoise._files import CheckpointError
from equipoise._run_files import RunFolderError
from equipoise._tree import leaves
from equipoise.methods.base import Parameters
from equipoise.privacy import digest
from equipoise.privacy.errors import JournalError, LedgerError

RequestKind = Literal["train", "query", "score"]

_MACHINES_APART = 1 + 1e-6

POPULATION = "population"
"""The report of the public number of records, or users, that a client's sampling states; and the extra of a
request that asks for it."""

#: Errors of a client's own ledger, journal or folder. The other clients go on without it.
CLIENT_FAILURES = (LedgerError, JournalError, CheckpointError, RunFolderError)


class Refused(RuntimeError):
    """A client refuses a request: it makes no sense, is out of order, or is beyond the client's budget.

    Where the request made no sense or was out of order, nothing was spent. The message holds nothing private.
    """


@dataclass(frozen=True)
class Request:
    """What the server asks of every client of a round.

    Attributes:
        round: from 1, rising; rounds may be left out.
        params: the global model.
        extras: name -> number, or named tensors. A client refuses names that its method does not take.
        kind: "train" for the local steps, "query" for released numbers about the global model, "score" for
            the client's private score of it.
    """

    round: int
    params: Parameters
    extras: Mapping[str, Any] = field(default_factory=dict)
    kind: RequestKind = "train"

    def fingerprint(self) -> str:
        """A digest of all of it, by which it is known again."""
        named = {"kind": self.kind, "round": self.round}
        return digest({**named, "params": dict(self.params), "extras": dict(self.extras)})


@dataclass(frozen=True)
class Reply:
    """What a client answers.

    Attributes:
        params: the parameters after the local steps, or the tensors that the method sends in their place;
            empty in the reply to a query.
        reports: name -> released number, or a public one such as the deviation of its noise.
    """

    params: Mapping[str, Tensor] = field(default_factory=dict)
    reports: Mapping[str, float] = field(default_factory=dict)


def size_in_bytes(value: Any) -> int:
    """The size of what a message holds: tensors, bytes and text as they are, 8 per number.

    Example:
        >>> size_in_bytes(Request(3, {"w": torch.zeros(2)}, {"clip_norm": 0.5}))
        16
        >>> size_in_bytes({"masked": b"1234", "survivors": [0, 2], "round": 1})
        28
    """
    if isinstance(value, Request):
        value = value.params, value.extras
    elif isinstance(value, Reply):
        value = value.params, value.reports
    return sum(
        leaf.nbytes if isinstance(leaf, Tensor) else len(leaf) if isinstance(leaf, bytes | str) else 8
        for leaf in leaves(value)
    )


def check_round(number: Any) -> None:
    """Refuse what is not the number of a round."""
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise Refused(f"round={number!r:.80}: rounds are numbered 1, 2, ...; nothing was spent")


def check_number(name: str, value: Any, largest: float, least: float = 0.0) -> float:
    """A number of the server, if it lies in (0, largest] and not below `least`.

    Raises:
        Refused: it does not, or is no finite number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Refused(f"{name}={value!r:.80} is no finite number; nothing was spent")
    # Both ends compute the limits, on machines that may round otherwise.
    if not (0 < value <= largest * _MACHINES_APART and value * _MACHINES_APART >= least):
        low = f"[{least:g}" if least else "(0"
        raise Refused(f"{name}={value!r} lies outside the agreed {low}, {largest:g}]; nothing was spent")
    return min(float(value), largest)


def check_tensors(what: str, sent: Mapping[str, Any], mine: Parameters) -> dict[str, Tensor]:
    """The server's tensors, with the type and device of the client's.

    Args:
        what: the name in the request, for messages.
        sent: what came.
        mine: the client's parameters.

    Raises:
        Refused: other names or shapes, or numbers that are not finite.
    """
    if set(sent) != set(mine):
        raise Refused(
            f"{what} of the request has the tensors {sorted(sent)!s:.400}, the client's parameters are "
            f"{sorted(mine)}; nothing was spent"
        )
    values = {}
    for name, parameter in mine.items():
        value = sent[name]
        if not isinstance(value, Tensor) or value.shape != parameter.shape:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise Refused(
                f"{what}[{name!r}] has shape {shape}, the client's {tuple(parameter.shape)}; nothing was "
                "spent"
            )
        if not value.is_floating_point():
            raise Refused(
                f"{what}[{name!r}] is a tensor of {value.dtype}; floating point numbers are exchanged. "
                "Nothing was spent"
            )
        # The conversion may overflow, so finiteness is checked after it.
        moved = value.detach().to(parameter.device, parameter.dtype)
        if not bool(torch.isfinite(moved).all()):
            raise Refused(f"{what}[{name!r}] holds numbers that are not finite; nothing was spent")
        values[name] = moved
    return values
