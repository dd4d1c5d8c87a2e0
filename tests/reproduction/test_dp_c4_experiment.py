"""The regressions of DP-C4, a short look at what the slow tests show in full, and the slow tests."""

from __future__ import annotations

import pytest
import torch

from equipoise.methods import DPSGD, DPC4Plus
from equipoise.methods.anchored import Every
from equipoise.methods.dp_c4 import Distance, ReleasedNorm
from equipoise.privacy import Poisson
from reproduction.findings import Findings
from reproduction.harness import follow
from reproduction.papers import EXPERIMENTS, dp_c4, dp_c4_misfit, find_experiment
from reproduction.papers.small_regressions import NAMES, POPULATION, directions_rest, regression


def nothing(done: int, total: int, what: str) -> None:
    assert 0 < done <= total


@pytest.mark.parametrize("name", NAMES)
def test_the_error_is_zero_where_the_mean_gradient_is(name):
    problem = regression(name)
    model = problem.make_model()
    data = dict(problem.data)
    assert problem.error(model) > 0.5
    for _ in range(400):  # plain descent: the step size is below 2 / L on all of them
        (gradient,) = torch.autograd.grad(problem.loss(model, data).mean(), list(model.parameters()))
        with torch.no_grad():
            model.weight -= 0.7 * gradient
    assert problem.error(model) < 1e-6


def test_the_regressions_are_the_ones_described():
    data = regression("interp").data
    values = torch.linalg.eigvalsh(data["x"].T @ data["x"] / POPULATION)
    assert (float(values[0]), float(values[-1])) == pytest.approx((0.825, 1.201), abs=1e-3)
    assert directions_rest("skew") == pytest.approx(0.308, abs=0.01)
    with pytest.raises(ValueError, match="name='other'"):
        regression("other")


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


def test_the_experiments_are_in_the_table():
    for module in (dp_c4, dp_c4_misfit):
        assert module.EXPERIMENT.name in EXPERIMENTS
        assert find_experiment(module.EXPERIMENT.name) is module.EXPERIMENT
        labels = [contestant.label for contestant in module.contestants()]
        assert len(set(labels)) == len(labels)


@pytest.mark.slow
@pytest.mark.parametrize("module", [dp_c4, dp_c4_misfit])
def test_the_verdicts_hold(module):
    found = module.EXPERIMENT.run(range(module.EXPERIMENT.default_seeds), nothing)
    missed = [verdict for verdict in found.verdicts if not verdict.met]
    assert not missed, missed
    assert Findings.from_json(found.to_json()).verdicts == list(found.verdicts)
