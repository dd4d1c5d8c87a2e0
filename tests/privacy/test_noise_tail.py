"""The numbers that noise is made of: against float64, 64 bits of radius, and what their end costs."""

import math

import dp_accounting
import numpy as np
import pytest
import torch
from scipy import stats

from equipoise import privacy as ep
from equipoise.privacy import epsilon
from equipoise.privacy.accounting import noise_tail
from equipoise.privacy.accounting.epsilon import noise_tail as tail_of
from equipoise.privacy.accounting.epsilon import parts_of
from equipoise.privacy.noise import polynomials, streams
from equipoise.statements import statement_of


def radius(high: int, low: int) -> float:
    """Of the pair that these 32 bits, and the lower ones, make."""
    blocks = torch.tensor([[high, 0]], dtype=torch.int32).view(torch.float32)
    streams._transform(blocks, torch.tensor([[low]], dtype=torch.int32).view(torch.float32), 1.0)
    return float(blocks.square().sum().sqrt())


def test_the_radius_goes_from_zero_to_the_end_that_is_accounted():
    assert radius(0, 0) == pytest.approx(noise_tail.END, rel=1e-6)
    assert radius(-(2**31), 0) == 0
    assert radius(-(2**31), 2**31 - 1) >= 0  # u is rounded to at most 1
    doubles = torch.zeros(1, 2, dtype=torch.float64)
    streams._transform(doubles, None, 1.0)
    assert float(doubles.square().sum().sqrt()) == pytest.approx(noise_tail.END, rel=1e-12)


@pytest.mark.parametrize(
    ("high", "low", "u"), [(0, 2**10, 2.0**-53), (0, -(2**30), 2.0**-33), (1, 0, 2.0**-31)]
)
def test_the_tail_follows_the_normal_law(high, low, u):
    # P(R > r) = exp(-r^2 / 2) of a pair, and u is uniform; 32 bits would reach 6.76
    assert math.exp(-(radius(high, low) ** 2) / 2) == pytest.approx(u, rel=1e-4)


@pytest.mark.parametrize("move", [0.2, 1.0, 1.5])
def test_the_bound_is_above_what_pairs_do(monkeypatch, move):
    """With an end that samples reach: one pair takes the whole move, or shares it with others."""
    monkeypatch.setattr(noise_tail, "END", 4.0)
    monkeypatch.setattr(noise_tail, "PAIRS", 8.0)
    noise_tail.leaves.cache_clear()
    bound = noise_tail.leaves(move)
    noise_tail.leaves.cache_clear()
    noise = torch.randn(150_000, 8, 2, generator=torch.Generator().manual_seed(0))
    noise = noise[(noise.norm(dim=2) <= 4.0).all(1)]
    for share in (torch.eye(8)[0], torch.full((8,), 8**-0.5), torch.tensor([0.8, 0.6] + [0.0] * 6)):
        moved = noise + torch.stack([move * share, torch.zeros(8)], 1)
        beyond = float((moved.norm(dim=2) > 4.0).any(1).double().mean())
        assert beyond <= bound * 1.05
    assert bound < 20 * max(beyond, 1e-4)  # and not far above it


@pytest.mark.parametrize(
    ("event", "participations", "move"),
    [
        (dp_accounting.GaussianDpEvent(0.6), 1, 1 / 0.6),
        (dp_accounting.PoissonSampledDpEvent(1e-4, dp_accounting.GaussianDpEvent(0.6)), 1e-4, 1 / 0.6),
        (dp_accounting.SampledWithoutReplacementDpEvent(100, 5, dp_accounting.GaussianDpEvent(0.5)), 0.05, 2),
    ],
)
def test_beta_counts_the_releases_that_a_record_takes_part_in(event, participations, move):
    many = dp_accounting.SelfComposedDpEvent(event, 20_000)
    expected = 20_000 * participations * noise_tail.leaves(move)
    assert tail_of(parts_of(many), 1e-20) == pytest.approx(expected)
    # not below what one coordinate alone gives away
    one = stats.norm.sf(noise_tail.END - move)
    assert noise_tail.leaves(move) > one > noise_tail.leaves(move) / 100


def test_a_statement_says_what_the_tail_adds():
    def stated(noise):
        plan = ep.PrivacyPlan([ep.Release("gradient", 1.0, ep.Gaussian(noise))], ep.FullBatch(100, 1))
        return statement_of(ep.Ledger(plan), delta=1e-5)

    assert 0 < stated(1.0).noise_tail < 1e-13
    assert not any("tail" in warning for warning in stated(1.0).warnings)
    assert any("tail" in warning for warning in stated(0.12).warnings)


