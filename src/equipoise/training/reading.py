"""Items of a data set by number: read in this process, or ahead of it in worker processes.

A worker reads an item as this process would, under random numbers of the record's own. So the items are the
same whoever reads them, and however many workers there are. They are collated in this process, in the order
of the draw. What a worker could not read, this process reads itself: a record that fails is then met where
it would have been without workers, and no message about it comes from a worker.

Workers get record numbers and the draw's secret through their pipes alone, and write neither down.

They read ahead within one draw. Which records the next draw has follows from the parameters that this step
leaves, so nobody knows it before this step's releases are booked. (`FixedEpochs` assigns whole epochs
beforehand; its guarantee counts no draw as secret.)
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.gradients.capture.random_numbers import GlobalState
from equipoise.training.randomness import Randomness

_log = logging.getLogger("equipoise.training")


class WorkersLostError(RuntimeError):
    """Worker processes die again and again, which is no record's fault; the step can be taken again."""


class ItemReader:
    """Reads items by number, each under random numbers of its own.

    Args:
        data: a map-style data set; its `__getitems__(numbers)` is asked where it has one.
    """

    def __init__(self, data: Any) -> None:
        self._data = data
        self._draws_numbers = False

    def read(self, numbers: list[int], randomness: Randomness | None) -> list[Any]:
        """The items; see `RecordSource.read`."""
        if randomness is None:
            return self._items(numbers)
        if not self._draws_numbers:  # most data sets draw none, and need no streams
            before = GlobalState()
            try:
                items = self._items(numbers)
            except Exception:
                if not before.moved():
                    raise
            if not before.moved():
                return items
            before.restore()
            self._draws_numbers = True
        items, before = [], GlobalState()
        try:
            for number in numbers:
                before.start(randomness(f"item {number}"))
                items += self._items([number])
        finally:
            before.restore()
        return items

    def _items(self, numbers: list[int]) -> list[Any]:
        together = getattr(self._data, "__getitems__", None)
        if together is None:
            return [self._data[number] for number in numbers]
        items = list(together(numbers))
        if len(items) != len(numbers):
            raise ValueError(
                f"data.__getitems__ answers {len(items)} items for {len(numbers)} numbers; it must give one "
                "for each, in their order"
            )
        return items


class ReadingWorkers:
    """Processes that read the items of micro-batches ahead.

    They start when they are first needed, and stay. Where one dies all are started again, once in a pass over
    a draw, and read again what was not handed over.

    Args:
        data: a map-style data set.
        count: how many processes, 1 or more.
    """

    def __init__(self, data: Any, count: int) -> None:
        self._data, self._count = data, count
        self.pool: ProcessPoolExecutor | None = None

    def read(self, parts: Sequence[Tensor], randomness: Randomness) -> Iterator[dict[int, bytes]]:
        """The pickled items of each part in turn, by number, but for those that no worker could read or send.

        While a part is in use the next one is read.

        Args:
            parts: numbers of records, each a LongTensor [b].
            randomness: gives each item its random numbers, by the number of its record. It must be picklable.

        Raises:
            WorkersLostError: workers died twice.
        """
        # Each worker has two pieces of a part.
        tasks = [
            (place, numbers.tolist())
            for place, part in enumerate(parts)
            for numbers in torch.split(part, max(1, math.ceil(len(part) / (2 * self._count))))
        ]
        asked: dict[int, Future[dict[int, bytes]]] = {}
        done, has_restarted = 0, False
        try:
            for place in range(len(parts)):
                items: dict[int, bytes] = {}
                while done < len(tasks) and tasks[done][0] == place:
                    try:
                        for number in range(done, len(tasks)):
                            if number not in asked and tasks[number][0] <= place + 1:
                                asked[number] = self._pool().submit(_items_of, tasks[number][1], randomness)
                        items |= asked.pop(done).result()
                        done += 1
                    except BrokenExecutor:
                        self.close()
                        asked.clear()
                        if has_restarted:
                            raise WorkersLostError(
                                "worker processes that read records died twice, as where a system ends them "
                                "for want of memory. Nothing was booked for this step: take it again, or "
                                f"resume the run, with fewer workers or none (workers={self._count})"
                            ) from None
                        has_restarted = True
                        _log.warning(
                            "a worker process that reads records died; workers are started again, and read "
                            "what is missing"
                        )
                yield items
        except KeyboardInterrupt:
            self.close()  # Python would wait at its end for an item that hangs
            raise
        finally:
            for one in asked.values():
                one.cancel()

    def close(self) -> None:
        """End the processes; the next `read` starts others."""
        pool, self.pool = self.pool, None
        if pool is not None:
            # What they read now is not wanted, and an item that never comes would be waited for.
            for process in [*(pool._processes or {}).values()]:
                process.terminate()
            pool.shutdown(cancel_futures=True)

    def __reduce__(self) -> Any:
        return type(self), (self._data, self._count)  # a copy has processes of its own

    def _pool(self) -> ProcessPoolExecutor:
        if self.pool is None:
            self.pool = ProcessPoolExecutor(
                self._count, multiprocessing.get_context(), _begin, (self._data, os.getpid())
            )
        return self.pool


