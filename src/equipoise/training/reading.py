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
import itertools
import logging
import math
import os
import pickle
import queue
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
import torch.multiprocessing
from torch import Tensor

from equipoise.gradients.capture.random_numbers import GlobalState
from equipoise.training.randomness import Randomness

__all__ = ["ItemReader", "ReadingWorkers", "WorkersLostError"]

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

    They start when they are first needed, and stay. One that dies is started again, and reads again what it
    had not handed over.

    Args:
        data: a map-style data set.
        count: how many processes, 1 or more.
    """

    def __init__(self, data: Any, count: int) -> None:
        self._data, self._count = data, count
        self._workers: list[_Worker] = []
        self._waiting: deque[tuple[int, _Worker, bytes]] = deque()  # part, who reads it, task

    def read(self, parts: Sequence[Tensor], randomness: Randomness) -> Iterator[dict[int, bytes]]:
        """The pickled items of each part in turn, by number, but for those that no worker could read or send.

        While a part is in use the next one is read.

        Args:
            parts: numbers of records, each a LongTensor [b].
            randomness: gives each item its random numbers, by the number of its record. It must be picklable.

        Raises:
            WorkersLostError: a worker died twice over the same items.
        """
        # Answers that nobody took, because of an error, are of no use any more.
        if self._waiting:
            self.close()
        waiting = self._waiting = deque[tuple[int, _Worker, bytes]]()
        tasks = deque(self._tasks(parts, randomness))
        try:
            if not self._workers:
                self._workers = [_Worker(self._data) for _ in range(self._count)]
            workers = itertools.cycle(self._workers)
            for place in range(len(parts)):
                while tasks and tasks[0][0] <= place + 1:
                    waiting.append((tasks[0][0], next(workers), tasks.popleft()[1]))
                    waiting[-1][1].send(waiting[-1][2])
                items: dict[int, bytes] = {}
                while waiting and waiting[0][0] == place:
                    worker = waiting[0][1]
                    items |= self._answer(worker, [task for _, one, task in waiting if one is worker])
                    waiting.popleft()
                yield items
        except BaseException:
            if waiting and self._waiting is waiting:  # a message may have been read by half
                self.close()
            raise

    def close(self) -> None:
        """End the processes; the next `read` starts others."""
        workers, self._workers = self._workers, []
        self._waiting.clear()
        for worker in workers:
            worker.end()

    def __reduce__(self) -> Any:
        return type(self), (self._data, self._count)  # a copy has processes of its own

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def _tasks(self, parts: Sequence[Tensor], randomness: Randomness) -> Iterator[tuple[int, bytes]]:
        """The parts' numbers in pieces, so that each worker has two of a part."""
        for place, part in enumerate(parts):
            size = max(1, min(_MOST_NUMBERS, math.ceil(len(part) / (2 * self._count))))
            for numbers in torch.split(part, size):
                yield place, pickle.dumps((numbers.tolist(), randomness))

    def _answer(self, worker: _Worker, tasks: list[bytes]) -> dict[int, bytes]:
        """What the worker says to the first of its tasks; it is started again once if it has died."""
        for is_second in (False, True):
            try:
                answer = worker.connection.recv_bytes()
            except (EOFError, OSError):
                if is_second:
                    break
                _log.warning(
                    "a worker process that reads records died (exit code %s); it is started again, and "
                    "reads what is missing",
                    worker.exit_code(),
                )
                worker.start()
                for task in tasks:
                    worker.send(task)
            else:
                return dict(pickle.loads(answer))
        raise WorkersLostError(
            f"a worker process that reads records died twice over the same ones (exit code "
            f"{worker.exit_code()}; -9 is how a system ends a process when memory runs out). Nothing was "
            "booked for this step: take it again, or resume the run, with fewer workers or none "
            f"(workers={self._count})"
        )


# Of a task: it must fit into a pipe that nobody empties (64 KiB on Linux), or trainer and worker wait for
# each other.
_MOST_NUMBERS = 256


class _Worker:
    """A process and the pipe to it."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self.process: BaseProcess | None = None
        self.start()

    def start(self) -> None:
        """Start it, in the place of one that has died."""
        self.end()
        context = torch.multiprocessing.get_context()
        self.connection, theirs = context.Pipe()
        # A daemon: it does not outlive an interpreter that ends in order.
        self.process = context.Process(
            target=_serve, args=(theirs, self._data, os.getpid()), name="equipoise reader", daemon=True
        )
        self.process.start()
        theirs.close()  # so that the pipe ends with the process

    def send(self, task: bytes) -> None:
        """Give it a task; one that has died takes it after it was started again."""
        with contextlib.suppress(OSError):
            self.connection.send_bytes(task)

    def exit_code(self) -> int | None:
        if self.process is None:
            return None
        self.process.join(timeout=5)
        return self.process.exitcode

    def end(self) -> None:
        """End the process, if it runs."""
        process, self.process = self.process, None
        if process is not None and process._parent_pid == os.getpid():  # type: ignore[attr-defined]
            self.connection.close()
            process.kill()
            process.join()


def _serve(connection: Connection, data: Any, parent: int) -> None:
    """Answer tasks until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that trains
    torch.set_num_threads(1)
    reader = ItemReader(data)
    answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    # A pipe holds little: what is read waits here until it is asked for.
    threading.Thread(target=_hand_over, args=(connection, answers), daemon=True).start()
    with contextlib.suppress(EOFError, OSError):
        while True:
            while not connection.poll(2):
                if os.getppid() != parent:  # killed: other workers hold its end of the pipe open
                    return
            numbers, randomness = pickle.loads(connection.recv_bytes())
            answers.put(_answer_to(reader, numbers, randomness))


def _hand_over(connection: Connection, answers: queue.SimpleQueue[bytes]) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection.send_bytes(answers.get())


def _answer_to(reader: ItemReader, numbers: list[int], randomness: Randomness) -> bytes:
    """The items that can be read and sent, by number: each by itself, so that none decides over another."""
    items: dict[int, Any] = {}
    try:
        items = dict(zip(numbers, reader.read(numbers, randomness), strict=True))
    except Exception:  # one of them
        for number in numbers if len(numbers) > 1 else []:
            with contextlib.suppress(Exception):
                (items[number],) = reader.read([number], randomness)
    answer = {}
    for number, item in items.items():
        with contextlib.suppress(Exception):
            answer[number] = _pickled(item)
    return pickle.dumps(answer)


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
