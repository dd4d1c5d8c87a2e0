"""Forwards and sums of a sharded model, which all processes run at the same time.

A forward gathers parameters from all processes, and a sum is handed to all of them. But how many forwards a
process needs follows from its records: some are left out, some run by themselves, others have to be looked
for. So the processes take turns. Before each turn everyone says what it wants, and the most of it is done:

| someone wants | the others |
|---|---|
| a forward | run one of public records, whose rows nobody takes |
| a sum, and nobody a forward | add nothing to it |
| neither | the pass over the draw is over |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import TypeVar

from torch import nn

from equipoise.gradients.capture.gathers import GatherError, GatherOrder
from equipoise.training.distributed import Processes

__all__ = ["Lockstep", "Turns"]

Computed = TypeVar("Computed")


class _Want(IntEnum):
    NOTHING = 0
    SUM = 1
    FORWARD = 2


class Lockstep:
    """Runs forwards so that every process takes part in all gathers of parameters.

    Args:
        model: sharded by `fully_shard`.
        processes: hold its parts.
    """

    def __init__(self, model: nn.Module, processes: Processes) -> None:
        self._order, self._processes = GatherOrder(model), processes

    def forwards(self, compute: Callable[[], Computed], count: int) -> Computed:
        """What `compute` gives, in which so many forwards run, each of them once on every process.

        It may fail: the others do not notice.

        Raises:
            ProcessError: another process failed.
            GatherError: another process ended.
        """
        self._processes.most_of(_Want.FORWARD)
        return self._run(compute, count)

    def note(self, public: Callable[[], object]) -> None:
        """Note what a forward of public records gathers, on all processes; private ones are held to it.

        Args:
            public: runs one; not through `forwards`.
        """
        with self._order.noted():
            public()
        self._processes.same("the order in which the model uses its parts", self._order.planned)

    def turns(self, idle: Callable[[], object], count: int) -> Turns:
        """The turns of a pass over a draw.

        Args:
            idle: runs forwards of public records; not through `forwards`.
            count: how many, which is as many as those of private records take.
        """
        return Turns(self._processes, lambda: self._run(idle, count))

    def _run(self, compute: Callable[[], Computed], count: int) -> Computed:
        try:
            with self._order.kept(count):
                return compute()
        except GatherError as error:
            self._processes.fail_alone(error)
            raise


class Turns:
    """The turns of one pass over a draw; `Lockstep.turns` makes them."""

    def __init__(self, processes: Processes, idle: Callable[[], object]) -> None:
        self._processes, self._idle = processes, idle

    def wait_to_sum(self) -> None:
        """Take part in the forwards of others until everyone may sum."""
        while self._processes.most_of(_Want.SUM) == _Want.FORWARD:
            self._idle()

    def until_all_are_done(self) -> Iterator[None]:
        """Take part in the forwards of others; at each of their sums this stands still."""
        while want := self._processes.most_of(_Want.NOTHING):
            if want == _Want.FORWARD:
                self._idle()
            else:
                yield