_reader: ItemReader  # of a worker


def _begin(data: Any, parent: int) -> None:
    """Begin as a worker."""
    global _reader
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that trains
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by which a pool ends the others where one has died
    torch.set_num_threads(1)
    _reader = ItemReader(data)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """End where the process that trains was killed: other workers hold its end of the pipes open.

    Under the start method "forkserver" the parent of a worker is another process, and ends with that one.
    """
    started_by = os.getppid()
    with contextlib.suppress(ProcessLookupError):
        while os.getppid() == started_by:
            os.kill(parent, 0)
            time.sleep(2)
    os._exit(1)


def _items_of(numbers: list[int], randomness: Randomness) -> dict[int, bytes]:
    """The items that can be read and sent, by number: each by itself, so that none decides over another."""
    items: dict[int, Any] = {}
    try:
        items = dict(zip(numbers, _reader.read(numbers, randomness), strict=True))
    except Exception:  # one of them
        for number in numbers if len(numbers) > 1 else []:
            with contextlib.suppress(Exception):
                (items[number],) = _reader.read([number], randomness)
    answer = {}
    for number, item in items.items():
        with contextlib.suppress(Exception):
            answer[number] = _pickled(item)
    return answer


class _Pickler(pickle.Pickler):
    """Tensors as arrays, since torch's own way takes a file for each one; axes stay in their order in memory.

    By that order joining chooses the form of the batch, and a convolution its kernel.
    """

    def reducer_override(self, value: Any) -> Any:
        if type(value) is np.ndarray and not value.dtype.hasobject and not value.flags.forc:
            order = _by_stride(value.strides)
            return np.transpose, (np.ascontiguousarray(value.transpose(order)), np.argsort(order).tolist())
        if type(value) is not Tensor or value.device.type != "cpu" or value.layout != torch.strided:
            return NotImplemented
        if value.requires_grad or value.is_quantized or value.is_conj() or value.is_neg():
            return NotImplemented
        order = _by_stride(value.stride())
        if not value.permute(order).is_contiguous():
            value = value.permute(order).contiguous().permute(np.argsort(order).tolist())
        flat = value.as_strided((value.numel(),), (1,))
        return _tensor, (flat.view(torch.uint8).numpy(), value.dtype, value.shape, value.stride())


def _by_stride(strides: Sequence[int]) -> list[int]:
    """The axes from the outermost in memory to the innermost; those that are repeated come first."""
    return sorted(range(len(strides)), key=lambda axis: -abs(strides[axis]) or -math.inf)


def _tensor(content: Any, dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(content).view(dtype).as_strided(shape, strides)


def _pickled(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()
