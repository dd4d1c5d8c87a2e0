"""Stretches of operations that a device launches as a whole.

The host starts each operation by itself, which takes it some five microseconds; most kernels of a small
network take less. A CUDA graph holds the kernels of a stretch together with the addresses that they read and
write, and is launched as one. It computes what the operations compute, to the bit: that is compared when a
graph is captured, and a graph that differs is not used.

What follows from the fixed addresses:

- Parameters, buffers and tensors of factors are read where they lie. Records, and which rows are theirs, lie
  elsewhere in each step and are copied to where the graph reads them.
- A launch writes over what the last one returned. While anything of that is still in use (the rows of another
  parameter point, the sums of the first microbatch), the stretch runs operation by operation. Who keeps a
  result while others follow keeps a copy (`Kept`).
- Random numbers are those of the device's generator, whose seed a launch takes over.

A graph holds as much memory as the stretch takes; the microbatch size leaves room for it (`fitting` counts on
a quarter of what is free).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from equipoise._foreign_errors import where_raised

Stretch = Callable[..., list[Tensor]]
"""A function of tensors that reads no value, and whose shapes follow none."""


class Graph(Protocol):
    """Kernels that are launched as one.

    Attributes:
        outputs: what the function returned, where each launch writes it.
    """

    outputs: list[Tensor]

    def launch(self) -> None:
        """Run the kernels once more, on what now lies at their addresses."""


class CudaGraph:
    """A graph of CUDA kernels.

    Args:
        function: what is captured; it reads no value and allocates the same memory each time.
        device: where its tensors lie.
    """

    def __init__(self, function: Callable[[], list[Tensor]], device: torch.device) -> None:
        self._graph, self._device = torch.cuda.CUDAGraph(), device
        # PyTorch captures on a stream of the device that is current when it captures first. On another one it
        # would see no kernel. The threads of a data loader may use the device meanwhile.
        with torch.cuda.device(device):
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
                self.outputs = function()

    def launch(self) -> None:
        with torch.cuda.device(self._device):
            self._graph.replay()


#: What captures on each kind of device. None unless EQUIPOISE_GRAPHS=1: on an H200 (PyTorch 2.11) trainings
#: by graphs ended at other bits than those by operations, or launched none; `benchmarks/graphs.py` looks for
#: the reason, which nobody knows yet.
GRAPHS: dict[str, Callable[[Callable[[], list[Tensor]], torch.device], Graph]] = (
    {"cuda": CudaGraph} if os.environ.get("EQUIPOISE_GRAPHS") == "1" else {}
)


def launched(stretch: Stretch, copied: Sequence[bool], device: torch.device) -> Stretch:
    """The same as one launch if a device can do that.

    Args:
        stretch: the operations.
        copied: for each input whether it lies elsewhere in each step.
        device: where they run.
    """
    return Launched(stretch, copied, device) if device.type in GRAPHS else stretch


class Launched:
    """What runs a stretch as one launch where it can, and operation by operation elsewhere.

    Args:
        stretch, copied, device: as for `launched`.

    Attributes:
        count: launches so far.
        refused: why it is not captured; "" where it is, or may be.
    """

    def __init__(self, stretch: Stretch, copied: Sequence[bool], device: torch.device) -> None:
        self._stretch, self._copied, self._device = stretch, copied, device
        self._graph: Graph | None = None
        self._given: list[Tensor] = []  # copies, which the graph reads
        self._places: tuple[Any, ...] = ()  # of what stays where it is, and settings, in the last call
        self._captured_at: tuple[Any, ...] = ()
        self._uses: dict[int, int] = {}  # of the graph's memory, while nobody else holds it
        self.count, self.refused = 0, ""

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """What the stretch returns for these."""
        places, before = self._places_of(tensors), self._places
        self._places = places
        if self.refused:
            return self._stretch(*tensors)
        if self._graph is None or self._captured_at != places:
            # Twice at the same places: they will be met again. One form of records may come only once.
            return self._capture(tensors) if places == before else self._stretch(*tensors)
        if self._uses != self._uses_now(self._uses):
            return self._stretch(*tensors)
        return self._launch(self._graph, tensors)

    def _launch(self, graph: Graph, tensors: Sequence[Tensor]) -> list[Tensor]:
        if self._given:
            given = [t for t, is_copied in zip(tensors, self._copied, strict=True) if is_copied]
            torch._foreach_copy_(self._given, given, non_blocking=True)
        graph.launch()
        self.count += 1
        # Others in each launch, so that their memory tells whether one of them is still in use.
        return [output.detach() for output in graph.outputs]

    def _places_of(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        given = zip(tensors, self._copied, strict=True)
        places = [(t.shape, t.dtype) if copied else (t.data_ptr(), t.stride()) for t, copied in given]
        return (*places, *_settings())

    def _uses_now(self, memory: Iterable[int]) -> dict[int, int]:
        return {storage: torch._C._storage_Use_Count(storage) for storage in memory}

    def _capture(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Capture the stretch, and run it."""
        device = self._device
        state = _Generators(device)
        self._graph, self._uses = None, {}
        read = [
            t.to(device, copy=True) if copied else t for t, copied in zip(tensors, self._copied, strict=True)
        ]
        self._given = [t for t, copied in zip(read, self._copied, strict=True) if copied]
        expected = self._stretch(*tensors)
        after = _Generators(device)
        state.restore()
        try:
            graph = GRAPHS[device.type](partial(self._stretch, *read), device)
            # What was there before, a constant among the outputs too: it is no memory of the graph.
            held = {tensor.untyped_storage()._cdata for tensor in [*read, *expected]}
            for storage in (output.untyped_storage() for output in graph.outputs):
                if storage._cdata not in held:
                    # So that a launch that does nothing shows.
                    storage.fill_(77)  # type: ignore[attr-defined]
            state.restore()
            found = self._launch(graph, tensors)
            if not _same(found, expected):  # also kernels that add in any order
                raise RuntimeError("its numbers are not those of the operations")
        except Exception as error:  # whatever a capture raises, memory that ran out too
            self.refused, self._given = f"{where_raised(error)}: {error}".partition("\n")[0], []
            return expected
        finally:
            after.restore()
        del found
        memory = {t.untyped_storage()._cdata for t in graph.outputs} - held
        memory |= {t.untyped_storage()._cdata for t in self._given}
        # Last the graph: before that, an interrupt leaves the stretch to its operations.
        self._captured_at = self._places
        self._uses = self._uses_now(memory)
        self._graph = graph
        return expected


class _Generators:
    """Where PyTorch's generators stand."""

    def __init__(self, device: torch.device) -> None:
        self._all = [torch.default_generator]
        if device.type == "cuda":
            self._all.append(torch.cuda.default_generators[device.index or 0])
        self._states = [one.get_state() for one in self._all]

    def restore(self) -> None:
        for one, state in zip(self._all, self._states, strict=True):
            one.set_state(state)


class Kept(list[Tensor]):
    """Results that are kept for the end of a step."""

    _copies = 0

    def let_go(self) -> None:
        """Keep copies from here on: the next launch may write over them."""
        self[self._copies :] = [one.clone() for one in self[self._copies :]]
        self._copies = len(self)


def _settings() -> tuple[Any, ...]:
    """What chooses kernels beside the tensors."""
    return (
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
    )


def _same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether the bytes are the same."""
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(_bytes(one), _bytes(other)) for one, other in pairs)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
