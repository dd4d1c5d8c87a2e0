"""Micro-batches: how many records a forward has, at most.

Every forward of private records has the same number of rows, filled up by fillers, so that the number of
records that were drawn shows in no shape. The size is published. It follows from public numbers,
from what fits, which is measured on fillers, and on a few private records only if the model fails on those.
Their shape is that of a few private records, and whether random numbers are shared is found on private ones
too: the statement names it.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, get_args

from torch import Tensor

from equipoise.distributed.processes import Processes
from equipoise.gradients import GradientEngine
from equipoise.gradients.capture.isolation import undisturbed
from equipoise.gradients.capture.random_numbers import RandomUse
from equipoise.gradients.capture.recorder import PlanMismatch
from equipoise.gradients.compare import ROW_TILE, SEEDS
from equipoise.gradients.engine_inputs import fillers
from equipoise.privacy import Sampling
from equipoise.training.arguments import TrainingInputs
from equipoise.training.randomness import public_randomness
from equipoise.training.record_source import DataError
from equipoise.training.setup.memory_use import PASS_OVERHEAD, fitting, forward_cost
from equipoise.training.setup.pipeline_trials import Pipeline

#: From so many rows on, sizes are multiples of it, and of `ROW_TILE` with it. A choice: finer ones save few
#: filler rows.
TILE = 16


@dataclass(frozen=True)
class MicroBatches:
    """How the records of a draw share forwards.

    Attributes:
        size: the most private records of a forward.
        random_use: whose random numbers are drawn while records are joined, augmented and run.
        record_bytes: memory that one record takes in a step.
        takes_zeros: zeros fill up a forward: the model runs on them what was planned, and gives finite rows.
    """

    size: int
    random_use: RandomUse
    record_bytes: float
    takes_zeros: bool


def choose_micro_batches(
    engine: GradientEngine,
    pipeline: Pipeline,
    example: Any,
    prepared: Any,
    probes: Tensor,
    inputs: TrainingInputs,
    processes: Processes,
    is_resumed: bool,
) -> MicroBatches:
    """Choose their size by what is measured on a few records.

    Args:
        engine, pipeline: they run on these records.
        example, prepared: a batch of a few records, as it is read and as the engine takes it.
        probes: numbers of records that can be read.
        inputs: may name the size, and say how many records a draw has.
        processes: share them.
        is_resumed: the run goes on.

    Raises:
        DataError: records share random numbers, and the data hold more of them than the stated population.
    """
    given, sampling = inputs.data.microbatch_size, inputs.sampling
    # What is measured on these is published: the micro-batch size, and how rows round.
    takes_zeros, public = False, prepared
    with suppress(Exception):  # an augmentation that does not take them
        zeros = pipeline.prepare(fillers(example, 4), public_randomness(pipeline.seed, "example"))
        takes_zeros = engine.serves(zeros)
    if takes_zeros:
        public = zeros
    record_bytes, overhead = forward_cost(engine.model, engine.loss, public)
    # The worst of all processes': they assign the records of a draw in one way.
    mine = pipeline.random_use(probes)
    if mine == "own" and _operations_follow_numbers(engine, public):
        mine = "shared"  # who runs alone has other numbers, and whether it does follows the whole micro-batch
    random_use = max(processes.all_of(mine), key=get_args(RandomUse).index)
    if random_use == "shared" and len(pipeline.source) > sampling.population:
        raise DataError(
            f"data hold more records than population={sampling.population}, and records share a random "
            "number (one for a whole layer, say), so that there have to be places for all: state a "
            "population that covers the records. Nothing was spent."
        )
    num_parameters = sum(p.numel() for p in pipeline.params.values())
    most = fitting(record_bytes, num_parameters, pipeline.prepare.device)
    if is_resumed and given is not None:
        size = given  # a run that goes on has its size: another would be another question
    else:
        mine_too = _size(given, most, sampling, processes, random_use, overhead)
        size = processes.first(lambda: mine_too)  # for what each of them measures, and all must do alike
    return MicroBatches(size, random_use, record_bytes, takes_zeros)


def _operations_follow_numbers(engine: GradientEngine, batch: Any) -> bool:
    """Whether other random numbers open or close a branch of the model."""
    for seed in range(SEEDS):
        try:
            with undisturbed(engine.model, seed, dropout=True):
                engine.run_plan(batch, None)
        except PlanMismatch:
            return True
        except Exception:  # numbers that the model does not take, such as those that drop all tokens
            continue
    return False


def micro_batch_sizes(most: int, mean: float, deviation: float, overhead: float = PASS_OVERHEAD) -> list[int]:
    """Micro-batch sizes up to `most`, the cheapest for a step first.

    Args:
        most: the largest allowed.
        mean, deviation: of the number of records that this process gets in a draw.
        overhead: of a forward, in rows.

    >>> micro_batch_sizes(1024, mean=256, deviation=16)[0], micro_batch_sizes(48, mean=256, deviation=16)[0]
    (288, 48)
    """
    tiles = [*range(ROW_TILE, TILE, ROW_TILE), *range(TILE, most + 1, TILE)]
    sizes = [tile for tile in tiles if tile <= most] or [most]
    return sorted(sizes, key=lambda size: expected_passes(size, mean, deviation) * (overhead + size))


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


def _size(
    given: int | None,
    most: int,
    sampling: Sampling,
    processes: Processes,
    random_use: RandomUse,
    overhead: float,
) -> int:
    """The best micro-batch size; `most` records fit into the memory."""
    mean, deviation = sampling.expected_size / processes.parts, sampling.size_deviation / processes.parts
    if random_use == "shared":  # places are kept for more records than are drawn
        mean, deviation = sampling.largest_size / processes.parts, 0.0
    if given is None:
        return micro_batch_sizes(most, mean, deviation, overhead)[0]
    # As given, but no larger than any draw will be: the rest would be fillers.
    return min(given, max(1, math.ceil(mean + 6 * deviation)))
