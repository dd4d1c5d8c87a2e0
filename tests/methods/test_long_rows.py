"""Clipped records of a million numbers and more, of many terms, and of numbers whose squares vanish.

Float32 sums of so many squares fall short of the norm, most of all where the numbers are alike: each is
rounded the same way as it is added.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from equipoise.gradients.factors import DenseFactor, IndexFactor, OuterFactor
from equipoise.gradients.factors.convolution import ConvFactor, ConvGeometry
from equipoise.gradients.operator import DenseGradients, FactoredGradients
from equipoise.methods import NSGD, PSAC, Abadi, AutoS
from equipoise.methods.dice_sgd import Automatic, Independent, Joint
from equipoise.methods.subspaces import held
from equipoise.methods.two_threshold_sums import clip_selected, top_share
from equipoise.privacy import PrivateRows, clip, clip_jointly
from equipoise.privacy.bounds.clipping import clip_coordinates
from equipoise.privacy.bounds.second_moments import moment_action
from equipoise.privacy.private import Private, unwrap

SLACK = 1 + 1e-5
VALUES = (0.1, 0.55, 1 / 3)


def length(bounded) -> float:
    """The sum's length: what its only record moves it by."""
    return math.hypot(*(float(unwrap(v).double().norm()) for v in bounded.value.values()))


def clipped(factor) -> float:
    """What one record of a factor contributes when clipped to 1."""
    return length(clip(PrivateRows(FactoredGradients({"w": (factor,)})), Abadi(), 1.0))


def an_outer(value, positions, d_in, d_out):
    return OuterFactor(torch.full((1, positions, d_in), value), torch.full((1, positions, d_out), value))


def a_convolution(value, channels, size, taps):
    x = torch.full((1, channels[0], size, size), value)
    b = torch.full((1, channels[1], size - taps + 1, size - taps + 1), value)
    return ConvFactor(x, b, ConvGeometry.of((taps, taps)))


def look_ups(value, positions, width):
    return IndexFactor(
        torch.ones(1, positions, dtype=torch.long), torch.full((1, positions, width), value), 2
    )


LARGE_MAPS = ("grouped", "unfold", "correlate", "rows_grouped", "rows_correlate")
LONG = {
    "dense": (lambda v: DenseFactor(torch.full((1, 10**6), v)), ("rows",)),
    "dense, turned": (
        lambda v: DenseFactor(torch.full((1, 1000, 1, 1000), v).permute(0, 3, 1, 2)),
        ("rows",),
    ),
    "linear": (lambda v: an_outer(v, 1, 1200, 1000), ("gram",)),
    "linear, 4 positions": (lambda v: an_outer(v, 4, 1200, 1000), ("gram", "product")),
    "linear, 600 positions": (lambda v: an_outer(v, 600, 600, 500), ("gram", "product", "rows")),
    "linear, narrow": (lambda v: an_outer(v, 20_000, 3, 2), ("product", "rows")),
    "linear, a large vocabulary": (lambda v: an_outer(v, 2, 64, 30_000), ("gram", "product")),
    "convolution": (lambda v: a_convolution(v, (1000, 1000), 2, 1), ("grouped", "unfold", "gram")),
    "convolution, 15876 positions": (partial(a_convolution, channels=(1, 4), size=128, taps=3), LARGE_MAPS),
    "look-ups of long rows": (lambda v: look_ups(v, 2, 500_000), ("gram", "sort", "rows")),
    "look-ups of one token": (lambda v: look_ups(v, 3000, 8), ("gram", "sort", "rows")),
}


@pytest.mark.parametrize(
    ("make", "kernel"),
    [pytest.param(make, kernel, id=f"{name}-{kernel}") for name, (make, ks) in LONG.items() for kernel in ks],
)
def test_a_long_constant_row_is_clipped_to_the_threshold(make, kernel):
    reached = [clipped(make(value)._with(kernel)) for value in VALUES]
    assert max(reached) <= SLACK
    assert min(reached) > 1 - 3e-3  # T eps / 4 is 2.4e-3 for the 20000 positions


