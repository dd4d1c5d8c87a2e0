"""The regressions of DP-C4, a short look at what the slow tests show in full, and the slow tests."""

from __future__ import annotations

import pytest

from equipoise.methods import DPSGD, DPC4Plus
from equipoise.methods.anchored import Every
from equipoise.methods.dp_c4 import Distance, ReleasedNorm
from equipoise.privacy import Poisson
from reproduction.findings import Site
from reproduction.harness import follow
from reproduction.papers import dp_c4
from reproduction.papers.small_regressions import POPULATION, regression
from reproduction.result_cache import ResultCache


def nothing(done: int, total: int, what: str) -> None:
    assert 0 < done <= total


def test_a_short_look_at_interpolation():
    """After 100 steps DP-C4+ is within reach of the solution and DP-SGD is still on its way."""
    sampling = Poisson(64, POPULATION, 3000)
    c4 = DPC4Plus(
        clip_norm=20.0,
        coupled=Distance(10.0),
        anchor=ReleasedNorm(4.0),
        anchor_batch_size=POPULATION,
        schedule=Every(16),
        noise_multiplier=2.6572,
        anchor_noise_multiplier=22.291,
    )
    problem = regression("interp")
    found = follow(c4, problem, sampling=sampling, learning_rate=0.1, seed=0, measure_at=[100])
    assert found[100] < 0.06
    sgd = DPSGD(clip_norm=1.0, noise_multiplier=2.044)
    found = follow(sgd, problem, sampling=sampling, learning_rate=0.02, seed=0, measure_at=[100])
    assert found[100] > 1


@pytest.mark.slow
def test_the_verdicts_hold():
    found = dp_c4.EXPERIMENT.carry_out(range(5), nothing, Site(None, ResultCache(None)))
    assert not [verdict for verdict in found.verdicts if not verdict.met]
