"""The micro-batch size: how many records a forward has, always.

Every forward of private records has this number of rows, the last one of a draw filled up, so that the
number of records that were drawn shows in no shape. The size is published. It follows from public numbers,
from what fits, and from whether records keep their bits at any place. Both are measured on made-up records,
and on a few private ones only where the model fails on those. Their shape is that of a few private records,
and whether random numbers are shared is found on private ones too: the statement names it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from equipoise.gradients import GradientEngine
from equipoise.gradients.capture.random_numbers import RandomUse
from equipoise.privacy import Sampling
from equipoise.training.distributed import Processes

__all__ = ["micro_batch_sizes", "size_that_keeps_bits", "sizes_to_try"]


SMALL_TILE, TILE = 4, 16
#: How many micro-batch sizes are tried for one in which rows keep their bits.
TRIED_SIZES = 4

PASS_OVERHEAD = 32
"""What a pass costs beside its rows, in rows: 72 for the MLP of `benchmarks/tasks.py`, 29 for the CNN."""


def micro_batch_sizes(most: int, mean: float, deviation: float) -> list[int]:
    """Micro-batch sizes up to `most`, in whole tiles, the cheapest for a step first.

    Kernels work in tiles. In whole ones a row usually has the same bits wherever it stands.

    Args:
        most: the largest allowed.
        mean, deviation: of the number of records that this process gets in a draw.

    >>> micro_batch_sizes(1024, mean=256, deviation=16)[0], micro_batch_sizes(48, mean=256, deviation=16)[0]
    (288, 48)
    """
    tiles = [*range(SMALL_TILE, TILE, SMALL_TILE), *range(TILE, most + 1, TILE)]
    sizes = [size for size in tiles if size <= most] or [1]
    return sorted(sizes, key=lambda size: expected_passes(size, mean, deviation) * (PASS_OVERHEAD + size))


def expected_passes(size: int, mean: float, deviation: float) -> float:
    """Expected number of micro-batches of this size in a draw; a draw without records still has one.

    The number of records is taken as normal.

    >>> expected_passes(128, mean=256, deviation=0)
    2.0
    >>> round(expected_passes(288, mean=256, deviation=16), 3)  # 2.3% of the draws are larger
    1.023
    """
    if deviation == 0:
        return float(max(1, math.ceil(mean / size)))
    most = math.ceil((mean + 8 * deviation) / size)
    over = [math.erfc((k * size - mean) / (deviation * math.sqrt(2))) / 2 for k in range(1, most + 1)]
    return 1 + sum(over)


def sizes_to_try(
    given: int | None,
    most: int,
    sampling: Sampling,
    processes: Processes,
    is_resumed: bool,
    random_use: RandomUse,
) -> list[int]:
    """Micro-batch sizes, the best first.

    Args:
        given: the size in the settings.
        most: how many records fit into the memory.
        sampling: of the training.
        processes: who share the records of a draw.
        is_resumed: the run goes on.
        random_use: whether places are kept for more records than are drawn.
    """
    if is_resumed and given is not None:
        return [given]  # a run that goes on has its size: another would be another question
    mean, deviation = sampling.expected_size / processes.count, sampling.size_deviation / processes.count
    if random_use == "shared":
        mean, deviation = sampling.largest_size / processes.count, 0.0
    if given is None:
        return micro_batch_sizes(most, mean, deviation)
    # As given, but no larger than any draw will be: the rest would be filler.
    most = min(given, max(1, math.ceil(mean + 6 * deviation)))
    return [most, *micro_batch_sizes(most, mean, deviation)]


def size_that_keeps_bits(engine: GradientEngine, batch: Any, sizes: Sequence[int]) -> tuple[int, bool | None]:
    """The first size at which a row's bits do not follow its place, or the first; and whether they do not."""
    kept: bool | None = False
    for size in sizes[:TRIED_SIZES]:
        kept = engine.keeps_bits(batch, size)
        if kept is not False:
            return size, kept
    return sizes[0], kept