@pytest.mark.parametrize(
    ("size", "value", "share"),
    [(100_000, 0.7807692289352417, 0.012), (100_000, 0.4, 0.004), (1_000_000, 0.22051282227039337, 0.04)],
)
def test_the_residual_of_a_long_row_keeps_to_its_bound(size, value, share):
    """The whole row is constant but for a small part, and so is the column: sums of one sign drift."""
    outside = torch.randn(1, size, generator=torch.Generator().manual_seed(0))
    outside -= outside.mean()
    row = torch.full((1, size), value)
    norm = float(row.double().norm())
    rows = PrivateRows(DenseGradients({"w": row + share * norm * outside / outside.norm()}))
    subspace = held({"w": torch.ones(1, size)}).orthonormal()
    _, residual = rows.split(subspace)
    bounded = clip(residual, Abadi(), 1e-4 * norm)
    assert 0.8 * bounded.add_remove < length(bounded) <= bounded.add_remove * 1.001


@pytest.mark.parametrize("columns", [2, 6])
def test_the_residual_of_a_long_linear_row_is_not_read_too_small(columns):
    """Positions' products against held columns: a product that is rounded from end to end would be."""
    rng = torch.Generator().manual_seed(2)
    drawn = 1 + 0.3 * torch.randn(columns, 1000, 1000, generator=rng)
    drawn[0] = 1.0
    subspace = held({"w": drawn}).orthonormal()
    a = torch.tensor([0.3, 0.55, 1 / 3, 0.78]).view(4, 1, 1) * (
        1 + 1e-3 * torch.randn(4, 1, 1000, generator=rng)
    )
    factor = OuterFactor(a, 1 + 1e-3 * torch.randn(4, 1, 1000, generator=rng))
    residual = subspace.residual(FactoredGradients({"w": (factor,)}))
    exact = residual.materialise().matrix().double().norm(dim=1)
    assert (residual.row_norms() >= exact * (1 - 1e-5)).all()
    rows = factor.materialise().flatten(1).double()
    units = torch.stack([subspace.lift(unit)["w"].flatten() for unit in torch.eye(columns)])
    off = subspace.coordinates(FactoredGradients({"w": (factor,)})) - rows @ units.double().t()
    assert (off.abs() / rows.norm(dim=1, keepdim=True)).max() < 20 * torch.finfo(torch.float32).eps


#: A number that reads as a norm and many whose squares do not, or all of them alike at the brink.
TINY = [(4e-23, 2.6e-23), (1e-21, 2.6e-23), (0.0, 2.6e-23), (0.0, 3e-23), (1e-30, 1e-38), (0.0, 0.0)]


def tiny_row(lead: float, rest: float, size: int = 100_000) -> PrivateRows:
    row = torch.full((1, size), rest)
    row[0, 0] = lead
    return PrivateRows(DenseGradients({"w": row, "v": row / 2}))


@pytest.mark.parametrize(("lead", "rest"), TINY)
@pytest.mark.parametrize("groups", [None, [["w"], ["v"]]])
@pytest.mark.parametrize("noise", [kind.of(1.0, 10.0) for kind in (Automatic(), Joint(), Independent())])
def test_a_joint_release_of_a_row_too_small_to_read(noise, groups, lead, rest):
    for bounded in clip_jointly(tiny_row(lead, rest), noise, groups).values():
        assert length(bounded) <= bounded.add_remove * SLACK


@pytest.mark.parametrize(("lead", "rest"), TINY)
@pytest.mark.parametrize("rule", [Abadi(), AutoS(), NSGD(), PSAC(), "greedy"], ids=repr)
def test_a_clipped_row_too_small_to_read(rule, lead, rest):
    class Greedy(Abadi):
        def _weights(self, norms, threshold):
            return torch.full_like(norms, 1e30)

    rows, rule = tiny_row(lead, rest), Greedy() if rule == "greedy" else rule
    assert length(clip(rows, rule, 1.0)) <= SLACK
    assert length(clip(rows, rule, 1.0, [["w"], ["v"]])) <= SLACK
    assert length(clip_coordinates(rows.matrix(), rule, 1.0)) <= SLACK
    selection = top_share(Private(torch.ones(1)), Private(torch.zeros(1, dtype=torch.long)), 1.0)
    chosen = clip_selected(rows, Private(torch.zeros(1, dtype=torch.long)), selection, 1.0, 0.5, rule)
    assert length(chosen) <= SLACK
    columns = torch.full((1, 100_000), 1e16)  # of any length: the action keeps to its bound all the same
    assert length(moment_action(rows, rule, 1.0, [{"w": columns}])) <= SLACK