def test_each_of_the_runs_of_a_search_adds_its_own_tail():
    long = ep.Poisson(expected_batch_size=10, population=100_000, steps=20_000).event(0.6, 20_000)
    assert 0 < epsilon(long, 1e-10, cross_check=False).noise_tail < 1e-12
    event = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(2.0), 100)
    alone = epsilon(event, 1e-5).noise_tail
    both = dp_accounting.ComposedDpEvent([event, ep.PrivateSearch(mean=10).event(event)])
    assert alone > 0
    assert epsilon(both, 1e-5).noise_tail == pytest.approx(11 * alone)


def test_a_plan_whose_tail_alone_takes_delta_is_refused():
    def opened(delta):
        plan = ep.PrivacyPlan([ep.Release("gradient", 1.0, ep.Gaussian(0.3))], ep.Poisson(10, 1000, 1000))
        return ep.Ledger(plan, ep.Budget(1e6, delta))

    assert 1e-9 < epsilon(opened(1e-2).plan.event(), 1e-2).noise_tail < 1e-2
    with pytest.raises(ep.BudgetError, match="noise_multiplier"):
        opened(1e-9)


#: Units in the last place; measured over all arguments 0.85, 0.85, 1.71 and 1.50.
WORST = 2.0


def units(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest distance in units of the last place of float32."""
    last = torch.from_numpy(np.spacing(np.abs(expected.numpy()).astype(np.float32)))
    return float(((got.double() - expected).abs() / last).max())


def log(u: torch.Tensor) -> torch.Tensor:
    bits = u.view(torch.int32)
    exponent = (bits - 0x3F3504F3) >> 23
    return polynomials.log_of((bits - (exponent << 23)).view(torch.float32) - 1.0, exponent.float())


@pytest.mark.parametrize("exponent", [-65, -31, -3, -1])
def test_the_logarithm_is_right_from_2_to_the_minus_65_to_1(exponent):
    significands = torch.cat([torch.arange(0, 2**23, 17), 2**23 - torch.arange(1, 1000)]).int()
    u = (significands + ((127 + exponent) << 23)).view(torch.float32)
    assert units(log(u), u.double().log()) <= WORST
    assert bool((log(u) < 0).all())  # else there were no root
    assert float(log(torch.ones(1))) == 0.0


@pytest.mark.parametrize("exponent", [-24, -3, 0, 1, 6])
def test_the_root_is_right_for_all_that_a_logarithm_gives(exponent):
    x = (torch.arange(0, 2**23, 17).int() + ((127 + exponent) << 23)).view(torch.float32)
    guess = (0x5F3759DF - (x.view(torch.int32) >> 1)).view(torch.float32)
    assert units(polynomials.root(x, guess), x.double().sqrt()) <= WORST


def test_the_functions_of_an_angle_are_right_for_all_words():
    ends = [
        sign * (end + near) for sign in (1, -1) for end in (0, 2**29, 2**30, 3 * 2**29) for near in range(99)
    ]
    angle = torch.cat([torch.arange(-(2**31), 2**31, 5003), torch.tensor([*ends, -(2**31), 2**31 - 1])]).int()
    u = torch.full_like(angle, 2**30)  # u is a half: the length is known
    x, y = polynomials.box_muller(u, torch.zeros_like(angle), angle, 1.0)
    length = polynomials.box_muller(u[:1], u[:1] * 0, u[:1] * 0, 1.0)[0].double()
    assert float(length) == pytest.approx(math.sqrt(2 * math.log(2)), rel=1e-6)
    exact = angle.double() * (math.pi / 2**31)
    # half a unit more: the product with the length is rounded
    quarter = (angle.double() / 2**30).remainder(1) == 0  # where one of them is zero
    for got, expected in ((x, exact.cos()), (y, exact.sin())):
        assert units(got[~quarter], (length * expected)[~quarter]) <= 2 * WORST
        assert float((got.double() - length * expected)[quarter].abs().max()) <= 1e-6


@pytest.mark.parametrize(("radius", "low"), [(0, 0), (1, -1), (-(2**31), 0), (2**31 - 1, 2**31 - 1), (-5, 7)])
def test_every_word_gives_a_finite_number_of_the_right_length(radius, low):
    x, y = polynomials.box_muller(
        torch.tensor([radius]).int(), torch.tensor([low]).int(), torch.tensor([123456789]).int(), 3.0
    )
    u = min(abs(radius / 2**31 + low / 2**63) + 2.0**-65, 1.0)
    got = math.hypot(float(x), float(y))
    # next to 1 the last place of u is 2^-24
    assert got == pytest.approx(
        3.0 * math.sqrt(-2 * math.log(u)), rel=1e-6, abs=3.0 * 2**-11 if u > 0.99 else 0
    )
