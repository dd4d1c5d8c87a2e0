"""The rounds of a federated training as the server saw them, and their place on disk."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from equipoise.federated.strategies import Strategy
from equipoise.methods.base import Parameters
from equipoise.training.checkpoint import Checkpoints

__all__ = ["History", "Round", "ServerFolder", "size_in_bytes"]


@dataclass(frozen=True)
class Round:
    """What the server saw of a round.

    Attributes:
        number: from 1.
        asked: clients that were picked.
        answered: clients whose parameters made the next model.
        absent: client -> why it is not among them.
        metrics: the strategy's public numbers, and those of `evaluate`.
        bytes_down, bytes_up: of parameters and numbers sent to and by the clients; with secure sums of keys,
            shares and masked answers.
    """

    number: int
    asked: tuple[int, ...]
    answered: tuple[int, ...]
    absent: Mapping[int, str]
    metrics: Mapping[str, float]
    bytes_down: int
    bytes_up: int


@dataclass
class History:
    """The rounds, and the global model after the last.

    Attributes:
        params: named tensors.
        rounds: in order.
    """

    params: dict[str, Tensor]
    rounds: list[Round] = field(default_factory=list)


class ServerFolder:
    """The state of a server after its last round, in `checkpoint/` of its folder.

    Everything in it is made of what clients released. A file is written under another name, synced and
    renamed, so that a kill at any moment leaves the last whole round.

    Args:
        path: the folder; made when the first round is saved.
        plan: the public settings of the rounds; a folder goes on under the same alone.
    """

    def __init__(self, path: str | os.PathLike[str], plan: Mapping[str, Any]) -> None:
        self._store, self._path = Checkpoints(Path(path) / "checkpoint"), Path(path)
        self._plan = dict(plan)

    def save(self, strategy: Strategy, history: History) -> None:
        """Put the state after the last of the rounds on disk."""
        state = {
            "plan": {**self._plan, "strategy": type(strategy).__name__},
            "params": history.params,
            "strategy": strategy.state_dict(),
            "rounds": [_plain(done) for done in history.rounds],
        }
        self._store.save(history.rounds[-1].number, state)

    def load(self, strategy: Strategy, params: Parameters) -> History | None:
        """The rounds so far, and the strategy as it was after them; None where there are none.

        Args:
            strategy: takes over its state.
            params: what the model looks like.

        Raises:
            ValueError: the folder holds another training.
        """
        if not self._store.steps():
            return None
        _, state = self._store.load()
        plan = {**self._plan, "strategy": type(strategy).__name__}
        if state["plan"] != plan:
            raise ValueError(
                f"folder={str(self._path)!r} holds rounds under {state['plan']}, and now {plan} is asked "
                "for. Give the settings that they were begun with, or another folder."
            )
        held = {name: value.shape for name, value in state["params"].items()}
        if held != {name: value.shape for name, value in params.items()}:
            raise ValueError(
                f"folder={str(self._path)!r} holds another model: {sorted(held)} of its shapes. Give the "
                "model that it was begun with, or another folder."
            )
        strategy.load_state_dict(state["strategy"])
        return History(dict(state["params"]), [_round(values) for values in state["rounds"]])


def size_in_bytes(value: Any) -> int:
    """Of what a message holds: tensors, bytes and words as they are, 8 for a number.

    Example:
        >>> size_in_bytes({"masked": b"1234", "survivors": [0, 2], "round": 1})
        28
    """
    if isinstance(value, Mapping):
        return sum(map(size_in_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(size_in_bytes, value))
    if isinstance(value, bytes | str):
        return len(value)
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 8


def _plain(done: Round) -> dict[str, Any]:
    return asdict(done) | {"asked": list(done.asked), "answered": list(done.answered)}


def _round(values: Mapping[str, Any]) -> Round:
    return Round(**{**values, "asked": tuple(values["asked"]), "answered": tuple(values["answered"])})
