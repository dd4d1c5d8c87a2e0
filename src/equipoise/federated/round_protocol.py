"""What a client's method may add to a round: follow the server, note the round's end, shape the answer.

Everything here works on public things: what the server sent, and what the client's ledger released.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from equipoise.methods import State
from equipoise.methods.base import Parameters
from equipoise.methods.named_tensors import copied

__all__ = ["REPORT", "RoundProtocol", "reports"]


REPORT = "report:"  # begins the names of what is sent beside the model; no parameter name holds a colon


def reports(answer: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of an answer, the released numbers beside the model.

    Example:
        >>> import torch
        >>> list(reports({"weight": torch.zeros(2), "report:share": torch.tensor(0.5)}))
        ['report:share']
    """
    return {name: value for name, value in answer.items() if name.startswith(REPORT)}


class RoundProtocol:
    """A mixin of client methods; by itself it adds nothing to a round."""

    @property
    def follows_clip_norm(self) -> bool:
        """Whether every round needs a clip norm of the server."""
        return False

    @property
    def follows_limit(self) -> bool:
        """Whether every round needs a scale of the squared norms of the server."""
        return False

    @property
    def answers_query(self) -> bool:
        """Whether it has a radius query: `radius_noise`, `with_limit` and `ask` of `ServerRMS`."""
        return False

    @property
    def follows_control(self) -> bool:
        """Whether the method takes a control variate of the server."""
        return False

    def with_radius(self, state: State, clip_norm: float) -> State:
        """The state with the server's clip norm.

        Raises:
            Refused: it makes no sense, or lies outside of what was agreed.
        """
        raise NotImplementedError

    def with_limit(self, state: State, square_limit: float) -> State:
        """The state with the server's scale U of the squared norms.

        Raises:
            Refused: as `with_radius`.
        """
        raise NotImplementedError

    def with_control(self, state: State, control: Parameters | None) -> State:
        """The state with the server's control variate, whose names and shapes were checked; None for zero."""
        return state

    def end_round(self, state: State, end: Parameters) -> State:
        """The state after the last local step of a round, which led to `end`."""
        return state

    def answer(self, state: State, start: Parameters, end: Parameters) -> dict[str, Tensor]:
        """What is sent: by default the parameters at the end.

        Args:
            state: after `end_round`.
            start: where the server put the client.
            end: where the local steps led.
        """
        return copied(end)
