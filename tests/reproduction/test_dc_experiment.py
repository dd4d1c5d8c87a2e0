"""Two thresholds on heavy-tailed regression: the problem, the bars, and (slowly) whether they are met."""

from __future__ import annotations

import math

import pytest

from equipoise.methods import DCDPSGD
from equipoise.methods.base import Setting
from equipoise.privacy import FullBatch
from equipoise.published.dc_dpsgd import average_noise
from reproduction.harness import follow
from reproduction.papers import dc_dpsgd_ablations, find_experiment
from reproduction.papers.dc_dpsgd import regression


def test_full_steps_without_noise_come_near_the_answer():
    """On Gaussian noise with hardly any noise of privacy: least squares, 51 * 20 / 2000 away."""
    problem = regression("Gaussian", 0, records=2000)
    method = DCDPSGD(clip_norm=1e4, body_clip_norm=1e4, noise_multiplier=1e-9)
    sampling = FullBatch(2000, 25)
    found = follow(method, problem, sampling=sampling, learning_rate=0.6, seed=0, measure_at=[0, 20])
    assert found[0] == pytest.approx(1.0)
    assert found[20] == pytest.approx(51 * 20 / 2000, rel=0.4)


@pytest.mark.parametrize("form", [dc_dpsgd_ablations.ALGORITHM, dc_dpsgd_ablations.PROGRAM])
def test_labels_by_lot_have_the_noise_of_the_form(form):
    """In the column k of the ablations "none" differs from 200 in the labels alone."""
    usual, lots = (dc_dpsgd_ablations.Arm("images", form, "k", k) for k in ("200", "none"))
    setting = Setting(sampling=usual.sampling, budget=dc_dpsgd_ablations.BUDGET)
    (release,) = lots.method().plan(setting).releases.releases
    noise = release.mechanism.noise_multiplier * release.max_bound
    method = usual.method()
    plan = method.plan(setting)
    if form == dc_dpsgd_ablations.ALGORITHM:
        (printed,) = plan.releases.releases
        assert noise == pytest.approx(printed.mechanism.noise_multiplier * printed.max_bound)
    else:
        assert noise == pytest.approx(average_noise(plan.constants[0], 1.0, 0.1, 0.1))


@pytest.mark.slow
def test_the_bars_are_met_over_twenty_seeds():
    found = find_experiment("dc-dpsgd").run(range(20), lambda done, total, what: None)
    missed = [verdict for verdict in found.verdicts if not verdict.met]
    assert not missed
    assert len(found.verdicts) == 19
    assert all(math.isfinite(verdict.value) for verdict in found.verdicts)
