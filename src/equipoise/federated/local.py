"""The training at a client: the library's own, whose parameters a server may move between steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from equipoise.methods import Context, State
from equipoise.methods.base import Parameters
from equipoise.training import PrivateTraining

__all__ = ["LocalTraining"]

Answer = TypeVar("Answer")


class LocalTraining(PrivateTraining):
    """`PrivateTraining`, with the parameters moved from outside and questions asked between steps."""

    def move(self, values: Parameters) -> None:
        """Put other parameters into the model; the method's state is rebased."""
        self._stepper.move(values)

    def ask(self, question: Callable[[Context, State], Answer]) -> Answer:
        """What `question(context, state)` releases between two steps; it is on disk when this returns."""
        answer = self._stepper.ask(question)
        self.desk.position()  # syncs the journal: an answer that has left cannot be uncharged any more
        return answer

    @property
    def method_state(self) -> State:
        """What the method carries, after the first step or question."""
        assert self._stepper.state is not None
        return self._stepper.state

    def steer(self, change: Callable[[State], State]) -> None:
        """Let `change` set public numbers of the method's state."""
        if self._stepper.state is None:
            self._stepper.ask(lambda context, state: None)  # makes the first state; releases nothing
        state = self._stepper.state
        assert state is not None
        self._stepper.state = change(state)
