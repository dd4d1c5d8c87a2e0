"""Epsilon: the worked numbers of the methods' literature, other accountants, and what has no accountant."""

import math
from dataclasses import replace

import dp_accounting as dp
import pytest

from equipoise.privacy import (
    FixedEpochs,
    FullBatch,
    Gaussian,
    PlanError,
    Poisson,
    PrivacyPlan,
    Release,
    WithoutReplacement,
    epsilon,
    gaussian_epsilon,
    gaussian_mu,
)

Q = 256 / 60_000
ANCHOR = 4096 / 60_000


def event(*parts):
    """Composition of (sampling rate, noise multiplier, count)."""
    events = []
    for rate, z, count in parts:
        gaussian = dp.GaussianDpEvent(z)
        sampled = gaussian if rate >= 1 else dp.PoissonSampledDpEvent(rate, gaussian)
        events.append(dp.SelfComposedDpEvent(sampled, count))
    return dp.ComposedDpEvent(events)


def joint(*multipliers):
    return sum(z**-2 for z in multipliers) ** -0.5


# name, parts, delta, relation, epsilon, epsilon by RDP (or None)
ADD, REPLACE = "add_or_remove_one", "replace_one"
FAST = [
    ("DP-SGD, T=4700", [(Q, 1, 4700)], 1e-5, ADD, 1.571, 1.761),
    ("DiceSGD joint", [(Q, 1, 2344)], 1e-5, ADD, 1.100, 1.352),
    ("RMS rounds, sampled query", [(Q, 1, 2350), (1024 / 60_000, 4, 50)], 1e-5, ADD, 1.110, None),
    ("RMS rounds, full query", [(Q, 1, 2350), (1, 20, 50)], 1e-5, ADD, 1.789, None),
    ("subspace release", [(Q, 1, 4700), (1, 10, 1)], 1e-5, ADD, 1.621, None),
    ("coupled and anchor 4", [(Q, 1, 4999), (ANCHOR, 4, 626)], 1e-5, ADD, 2.445, 2.662),
    ("DiceSGD p=.02, replace", [(0.02, 1.256, 1000)], 1e-5, REPLACE, 2.01, None),
    ("PCDP 4", [(0.025, 4, 3200)], 1e-5, ADD, 1.39, 1.52),
    ("PCDP 6, replace", [(0.025, 3, 3200)], 1e-5, REPLACE, 1.866, None),
    ("GEP residual", [(0.025, joint(6, 6), 3200)], 1e-5, ADD, 1.301, None),
    ("federated 6", [(0.05, 6, 400)], 1e-5, ADD, 0.608, None),
    ("constant threshold .19", [(Q, 1 / 0.19, 4687)], 1e-5, ADD, 0.182, None),
    ("shuffled rounds", [(1, 1.5, 100)], 1e-4, REPLACE, 46, None),
    ("Gaussian, replace", [(1, 1.0, 1)], 1e-5, REPLACE, 4.377, None),
    ("worst case, CIFAR", [(1, 4.07 / 2001, 150)], 1e-5, ADD, 1.8e7, None),
    ("anchor theory, unamplified", [(1, 172.7 / 2, 6510), (1, 410.8 / 2, 815)], 1e-5, REPLACE, 4.10, None),
    ("RMS fused", [(Q, joint(1, 4.47), 4680)], 1e-5, ADD, 1.647, None),
    ("DP-C4+ R2", [(Q, 0.883, 4999), (ANCHOR, 3.494, 626)], 1e-5, ADD, 2.997, None),
    ("coupled and anchor 1", [(Q, 1, 4999), (ANCHOR, 1, 626)], 1e-5, ADD, 12.30, 13.50),
    ("DP-SGD, GPT-2", [(1000 / 42_000, 0.680, 420)], 8e-6, ADD, 8.00, None),
]


@pytest.mark.parametrize("row", FAST, ids=lambda row: row[0])
def test_worked_numbers(row):
    _, parts, delta, relation, expected, rdp = row
    result = epsilon(event(*parts), delta, relation)
    # printed with few digits: half a unit of the last one is allowed too
    digits = 0 if expected == int(expected) else len(repr(expected).split(".")[1])
    unit = 10.0**-digits if expected < 1000 else 0.1 * 10 ** math.floor(math.log10(expected))
    assert result.value == pytest.approx(expected, rel=5e-3, abs=0.5001 * unit)
    if rdp is not None:
        assert result.cross_check == pytest.approx(rdp, rel=5e-3, abs=0.005)
    if result.cross_check is not None:
        assert result.value <= result.cross_check


@pytest.mark.slow
@pytest.mark.parametrize(("z", "q", "steps"), [(1.0, Q, 4700), (6.0, 0.5, 100), (0.6, 0.002, 5000)])
def test_agrees_with_opacus(z, q, steps):
    accountants = pytest.importorskip("opacus.accountants")
    other = accountants.PRVAccountant()
    other.history = [(z, q, steps)]
    theirs = other.get_epsilon(1e-5, eps_error=1e-3, delta_error=1e-9)
    assert epsilon(event((q, z, steps)), 1e-5).value == pytest.approx(theirs, rel=0.01)


