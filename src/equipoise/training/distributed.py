"""Several processes, one training: each takes a slice of every draw, the sums are added, one noises.

Under `torchrun` (a process group is initialised, or the environment says so) rank 0 keeps the ledger, the
secrets, the journal and all files; the others compute. A draw's record numbers come from rank 0; every rank
runs its share of the micro-batches; the bounded sums are added over ranks; rank 0 releases (noise drawn
once, one event booked) and broadcasts what was released. So the result is that of one process up to the
order of floating-point additions, and no key leaves rank 0.

Every exchange begins by telling whether all processes are well, and a process that fails takes part in one
more of these: so an error anywhere is raised everywhere, and no process waits for ever.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["ProcessError", "Processes"]

T = TypeVar("T")


class ProcessError(RuntimeError):
    """Another process of the training failed, so that this one cannot go on."""


class Processes:
    """The process group of a training, or the single process.

    Example:
        >>> single = Processes()
        >>> single.rank, single.count, single.first(lambda: 7)
        (0, 1, 7)
    """

    def __init__(self) -> None:
        if dist.is_available() and not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            dist.init_process_group("nccl" if _one_gpu_a_rank() else "gloo")
        running = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if running else 0
        self.count = dist.get_world_size() if running else 1
        self._failed = False

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
            if self.count > 1 and not self._failed:
                self._tell(type(error).__name__)
            raise

    def all_well(self) -> None:
        """Go on if every process does; to be called before an exchange.

        Raises:
            ProcessError: one of them failed.
        """
        if self.count > 1:
            self._tell(None)

    def _tell(self, trouble: str | None) -> None:
        """Exchange who failed; every exchange begins with this one, so that a failing process meets it."""
        again = "Start the processes again and resume the run from its checkpoint: nothing is spent twice."
        if self._failed:
            raise ProcessError(f"a process of this training failed before. {again}")
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        count = torch.tensor([0 if trouble is None else 1], device=device)
        dist.all_reduce(count)
        if int(count) == 0:
            return
        self._failed = True
        # Only the kind of the error: its message may quote a record, and belongs to the failing process.
        troubles: list[str | None] = [None] * self.count
        dist.all_gather_object(troubles, trouble)
        if trouble is None:
            named = ", ".join(f"process {rank} ({kind})" for rank, kind in enumerate(troubles) if kind)
            raise ProcessError(f"{named} failed; its own message says why. {again}")

    def share(self, ids: Tensor) -> Tensor:
        """This process' slice of a draw: contiguous, in rank order, sizes equal up to one."""
        return ids.tensor_split(self.count)[self.rank] if self.count > 1 else ids

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
            raise message[1]
        result: T = message[0]
        return result

    def first_tensors(
        self, compute: Callable[[], dict[str, dict[str, Tensor]]], like: dict[str, dict[str, Tensor]]
    ) -> dict[str, dict[str, Tensor]]:
        """As `first` for nests of tensors, which are broadcast one by one without being pickled.

        Args:
            compute: gives the tensors on rank 0.
            like: tensors with the structure, shapes and device of the result.
        """
        if self.count == 1:
            return compute()
        result: dict[str, dict[str, Tensor]] = {}
        dtypes = self.first(lambda: _computed(compute, result))
        out: dict[str, dict[str, Tensor]] = {}
        for name in sorted(like):
            out[name] = {}
            for key in sorted(like[name]):
                place = like[name][key]
                value = (
                    result[name][key].contiguous()
                    if self.is_first
                    else torch.empty(place.shape, dtype=dtypes[name][key], device=place.device)
                )
                dist.broadcast(value, src=0)
                out[name][key] = value
        return {name: {key: out[name][key] for key in like[name]} for name in like}

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


def _one_gpu_a_rank() -> bool:
    return torch.cuda.is_available() and torch.cuda.device_count() >= int(
        os.environ.get("LOCAL_WORLD_SIZE", "1")
    )


def _computed(
    compute: Callable[[], dict[str, dict[str, Tensor]]], into: dict[str, dict[str, Tensor]]
) -> dict[str, dict[str, torch.dtype]]:
    into.update(compute())
    return {name: {key: tensor.dtype for key, tensor in nest.items()} for name, nest in into.items()}
