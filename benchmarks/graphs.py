"""Whether a training that launches graphs has the bits of one of operations, and if not, what has others.

    python benchmarks/graphs.py    # on a GPU; on the processor the first network, whose graphs are recorded

By network: whether two trainings without graphs are the same; in which step one with graphs parts from them;
what is launched and what is refused; each launch beside its operations on the same tensors, and why one is
not launched; each operation of a trace alone, in a graph and outside of one.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn

import equipoise as eq
from equipoise import _launched
from equipoise._launched import CudaGraph, Launched, _Generators, _same

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import tasks
from step_time import private_training
from tests.recorded_graphs import RecordedGraph

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
GRAPH: Any = CudaGraph if DEVICE.type == "cuda" else RecordedGraph
STEPS = 9


def with_dropout() -> tasks.Task:
    task = tasks.mlp(20, width=16)
    task.model.insert(2, nn.Dropout(0.3))  # type: ignore[operator]
    return task


CASES: dict[str, tuple[Callable[[], tasks.Task], dict[str, Any]]] = {
    "mlp": (lambda: tasks.mlp(20, width=16), {}),
    "dropout": (with_dropout, {}),
    "microbatches": (lambda: tasks.mlp(20, width=16), {"microbatch_size": 5}),
    "two sums": (
        lambda: tasks.mlp(20, width=16),
        {"method": eq.DiceSGD(clip_norm=0.1, residual_clip_norm=0.6, noise_multiplier=1.0)},
    ),
    "cnn": (lambda: tasks.cnn(8), {}),
}


def trained(name: str, graphs: bool, steps: int = STEPS) -> tuple[Any, list[Tensor]]:
    """A training from public seeds, and its parameters after each step."""
    make, options = CASES[name]
    torch.manual_seed(0)
    task = make()
    with mock.patch.dict(_launched.GRAPHS, {DEVICE.type: GRAPH} if graphs else {}, clear=True):
        run = private_training(task, run=eq.Run(seed=0, reproducible=True), device=DEVICE, **options)
        steps_of = zip(range(steps), run, strict=False)
        return run, [torch.cat([p.detach().flatten() for p in run.parameters.values()]) for _ in steps_of]


def apart(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0


def launches_of(run: Any) -> Iterator[Launched]:
    return (one for traced in run.engine._traced.values() if traced for one in traced.launches)


def beside_operations() -> Any:
    """Let each launch be followed by its operations on the same tensors, and say where they differ."""
    launch = Launched._launch

    def both(self: Launched, graph: Any, tensors: Any) -> list[Tensor]:
        before = _Generators(self._device)
        found = launch(self, graph, tensors)
        kept, after = [one.clone() for one in found], _Generators(self._device)
        before.restore()
        expected = self._stretch(*tensors)
        after.restore()
        pairs = enumerate(zip(kept, expected, strict=True))
        if wrong := {at: apart(*pair) for at, pair in pairs if not _same(pair[:1], pair[1:])}:
            print(f"    launch {self.count} differs from its operations at {wrong}", flush=True)
        return found

    return mock.patch.object(Launched, "_launch", both)


def with_reasons() -> Any:
    """Say why what was captured is not launched."""
    call = Launched.__call__

    def said(self: Launched, *tensors: Tensor) -> list[Tensor]:
        if self._graph is not None and not self.refused:
            places, uses = self._places_of(tensors), self._uses_now(self._uses)
            if places != self._captured_at:
                moved = [
                    at
                    for at, pair in enumerate(zip(places, self._captured_at, strict=True))
                    if len({*pair}) > 1
                ]
                print(f"    not launched: inputs {moved} lie elsewhere", flush=True)
            elif uses != self._uses:
                print(
                    f"    not launched: {sum(uses[k] != n for k, n in self._uses.items())} in use", flush=True
                )
        return call(self, *tensors)

    return mock.patch.object(Launched, "__call__", said)


class Alone(fx.Interpreter):
    """Runs each operation in a graph, too."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = super().call_function(target, args, kwargs)
        schema = getattr(target, "_schema", None)
        if schema is None or schema.is_mutable or "empty" in schema.name:
            return out
        try:
            graph = GRAPH(lambda: _tensors(target(*args, **kwargs)), DEVICE)
            graph.launch()
            if not _same(graph.outputs, expected := _tensors(out)):
                print(f"    {target}: {[*map(apart, graph.outputs, expected)]}", flush=True)
        except RuntimeError as error:
            print(f"    {target}: {str(error).splitlines()[0]}", flush=True)
        return out


def _tensors(out: Any) -> list[Tensor]:
    return [one for one in (out if isinstance(out, (list, tuple)) else [out]) if isinstance(one, Tensor)]


def operations_alone(run: Any, task: tasks.Task) -> None:
    """Each operation of the first trace."""
    traced = next(one for one in run.engine._traced.values() if one)
    values = [run.parameters[name].detach() for name in traced.parameters]
    inputs, labels = (one[: traced.like.num_records].to(DEVICE) for one in (task.inputs, task.labels))
    with torch.no_grad():
        found = Alone(traced.rows.graph).run(*values, inputs, labels)
        Alone(traced.norms.graph).run(*found[1:])
        Alone(traced.sums.graph).run(*found[1:], torch.ones(len(found[0]), device=DEVICE))


def main() -> None:
    warnings.simplefilter("ignore")
    for name, (make, _) in [*CASES.items()][: None if DEVICE.type == "cuda" else 1]:
        (_, first), (_, second), (run, found) = (trained(name, graphs) for graphs in (False, False, True))
        same = [torch.equal(*pair) for pair in zip(second, found, strict=True)]
        print(f"{name}: twice without graphs the same: {torch.equal(first[-1], second[-1])}")
        print(f"  with graphs the same in steps {[at for at, one in enumerate(same, 1) if one]}", flush=True)
        for one in launches_of(run):
            print(f"    {one.count} launches; {one.refused or 'not refused'}", flush=True)
        with beside_operations(), with_reasons():
            trained(name, True)
        operations_alone(run, make())


if __name__ == "__main__":
    main()
