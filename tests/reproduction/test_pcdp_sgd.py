"""The projection experiment: its problems, its verdicts, and (slow) its acceptance margins."""

from __future__ import annotations

import statistics

import pytest

import equipoise as eq
from equipoise.methods import PublicRecords, PublicSubspace, RandomSubspace
from equipoise.privacy import Poisson
from reproduction.harness import follow
from reproduction.papers import pcdp_sgd

pytestmark = pytest.mark.filterwarnings("ignore:the subspace captures")
Z = 4.0


def small(method, rate):
    """The means in 100 dimensions: an eighth of the work of the experiment."""
    problem = pcdp_sgd.means(0, 5000, 100)
    found = follow(
        method, problem, sampling=Poisson(250, 5000, 120), learning_rate=rate, seed=0, measure_at=[120]
    )
    return found[120]


def test_a_good_subspace_wins_and_a_random_one_stays():
    """The reduced check: the order of the methods, with wide margins."""
    U = {"x": pcdp_sgd.span(0, 100)}
    span = PublicSubspace(PublicRecords(U), refresh_every=pcdp_sgd.NEVER)
    chance = RandomSubspace(dimension=10, refresh_every=pcdp_sgd.NEVER)
    pcdp = small(eq.PCDPSGD(source=span, clip_norm=3.0, noise_multiplier=Z), 0.03)
    pdp = small(eq.methods.PDPSGD(source=span, clip_norm=10.0, noise_multiplier=Z), 0.03)
    plain = small(eq.DPSGD(clip_norm=3.0, noise_multiplier=Z), 0.01)
    wrong = small(eq.methods.RandomProjection(source=chance, clip_norm=3.0, noise_multiplier=Z), 0.03)
    assert pcdp < 2e-3
    assert pcdp < pdp
    assert plain > 5 * pcdp
    assert wrong > 0.15


@pytest.mark.slow
def test_acceptance_margins():
    """The bars of the means, over three seeds."""
    ends = {}
    for run in pcdp_sgd.means_runs():
        found = [pcdp_sgd.measure(run, seed, points=1)[run.sampling.steps] for seed in (0, 1, 2)]
        ends[run.label] = statistics.median(found)
    assert ends["PCDP, V = U"] <= 6e-4
    assert ends["PDP, V = U"] >= 4 * ends["PCDP, V = U"]
    assert ends["DP-SGD"] >= 50 * ends["PCDP, V = U"]
    assert ends["PCDP, V random"] >= 0.25
    assert ends["PCDP, V 20 degrees off"] > ends["DP-SGD"]


def test_every_run_has_a_method():
    """A method that cannot be made would stop the experiment after an hour of others."""
    for run in pcdp_sgd.experiment_runs():
        assert run.method(0).name
