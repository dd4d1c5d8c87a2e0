"""How the processes of a training share its model.

| model | records | forwards | sums |
|---|---|---|---|
| whole in each process | each has a part of the draw | as it needs them | added up |
| fully sharded | each has a part of the draw | all together, in turns | added up, each gets its part |
| tensor parallel | all have the same | all together | each has its part |

*Fully sharded.* A forward gathers parameters from all processes, and a sum is handed to all of them. But how
many forwards a process needs follows from its records: some are left out, some run by themselves, others have
to be looked for. So the processes take turns. Before each turn everyone says what it wants, and the most of
it is done:

| someone wants | the others |
|---|---|
| a forward | run one of public records, whose rows nobody takes |
| a sum, and nobody a forward | add nothing to it |
| neither | the pass over the draw is over |

*Tensor parallel.* An operation of the model is computed by all processes, from the same records with the same
random numbers. So all of them fail on the same records, and see to it that they do: one that fails alone has
left an exchange in which the others wait, and ends the training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from enum import IntEnum
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from equipoise._collectives import sent_by_first
from equipoise._dtensor import is_a_copy, local_part, with_part
from equipoise._host import Unread
from equipoise.distributed.processes import MachineError, Processes
from equipoise.distributed.sharded_rows import ShardedRows
from equipoise.distributed.shared_ledger import SharedLedger
from equipoise.gradients import CrossRecordError, ForwardWritesError
from equipoise.gradients.capture.gathers import GatherError, GatherOrder
from equipoise.gradients.capture.recorder import PlanMismatch
from equipoise.gradients.capture.sharded import SHARDED, tensor_parallel_mesh
from equipoise.privacy import Bounded, Ledger, PrivacyPlan
from equipoise.privacy.bounds.bounded import added_over_processes, after_exchange

Computed = TypeVar("Computed")


def is_no_records_fault(error: Exception) -> bool:
    """Whether the model is spoilt or mixes records, another process or machine failed, or memory ran out."""
    known = CrossRecordError | ForwardWritesError | GatherError | MachineError
    return isinstance(error, known) or out_of_memory(error)


def out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, which is no record's fault."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


class Backend:
    """What a training asks of its processes; as it stands, of a single one that has the whole model.

    Args:
        processes: of the training.

    Attributes:
        is_sharded: each process holds a part of the model.
    """

    is_sharded = False

    def __init__(self, processes: Processes) -> None:
        self._processes = processes

    def all_of(self, flags: Sequence[Tensor]) -> Unread[bool]:
        """Whether these hold, in every process."""
        return Unread(flags, lambda *each: all(map(bool, each)))

    def ledger(self, plan: PrivacyPlan, open_here: Callable[[], Ledger]) -> Ledger | SharedLedger:
        """The ledger of the training, which rank 0 opens."""
        return open_here()

    def note(self, public: Callable[[], object]) -> None:
        """Note what a forward of public records exchanges; private ones are held to it.

        Args:
            public: runs one; not through `forwards`.
        """

    def reading(self, compute: Callable[[], Computed]) -> Computed:
        """What `compute` gives, which reads records."""
        return compute()

    def forwards(self, compute: Callable[[], Computed], count: int) -> Computed:
        """What `compute` gives, in which so many forwards of private records run. It may fail."""
        return compute()

    def turns(self, idle: Callable[[], object], count: int) -> Turns:
        """The turns of a pass over a draw.

        Args:
            idle: runs forwards of public records; not through `forwards`.
            count: how many, which is as many as those of private records take.
        """
        return Turns()

    def rows(self, found: Any, params: Mapping[str, Tensor]) -> Any:
        """Rows as a query gets them.

        Args:
            found: by the engine.
            params: the model's parameters.
        """
        return found

    def query(self, fn: Callable[..., Computed]) -> Callable[..., Computed]:
        """The function, which takes sums of rows."""
        return fn

    def total(self, sums: dict[str, Bounded]) -> dict[str, Bounded]:
        """Bounded sums over the records of all processes."""
        return sums


class DataParallel(Backend):
    """Each process has the whole model and a part of the draw."""

    def ledger(self, plan: PrivacyPlan, open_here: Callable[[], Ledger]) -> SharedLedger:
        return SharedLedger(plan, self._processes, open_here, self.is_sharded)

    def all_of(self, flags: Sequence[Tensor]) -> Unread[bool]:
        are_here = super().all_of(flags).value()
        are_everywhere = not self._processes.most_of(int(not are_here))
        return Unread([], lambda: are_everywhere)

    def total(self, sums: dict[str, Bounded]) -> dict[str, Bounded]:
        self._processes.all_well()
        return added_over_processes(sums)


class FullySharded(DataParallel):
    """Every process takes part in all gathers of parameters.

    Args:
        model: sharded by `fully_shard`.
        processes: hold its parts.
    """

    is_sharded = True

    def __init__(self, model: nn.Module, processes: Processes) -> None:
        super().__init__(processes)
        self._order = GatherOrder(model)

    def note(self, public: Callable[[], object]) -> None:
        with self._order.noted():
            public()
        self._processes.same("the order in which the model uses its parts", self._order.planned)

    def forwards(self, compute: Callable[[], Computed], count: int) -> Computed:
        """As there, each of them once on every process; where it fails, the others do not notice.

        Raises:
            ProcessError: another process failed.
            GatherError: another process ended.
        """
        self._processes.most_of(_Want.FORWARD)
        return self._run(compute, count)

    def turns(self, idle: Callable[[], object], count: int) -> Turns:
        return SharedTurns(self._processes, lambda: self._run(idle, count))

    def rows(self, found: Any, params: Mapping[str, Tensor]) -> Any:
        return ShardedRows(found, params)

    def query(self, fn: Callable[..., Computed]) -> Callable[..., Computed]:
        return self._processes.failing_alone(fn)

    def total(self, sums: dict[str, Bounded]) -> dict[str, Bounded]:
        return added_over_processes(sums)  # the last turn has shown that all are well

    def _run(self, compute: Callable[[], Computed], count: int) -> Computed:
        try:
            with self._order.kept(count):
                return compute()
        except GatherError as error:
            self._processes.fail_alone(error)
            raise


class TensorParallel(DataParallel):
    """All processes read and run the same records, and fail on the same ones.

    Args:
        processes: compute a part of every operation each.
    """

    is_sharded = True

    def __init__(self, processes: Processes) -> None:
        super().__init__(processes)
        # Whoever fails waits for the others here, and not among what the model exchanges.
        self._failing = dist.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE))

    def reading(self, compute: Callable[[], Computed]) -> Computed:
        return self._alike(compute)

    def forwards(self, compute: Callable[[], Computed], count: int) -> Computed:
        """As there; where it fails, it fails in every process, in one way.

        Raises:
            PlanMismatch, RuntimeError: it failed, here or in another process.
            GatherError: it failed by no record's fault, or in some processes only.
        """
        return self._alike(compute)

    def query(self, fn: Callable[..., Computed]) -> Callable[..., Computed]:
        return self._processes.failing_alone(fn)

    def total(self, sums: dict[str, Bounded]) -> dict[str, Bounded]:
        """As there: of the same records, so that nothing is added.

        Of a parameter that all of them hold the first process' sum counts, as its rows did in the norms.
        """
        self._processes.all_well()

        def first(raws: list[Tensor]) -> list[Tensor]:
            places = [place for place, raw in enumerate(raws) if is_a_copy(raw)]
            sent = sent_by_first([local_part(raws[place]) for place in places])
            out = list(raws)
            for place, values in zip(places, sent, strict=True):
                out[place] = with_part(values, raws[place])
            return out

        return after_exchange(sums, first)

    def _alike(self, compute: Callable[[], Computed]) -> Computed:
        try:
            return compute()
        except Exception as error:
            mine, found = _Fault.of(error), error
        faults: list[Any] = [None] * self._processes.count
        try:
            dist.all_gather_object(faults, int(mine), group=self._failing)
        except RuntimeError as error:
            alone = GatherError("the other processes of a tensor parallel model did not fail with this one")
            self._processes.fail_alone(alone)
            raise alone from (found if mine == _Fault.NO_RECORD else error)
        worst = max(faults)
        if mine == worst:
            raise found
        if worst == _Fault.NO_RECORD:
            raise GatherError("a forward failed in another process, by no record's fault")
        raise RuntimeError("the records failed in another process in another way")


#: Seconds for which a process that fails waits for the others of a tensor parallel model to fail too. A
#: choice: less takes slow processes for lost ones, and more lets a run hang for longer in which one was
#: killed.
PATIENCE = 60


class _Fault(IntEnum):
    """What an error is, the worse the larger."""

    OTHER_PLAN = 1
    RECORD = 2
    NO_RECORD = 3

    @staticmethod
    def of(error: Exception) -> _Fault:
        if is_no_records_fault(error):
            return _Fault.NO_RECORD
        return _Fault.OTHER_PLAN if isinstance(error, PlanMismatch) else _Fault.RECORD


class _Want(IntEnum):
    NOTHING = 0
    SUM = 1
    FORWARD = 2


class Turns:
    """The turns of one pass over a draw, in which no process waits for another."""

    def wait_to_sum(self) -> None:
        """Take part in the forwards of others until everyone may sum."""

    def until_all_are_done(self) -> Iterator[None]:
        """Take part in the forwards of others; at each of their sums this stands still."""
        yield from ()


class SharedTurns(Turns):
    """Those of processes that each hold a part of the model."""

    def __init__(self, processes: Processes, idle: Callable[[], object]) -> None:
        self._processes, self._idle = processes, idle

    def wait_to_sum(self) -> None:
        while self._processes.most_of(_Want.SUM) == _Want.FORWARD:
            self._idle()

    def until_all_are_done(self) -> Iterator[None]:
        while want := self._processes.most_of(_Want.NOTHING):
            if want == _Want.FORWARD:
                self._idle()
            else:
                yield


def backend_of(model: nn.Module, processes: Processes) -> Backend:
    """How these processes share the model, which an engine has looked at."""
    if tensor_parallel_mesh(model) is not None:
        return TensorParallel(processes)
    if model in SHARDED:
        return FullySharded(model, processes)
    return Backend(processes) if processes.count == 1 else DataParallel(processes)
