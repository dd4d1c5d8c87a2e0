"""Which way to take a factor's norms: by count, or by a short measurement.

For one layer the Gram matrices, the products and the rows give the same numbers at costs that differ
tenfold either way, and no count of multiplications tells it all. So the ways are timed once, on a batch of
the real size, as a step uses them: making the factor's form, its norms and one weighted sum. Choices are
kept by ``signature()`` (kind and sizes without B) as plain strings; they travel with checkpoints, so that a
resumed or a second process computes the same numbers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

import torch

from equipoise.gradients.factors.base import Factor
from equipoise.gradients.numerics import full_precision

__all__ = ["choose", "measure"]


#: A factor this small is not worth a measurement: its time is a step's rounding error.
SMALL_ELEMENTS = 1 << 14


#: Ways that take memory are chosen where they are this much faster: rows stay from the norms to the sums,
#: and a grouped convolution reorders its operands.
ROWS_GAIN, GROUPED_GAIN = 1.1, 1.2


#: A way that took this many times the best one's time is not visited again.
FAR_BEHIND = 1.5


def measure(factor: Factor, repeats: int = 3) -> str:
    """The fastest way, by the least time of its norms and one weighted sum, with a handicap for memory.

    The ways are visited in turn, so that a busy moment of the machine meets all of them, and the least of the
    times is the one that other work disturbed least.
    """
    names = list(factor.kernels())
    if len(names) == 1 or factor.num_records == 0:
        return names[0]
    least = dict.fromkeys(names, math.inf)

    def cost(name: str) -> float:
        rows = ROWS_GAIN if name.startswith("rows") else 1.0
        return least[name] * rows * (GROUPED_GAIN if name.endswith("grouped") else 1.0)

    with full_precision(factor.device):
        for name in names:
            _seconds(factor, name)  # warms up
        for _ in range(repeats):
            for name in names:
                least[name] = min(least[name], _seconds(factor, name))
            best = min(map(cost, names))
            names = [name for name in names if cost(name) <= FAR_BEHIND * best]
    return min(names, key=cost)


def choose(factors: Iterable[Factor], measured: bool = True, repeats: int = 3) -> dict[str, str]:
    """Choices for all signatures among ``factors``.

    Args:
        factors: of one batch; of factors with one signature the first is measured.
        measured: time the ways of all but small factors; otherwise go only by count.
        repeats: timed runs of each way, after one to warm up.

    Returns:
        signature -> name. Plain strings, fit for a checkpoint.
    """
    choices: dict[str, str] = {}
    for factor in factors:
        signature = factor.signature()
        if signature in choices:
            continue
        small = factor.num_records * (factor.input_elements() + factor.shape.numel()) < SMALL_ELEMENTS
        choices[signature] = measure(factor, repeats) if measured and not small else factor.kernels()[0]
    return choices


def _seconds(factor: Factor, name: str) -> float:
    weights = torch.ones(factor.num_records, 1, device=factor.device)
    _wait(factor.device)
    start = time.perf_counter()
    form = factor.with_kernel(name)
    form.norms_squared()
    form.weighted_sum(weights)
    _wait(factor.device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
