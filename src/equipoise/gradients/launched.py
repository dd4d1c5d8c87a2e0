"""Lines that a device launches as a whole.

The host starts each operation of a line by itself, which takes it some five microseconds; most kernels of a
small network take less. A CUDA graph holds the kernels of a line together with the addresses that they read
and write, and is launched as one. It computes what the operations compute, to the bit: that is compared when
a graph is captured, and a graph that differs is not used.

What follows from the fixed addresses:

- Parameters, buffers and tensors of factors are read where they lie. Records and weights, which lie elsewhere
  in each step, are copied to where the graph reads them.
- A launch writes over what the last one returned. While anything of that is still in use (the rows of another
  parameter point, the sums of the first microbatch), the line runs operation by operation.
- Random numbers are those of the device's generator, whose seed a launch takes over.

A graph holds as much memory as the line takes; the microbatch size leaves room for it (`fitting` counts on a
quarter of what is free).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from equipoise._foreign_errors import where_raised
from equipoise.gradients.capture.random_numbers import GlobalState
from equipoise.gradients.trace import Line


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


#: What captures on each kind of device.
GRAPHS: dict[str, Callable[[Callable[[], list[Tensor]], torch.device], Graph]] = {"cuda": CudaGraph}


class Launched:
    """What runs a line as one launch where it can, and operation by operation elsewhere.

    Args:
        line: the operations.
        copied: inputs that lie elsewhere in each step, by their names' first part.

    Attributes:
        count: launches so far.
        refused: why the line is not captured; "" where it is, or may be.
    """

    def __init__(self, line: Line, copied: str) -> None:
        self._line = line
        self._copied = [name.partition(":")[0] == copied for name in line.inputs]
        self._graph: Graph | None = None
        self._given: list[Tensor] = []  # copies, which the graph reads
        self._places: tuple[Any, ...] = ()  # of what stays where it is, and settings, in the last call
        self._captured_at: tuple[Any, ...] = ()
        self._uses: dict[int, int] = {}  # of the graph's memory, while nobody else holds it
        self.count, self.refused = 0, ""

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """What the line returns for these."""
        places, before = self._places_of(tensors), self._places
        self._places = places
        if self.refused:
            return self._line(*tensors)
        if self._graph is None or self._captured_at != places:
            # Twice at the same places: they will be met again. One form of records may come only once.
            return self._capture(tensors) if places == before else self._line(*tensors)
        if self._uses != self._uses_now(self._uses):
            return self._line(*tensors)
        return self._launch(self._graph, tensors)

    def _launch(self, graph: Graph, tensors: Sequence[Tensor]) -> list[Tensor]:
        if self._given:
            given = [t for t, is_copied in zip(tensors, self._copied, strict=True) if is_copied]
            torch._foreach_copy_(self._given, given)
        graph.launch()
        self.count += 1
        # Others in each launch, so that their memory tells whether one of them is still in use.
        return [output.detach() for output in graph.outputs]

    def _places_of(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        given = zip(tensors, self._copied, strict=True)
        places = [(t.shape, t.dtype) if copied else t.data_ptr() for t, copied in given]
        return (*places, *_settings())

    def _uses_now(self, memory: Iterable[int]) -> dict[int, int]:
        return {storage: torch._C._storage_Use_Count(storage) for storage in memory}

    def _capture(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Capture the line, and run it."""
        device = tensors[-1].device
        state = GlobalState(device)
        self._graph, self._uses = None, {}
        read = [t.clone() if copied else t for t, copied in zip(tensors, self._copied, strict=True)]
        self._given = [t for t, copied in zip(read, self._copied, strict=True) if copied]
        run = partial(self._line, *read)
        expected = self._line(*tensors)
        after = GlobalState(device)
        state.restore()
        try:
            graph = GRAPHS[device.type](run, device)
            held = {tensor.untyped_storage()._cdata for tensor in read}
            for storage in (output.untyped_storage() for output in graph.outputs):
                if storage._cdata not in held:
                    # So that a launch that does nothing shows.
                    storage.fill_(77)  # type: ignore[attr-defined]
            state.restore()
            found = self._launch(graph, tensors)
            if not _same(found, expected):
                state.restore()
                if _same(run(), expected):  # kernels that add in any order differ from themselves, too
                    raise RuntimeError("its numbers are not those of the operations")
        except Exception as error:  # whatever a capture raises, memory that ran out too
            self.refused, self._given = f"{where_raised(error)}: {error}".partition("\n")[0], []
            return expected
        finally:
            after.restore()
        del found
        stay = {
            t.untyped_storage()._cdata for t, copied in zip(tensors, self._copied, strict=True) if not copied
        }
        memory = {t.untyped_storage()._cdata for t in [*graph.outputs, *self._given]} - stay
        # Last the graph: before that, an interrupt leaves the line to its operations.
        self._captured_at = self._places
        self._uses = self._uses_now(memory)
        self._graph = graph
        return expected


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


#: The lines of a trace, and the inputs of each that lie elsewhere in each step.
LINES = {"rows": "record", "norms": "", "sums": "weights"}


def launched(traced: Any, device: torch.device) -> Any:
    """The same trace with each line launched as one where a device can do that."""
    if device.type not in GRAPHS or "sums" not in vars(traced):
        return traced  # losses alone are asked for at other parameters in each step, which lie elsewhere
    lines = {name: line for name, line in vars(traced).items() if name in LINES}
    return replace(
        traced, **{name: replace(line, run=Launched(line, LINES[name])) for name, line in lines.items()}
    )


def runs_of(traced: Any) -> list[Launched]:
    """What launches the lines of a trace."""
    lines = [line for name, line in vars(traced).items() if name in LINES]
    return [line.run for line in lines if isinstance(line.run, Launched)]
