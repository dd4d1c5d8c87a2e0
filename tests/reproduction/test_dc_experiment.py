"""Two thresholds on heavy-tailed regression: the problem, the bars, and (slowly) whether they are met."""

from __future__ import annotations

import math

import pytest
import torch

from equipoise.methods import DCDPSGD
from equipoise.privacy import FullBatch
from reproduction.harness import follow
from reproduction.papers import find_experiment
from reproduction.papers.dc_dpsgd import ARMS, Arm, regression, summarise, verdicts


@pytest.mark.parametrize(
    ("noise", "variance", "skewness"), [("skewed", 20, 6.6), ("Gaussian", 20, 0), ("symmetric", 24, 0)]
)
def test_the_noise_has_the_moments_it_is_named_for(noise, variance, skewness):
    problem = regression(noise, 0, records=200_000)
    x, y = problem.data["x"].double(), problem.data["y"].double()
    ones = torch.cat([x, torch.ones(len(x), 1)], dim=1)
    rest = y - ones @ torch.linalg.lstsq(ones, y[:, None]).solution[:, 0]
    assert float(rest.var()) == pytest.approx(variance, rel=0.1)
    assert float((rest / rest.std()).pow(3).mean()) == pytest.approx(skewness, abs=2.0)
    assert problem.error(problem.make_model()) == pytest.approx(1.0)  # the answer lies on the sphere


def test_full_steps_without_noise_come_near_the_answer():
    """On Gaussian noise with hardly any noise of privacy: least squares, 51 * 20 / 2000 away."""
    problem = regression("Gaussian", 0, records=2000)
    method = DCDPSGD(clip_norm=1e4, body_clip_norm=1e4, noise_multiplier=1e-9)
    sampling = FullBatch(2000, 25)
    found = follow(method, problem, sampling=sampling, learning_rate=0.6, seed=0, measure_at=[0, 20])
    assert found[0] == pytest.approx(1.0)
    assert found[20] == pytest.approx(51 * 20 / 2000, rel=0.4)


def test_the_best_setting_of_the_single_threshold_is_compared():
    def arm(label):
        return Arm(label, "skewed", 4.0, DCDPSGD, 0.1)

    values = {"DP-SGD C=80 lr=0.005": 0.15, "DP-SGD C=100 lr=0.01": 0.1, "norm": 0.025, "norm, p=0.1": 0.1}
    runs = {arm(label): [{400: value}] for label, value in values.items()}
    runs |= {arm(label): [{400: value}] for label, value in {"trace": 0.2025, "random": 0.2}.items()}
    median, curves, table = summarise(runs)
    assert median["skewed", 4.0, "DP-SGD"] == 0.1
    assert table.rows[0][2] == "DP-SGD C=100 lr=0.01"
    assert {curve.label for curve in curves} == {"DP-SGD", "norm", "norm, p=0.1", "trace", "random"}
    said = {verdict.sentence: verdict.met for verdict in verdicts(median)}
    assert len(said) == 5  # what was not run is not judged
    assert all(said.values())
    worse = {**median, ("skewed", 4.0, "norm"): 0.05}
    assert not verdicts(worse)[0].met


def test_every_arm_is_there_once():
    assert len({(arm.label, arm.noise, arm.epsilon) for arm in ARMS}) == len(ARMS)
    assert find_experiment("dc-dpsgd").name == "dc-dpsgd"


@pytest.mark.slow
def test_the_bars_are_met_over_twenty_seeds():
    found = find_experiment("dc-dpsgd").run(range(20), lambda done, total, what: None)
    missed = [verdict for verdict in found.verdicts if not verdict.met]
    assert not missed
    assert len(found.verdicts) == 19
    assert all(math.isfinite(verdict.value) for verdict in found.verdicts)
