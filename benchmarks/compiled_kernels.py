"""What compiled kernels, and a traced computation of clipped sums, take next to today's: an experiment.

`--kernels` compiles four parts of a step by `torch.compile`: Box and Muller's transform, the norms and the
sums of three linear layers, and sum, noise, division and norm in one. It needs a compiler of C++. `--traced`
computes the clipped sums of an MLP by the engine, by operations written out by hand, and by their trace.

    python benchmarks/compiled_kernels.py --kernels
    python benchmarks/compiled_kernels.py --traced mlp-16
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from equipoise.gradients import GradientEngine
from equipoise.gradients.factors.outer import outer_norms, weighted_product
from equipoise.methods.clip_rules import Abadi
from equipoise.privacy.noise import streams

sys.path.insert(0, str(Path(__file__).parent))
NUMBERS, PARAMETERS, RECORDS = 1 << 18, 670_000, 18
WIDTHS = ((784, 512), (512, 512), (512, 10))


def least(run: Callable[[], object], visits: int, calls: int) -> float:
    """Milliseconds of a call by the processor's time, in the visit that was disturbed least."""
    found = math.inf
    for _ in range(visits):
        start = time.process_time()
        for _ in range(calls):
            run()
        found = min(found, (time.process_time() - start) / calls)
    return found * 1e3


def compared(name: str, today: Callable[[], Any], written: Callable[..., Any], *given: Any) -> None:
    """Print the seconds of compiling, the milliseconds of both, and whether the bits are the same."""
    start = time.time()
    compiled = torch.compile(written)
    results = [compiled(*given), today()]
    seconds = time.time() - start
    first, second = (r if isinstance(r, (list, tuple)) else [r] for r in results)
    equal = all(torch.equal(x.view(-1), y.view(-1)) for x, y in zip(first, second, strict=True))
    eager, other = least(today, 9, 10), least(lambda: compiled(*given), 9, 10)
    print(f"{name}: {seconds:.0f} s to compile, {eager:.3f} ms, compiled {other:.3f}, same bits: {equal}")


def kernels() -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (NUMBERS,), dtype=torch.int32)

    def eager_normals() -> Tensor:
        memory = bits.clone().view(torch.float32)
        streams._transform(memory.view(1, NUMBERS), 1.0)
        return memory

    def normals(raw: Tensor) -> Tensor:
        radius, angle = raw.view(1, NUMBERS).float().chunk(2, dim=-1)
        length = ((2.0**-33 + radius.abs() * 2.0**-31).log() * -2.0).sqrt()
        angle = angle * (math.pi * 2.0**-31)
        return torch.cat([length * angle.cos(), angle.sin() * length], -1)

    compared("normals", eager_normals, normals, bits)
    a, b = ([torch.randn(RECORDS, pair[side]) for pair in WIDTHS] for side in (0, 1))
    w = torch.rand(RECORDS)

    def norms(a: list[Tensor], b: list[Tensor]) -> Tensor:
        squares = [x.double().square().sum(1) * y.double().square().sum(1) for x, y in zip(a, b, strict=True)]
        return torch.stack(squares).sum(0).sqrt().float()

    def eager_norms() -> Tensor:
        return torch.stack([outer_norms(x, y) for x, y in zip(a, b, strict=True)]).sum(0).sqrt().float()

    compared("norms", eager_norms, norms, a, b)

    def sums(a: list[Tensor], b: list[Tensor], w: Tensor) -> list[Tensor]:
        return [(y * w[:, None]).t() @ x for x, y in zip(a, b, strict=True)]

    def eager_sums() -> list[Tensor]:
        return [weighted_product(x[:, None], y[:, None], w) for x, y in zip(a, b, strict=True)]

    compared("sums", eager_sums, sums, a, b, w)
    noise, total = torch.randn(PARAMETERS), torch.randn(PARAMETERS)

    def eager_estimate() -> tuple[Tensor, Tensor]:
        released = noise.clone().add_(total) / 16.0
        return released, torch.linalg.vector_norm(released)

    def estimate(noise: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        released = (noise + total) / 16.0
        return released, released.double().square().sum().sqrt().float()

    compared("estimate", eager_estimate, estimate, noise, total)


def traced(name: str) -> None:
    from tasks import TASKS

    torch.manual_seed(0)
    task = TASKS[name]()
    model, batch = task.model, {"input": task.inputs, "label": task.labels}
    engine = GradientEngine(model, lambda m, b: task.losses(m(b["input"]), b["label"]), batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    parameters = list(model.parameters())

    def plain() -> None:
        optimizer.zero_grad()
        task.losses(model(task.inputs), task.labels).mean().backward()
        optimizer.step()

    def by_engine() -> dict[str, Tensor]:
        gradients = engine(batch)
        return gradients.weighted_sums(Abadi().weights(gradients.row_norms(), 1.0))

    def by_hand(values: list[Tensor], x: Tensor, labels: Tensor) -> list[Tensor]:
        h, inputs, outputs = x.flatten(1), [], []
        for at in range(0, len(values), 2):
            inputs.append(h)
            outputs.append(torch.nn.functional.linear(h, values[at], values[at + 1]))
            h = outputs[-1].relu()
        losses = torch.nn.functional.cross_entropy(outputs[-1], labels, reduction="none")
        back = torch.autograd.grad(losses.sum(), outputs)
        squares = []
        for a, b in zip(inputs, back, strict=True):
            of_a, of_b = (torch.linalg.vector_norm(t, dim=1).double().square() for t in (a, b))
            squares.append(of_a * of_b + of_b)
        weights = 1.0 / torch.stack(squares).sum(0).sqrt().float().clamp(min=1.0)
        found = []
        for a, b in zip(inputs, back, strict=True):
            found += [(b * weights[:, None]).t() @ a, weights @ b]
        return found

    given = (parameters, task.inputs, task.labels)
    graph = make_fx(by_hand)(*given)

    def by_trace() -> list[Tensor]:
        with torch.no_grad():
            found: list[Tensor] = graph(*given)
        return found

    ways = {"plain": plain, "engine": by_engine, "by hand": lambda: by_hand(*given), "traced": by_trace}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(8):
        for way, run in ways.items():
            times[way].append(least(run, 4, 1))
    for way, own in times.items():
        ratio = statistics.median(x / y for x, y in zip(own, times["plain"], strict=True))
        print(f"{name} {way}: {statistics.median(own):.2f} ms, to plain {ratio:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernels", action="store_true", help="compile four parts of a step")
    parser.add_argument("--traced", nargs="*", default=[], choices=["mlp-16", "mlp"], help="MLPs to trace")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.kernels:
        kernels()
    for name in arguments.traced:
        traced(name)


if __name__ == "__main__":
    main()
