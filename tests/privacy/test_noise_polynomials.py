"""The functions that devices make normal numbers of, against those of float64."""

import math

import numpy as np
import pytest
import torch

from equipoise.privacy.noise import polynomials

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