def test_closed_form_against_its_definition():
    from scipy.stats import norm

    for mu in (0.01, 0.5, 1.0, 3.0, 10.0):
        for delta in (1e-3, 1e-5, 1e-9):
            e = gaussian_epsilon(mu, delta)
            back = norm.cdf(mu / 2 - e / mu) - math.exp(e) * norm.cdf(-mu / 2 - e / mu)
            assert back == pytest.approx(delta, rel=1e-5) or e == 0
            if e > 0:
                assert gaussian_mu(e, delta) == pytest.approx(mu, rel=1e-6)
    assert gaussian_epsilon(1e5, 1e-5) == pytest.approx(5e9, rel=1e-2)  # no overflow
    assert gaussian_epsilon(1e-9, 1e-5) == 0


def test_what_has_no_accountant_raises():
    subset = WithoutReplacement(50, 1000, 10)
    with pytest.raises(PlanError, match="replace_one"):
        PrivacyPlan([Release("gradient", 1.0, Gaussian(2.0))], subset).epsilon(1e-5)
    releases = [Release("a", 1.0, Gaussian(2.0)), Release("b", 1.0, Gaussian(2.0), draw="b", sampling=subset)]
    with pytest.raises(PlanError, match="one scheme"):
        PrivacyPlan(releases, Poisson(50, 1000, 10), REPLACE).epsilon(1e-5)
    with pytest.raises(PlanError, match="LaplaceDpEvent"):
        epsilon(dp.LaplaceDpEvent(1.0), 1e-5)
    with pytest.raises(ValueError, match="relation"):
        epsilon(dp.GaussianDpEvent(1.0), 1e-5, "zero_out")
    with pytest.raises(ValueError, match="delta"):
        epsilon(dp.GaussianDpEvent(1.0), 0.0)
    assert math.isinf(epsilon(dp.NonPrivateDpEvent(), 1e-5).value)
    assert math.isinf(epsilon(dp.GaussianDpEvent(0.0), 1e-5).value)
    found = PrivacyPlan([Release("gradient", 1.0, Gaussian(2.0))], subset, REPLACE).epsilon(1e-5)
    reference = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    reference.compose(dp.SampledWithoutReplacementDpEvent(1000, 50, dp.GaussianDpEvent(1.0)), 10)
    assert found.value == pytest.approx(reference.get_epsilon(1e-5))
    assert (found.accountant, found.cross_check) == ("rdp", None)


def test_joint_releases_are_one_event():
    sampling, a = Poisson(25, 1000, 3200), Release("a", 1.0, Gaussian(6.0))
    two = PrivacyPlan([a, Release("b", 5.0, Gaussian(6.0))], sampling)
    assert two.epsilon(1e-5).value == pytest.approx(1.301, rel=5e-3)
    apart = PrivacyPlan([a, Release("b", 1.0, Gaussian(6.0), draw="b")], sampling)
    assert apart.event() != two.event()
    rare = PrivacyPlan([a, Release("b", 5.0, Gaussian(6.0), count=10)], sampling)
    assert [(sorted(p.names), p.count) for p in rare.patterns()] == [(["a", "b"], 10), (["a"], 3190)]


@pytest.mark.parametrize(
    ("sampling", "ratio"),
    [
        (FullBatch(1000, 5), 1.0),
        (FixedEpochs(100, 1000, 5), 2.0),
        (WithoutReplacement(100, 1000, 5), 1.0),
        (Poisson(1000, 1000, 5), 1.0),
        (Poisson(100, 1000, 5), 2.0),
    ],
)
def test_a_replaced_record_moves_squares_by_their_bound_once(sampling, ratio):
    """(4 + 1/9)^(-1/2) = 0.4932, and (4 + 4/9)^(-1/2) = 0.4743 where both are drawn by themselves."""
    multiplier = (4 + ratio**2 / 9) ** -0.5
    assert multiplier == pytest.approx({1.0: 0.4932, 2.0: 0.4743}[ratio], abs=5e-5)
    squares = Release("squares", 1.0, Gaussian(3.0), replace_ratio=1.0)
    plan = PrivacyPlan([Release("gradient", 1.0, Gaussian(1.0)), squares], sampling, REPLACE)
    assert plan.event() == sampling.event(multiplier, 5)


A, B = (Release(name, 1.0, Gaussian(1.0)) for name in "ab")
SAMPLED = Poisson(25, 1000, 10)
WRONG = [
    (lambda: PrivacyPlan([A, A], SAMPLED), PlanError, "unique"),
    (
        lambda: PrivacyPlan([A, replace(B, sampling=FullBatch(10, 1))], SAMPLED),
        PlanError,
        "different samplings",
    ),
    (lambda: PrivacyPlan([A, replace(B, count=4)], FixedEpochs(25, 100, 8)), PlanError, "draws of their own"),
    (lambda: Release("a", 1.0, Gaussian(0.0)), ValueError, "noise_multiplier"),
    (lambda: PrivacyPlan([A], 0.1), TypeError, "sampling"),
    (lambda: Release("a", 1.0, Gaussian(1.0), replace_ratio=3.0), ValueError, "replace_ratio"),
]


@pytest.mark.parametrize(("make", "kind", "message"), WRONG)
def test_plan_errors(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


def test_plan_description_round_trip():
    other = Release("b", 5.0, Gaussian(6.0), draw="x", sampling=FullBatch(9, 3), count=2)
    plan = PrivacyPlan([Release("a", math.inf, Gaussian(1.5)), other], SAMPLED, REPLACE)
    again = PrivacyPlan.from_description(plan.describe())
    assert again.fingerprint() == plan.fingerprint()
    assert again.event() == plan.event()
