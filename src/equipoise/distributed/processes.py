"""Several processes, one training: each takes a slice of every draw, the sums are added, one noises.

Under `torchrun` (a process group is initialised, or the environment says so) rank 0 keeps the ledger, the
secrets, the journal and all files; the others compute. A draw's record numbers come from rank 0; every rank
runs its share of the micro-batches; the bounded sums are added over ranks; rank 0 releases (noise drawn
once, one event booked) and broadcasts what was released. So the result is that of one process, and no key
leaves rank 0. It has the same bits where the ranks' microbatches are those of one process; each rank fills up
the last one of its share, so that otherwise rows round differently.

Every exchange begins by telling whether all processes are well, and a process that fails takes part in one
more of these: so an error anywhere is raised everywhere, and no process waits for ever. The processes of a
sharded model tell at the same time what each of them wants to do next (`most_of`, see `backend`).
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from equipoise._collectives import sent_by_first

T = TypeVar("T")

#: What a process tells that failed: more than any wish (`most_of`), so that the largest number tells of it.
_TROUBLE = 100


class MachineError(RuntimeError):
    """Another machine or process failed, or does not answer as it must, and no record is at fault.

    The message holds nothing of the records.
    """


class ProcessError(MachineError):
    """Another process of the training failed, so that this one cannot go on."""


class Processes:
    """The process group of a training, or the single process.

    Args:
        same_records: every process has all records of a draw, otherwise a slice of them.

    Attributes:
        rank, count: of the processes.
        same_records: as given.
        part, parts: which of how many slices of a draw is this process'.

    Example:
        >>> single = Processes()
        >>> single.rank, single.count, single.first(lambda: 7)
        (0, 1, 7)
    """

    def __init__(self, same_records: bool = False) -> None:
        if dist.is_available() and not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            backend = "nccl" if _one_gpu_a_rank() else "gloo"
            _init_process_group(backend)
            # Torch may abort a process whose gloo group is open while Python ends (pytorch issue 190489).
            # NCCL does not, and its closing would wait for processes that failed.
            if backend == "gloo":
                atexit.register(_close_process_group)
        running = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if running else 0
        self.count = dist.get_world_size() if running else 1
        self.same_records = same_records
        self.part, self.parts = (0, 1) if same_records else (self.rank, self.count)
        self._failed = False
        # The last error that `first` raised: every process has it, so none has to hear of it.
        self._raised_everywhere: Exception | None = None

    @property
    def is_first(self) -> bool:
        """Whether this process keeps the ledger and writes the files."""
        return self.rank == 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside, an error of one process is raised on all of them, by its own name on the one that has it.

        Raises:
            ProcessError: another process failed.
        """
        try:
            yield
        except ProcessError:
            raise
        except Exception as error:
            if self.count > 1 and not self._failed and error is not self._raised_everywhere:
                self._tell(type(error).__name__)
            raise

    def fail_alone(self, error: Exception) -> None:
        """Tell nobody of an error: the others are in an exchange that this process has left.

        They end with it, as its connections close.
        """
        if self.count > 1:
            self._failed = True
            error.add_note(
                "(the other processes are in an exchange of a sharded model, and end with this one. "
                "Start as many of them again and resume the run from its checkpoint: nothing is spent twice)"
            )

    def failing_alone(self, exchange: Callable[..., T]) -> Callable[..., T]:
        """The function, which exchanges something: its errors stay here, see `fail_alone`."""

        def watched(*args: Any) -> T:
            try:
                return exchange(*args)
            except Exception as error:
                self.fail_alone(error)
                raise

        return watched

    def all_well(self) -> None:
        """Go on if every process does; to be called before an exchange.

        Raises:
            ProcessError: one of them failed.
        """
        if self.count > 1:
            self._tell(None)

    def most_of(self, wish: int) -> int:
        """The largest wish of all processes, from 0 to less than 100; as `all_well`, an exchange by itself.

        Raises:
            ProcessError: one of them failed.
        """
        return wish if self.count == 1 else self._tell(None, wish)

    def _tell(self, trouble: str | None, wish: int = 0) -> int:
        """Exchange who failed; every exchange begins with this one, so that a failing process meets it."""
        again = (
            "Start as many processes again and resume the run from its checkpoint: nothing is spent twice."
        )
        if self._failed:
            raise ProcessError(f"a process of this training failed before. {again}")
        told = torch.tensor([wish if trouble is None else _TROUBLE], device=self._device)
        try:
            dist.all_reduce(told, dist.ReduceOp.MAX)
        except RuntimeError as error:
            self._failed = True
            raise ProcessError(f"another process of this training ended. {again}") from error
        if int(told) < _TROUBLE:
            return int(told)
        self._failed = True
        # Only the kind of the error: its message may quote a record, and belongs to the failing process.
        troubles: list[str | None] = [None] * self.count
        dist.all_gather_object(troubles, trouble)
        if trouble is None:
            named = ", ".join(f"process {rank} ({kind})" for rank, kind in enumerate(troubles) if kind)
            raise ProcessError(f"{named} failed; its own message says why. {again}")
        return _TROUBLE

    @property
    def _device(self) -> str:
        """Where numbers are exchanged."""
        return "cuda" if dist.get_backend() == "nccl" else "cpu"

    def share(self, ids: Tensor) -> Tensor:
        """This process' slice of a draw: contiguous, in rank order, sizes equal up to one."""
        return ids.tensor_split(self.parts)[self.part] if self.parts > 1 else ids

    def first(self, compute: Callable[[], T]) -> T:
        """The result of `compute` on rank 0, on every rank; rank 0's error, too, is raised everywhere."""
        if self.count == 1:
            return compute()
        self.all_well()
        message: list[Any] = [None, None]
        if self.is_first:
            try:
                message = [compute(), None]
            except Exception as error:
                message = [None, error]
        dist.broadcast_object_list(message, src=0)
        if message[1] is not None:
            self._raised_everywhere = message[1]
            raise message[1]
        result: T = message[0]
        return result

    def first_bytes(self, compute: Callable[[], bytes | None], count: int = 0) -> bytes | None:
        """As `first` for so many bytes, or None, in one exchange: nothing is pickled unless it fails."""
        if self.count == 1:
            return compute()
        self.all_well()
        error: Exception | None = None
        # The first one is 0 for None, 1 for bytes, 2 for an error.
        sent = torch.zeros(1 + count, dtype=torch.uint8)
        if self.is_first:
            try:
                if (found := compute()) is not None:
                    sent = torch.frombuffer(bytearray(b"\1" + found), dtype=torch.uint8)
            except Exception as raised:
                error, sent[0] = raised, 2
        sent = sent.to(self._device)
        dist.broadcast(sent, src=0)
        kind, *answer = sent.tolist()
        if kind < 2:
            return bytes(answer) if kind else None
        message = [error]
        dist.broadcast_object_list(message, src=0)
        self._raised_everywhere = message[0]
        assert message[0] is not None
        raise message[0]

    def part_of(self, count: int) -> tuple[int, int]:
        """[start, stop) of this process' part of so many numbers; all but the last are of one length."""
        size = -(-count // self.count)
        return min(count, self.rank * size), min(count, (self.rank + 1) * size)

    def joined_parts(self, part: Tensor, count: int) -> Tensor:
        """All numbers, of which each process gives its part (see `part_of`)."""
        size = -(-count // self.count)
        padded = torch.nn.functional.pad(part, (0, size - len(part))) if len(part) < size else part
        whole = torch.empty(size * self.count, dtype=part.dtype, device=part.device)
        # Its name in newer versions of PyTorch, and that in older ones.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(whole, padded.contiguous())
        return whole[:count]

    def first_tensors(
        self, compute: Callable[[], dict[str, dict[str, Tensor]]], like: dict[str, dict[str, Tensor]]
    ) -> dict[str, dict[str, Tensor]]:
        """As `first` for nests of tensors, which are broadcast in a few pieces without being pickled.

        Args:
            compute: gives the tensors on rank 0.
            like: tensors with the structure, shapes, types and device of the result.
        """
        if self.count == 1:
            return compute()
        found: dict[str, dict[str, Tensor]] = {}
        self.first_bytes(lambda: found.update(compute()))
        places = [(name, key) for name in sorted(like) for key in sorted(like[name])]
        given = found if self.is_first else like
        sent = dict(zip(places, sent_by_first([given[n][k] for n, k in places]), strict=True))
        return {name: {key: sent[name, key] for key in like[name]} for name in like}

    def all_of(self, value: T) -> list[T]:
        """The value of every process, in rank order."""
        if self.count == 1:
            return [value]
        self.all_well()
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value)
        return values

    def same(self, what: str, value: Any) -> None:
        """Check that every process has the same value (settings, initial parameters).

        Raises:
            RuntimeError: they differ.
        """
        values = self.all_of(value)
        if any(other != values[0] for other in values):
            raise RuntimeError(
                f"the processes do not agree on {what}: give every process the same script, settings and "
                "initial parameters (seed the initialisation alike)"
            )


def _init_process_group(backend: str) -> None:
    """As torch does it, apart from what processes that were killed have left in the store of `torchrun`.

    It shares its store with those that it starts again, which may then wait for the addresses of the dead.
    """
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # Several agents may count differently: there only torch's own way is right.
    if life == "0" or os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        dist.init_process_group(backend)
        return
    store, rank, count = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    store = dist.PrefixStore(f"restart {life}", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=count)


def _close_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _one_gpu_a_rank() -> bool:
    return torch.cuda.is_available() and torch.cuda.device_count() >= int(
        os.environ.get("LOCAL_WORLD_SIZE", "1")
    )
