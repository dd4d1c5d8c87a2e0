"""Differences of gradients at near parameters: the norm survives where the expanded form is noise.

The table is that of DP-C4's analysis: a tanh net of three layers, float32, weights moved by a relative s.
"""

import functools
from itertools import pairwise, product

import pytest
import torch

from equipoise.gradients.factors import DenseFactor, IndexFactor, OuterFactor
from equipoise.gradients.factors.convolution import ConvFactor, ConvGeometry
from equipoise.gradients.numerics import sum_error
from equipoise.gradients.operator import FactoredGradients

EPS = torch.finfo(torch.float32).eps
SIZES = (20, 24, 24, 5)


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def gradients(weights, x, target):
    """Inputs and output gradients of a tanh net with squared loss, forward and backward by hand."""
    inputs, hidden = [], x
    for k, w in enumerate(weights):
        inputs.append(hidden)
        hidden = hidden @ w.t()
        hidden = torch.tanh(hidden) if k < len(weights) - 1 else hidden
    b, factors = hidden - target, {}
    for k in reversed(range(len(weights))):
        factors[f"weight{k}"] = (OuterFactor(inputs[k], b),)
        factors[f"bias{k}"] = (DenseFactor(b.sum(1)),)
        if k:
            b = (b @ weights[k]) * (1 - inputs[k].square())
    return FactoredGradients(dict(sorted(factors.items())))


def two_points(positions, s):
    """Gradients near and here, and the exact norms of their difference.

    In float64, at the very float32 weights: what remains is float32 arithmetic.
    """
    torch.manual_seed(positions)
    weights = [randn(o, i) / i**0.5 for i, o in pairwise(SIZES)]
    data = [randn(16, positions, size).float() for size in (SIZES[0], SIZES[-1])]
    near = [(w + s * randn(*w.shape) * w.std()).float() for w in weights]
    points = [near, [w.float() for w in weights]]
    wide = [gradients([w.double() for w in one], *(t.double() for t in data)) for one in points]
    exact = (wide[0].materialise().matrix() - wide[1].materialise().matrix()).norm(dim=1)
    return *(gradients(one, *data) for one in points), exact


def without_guards(D, exact):
    """Norms of D as far as they lie outside of what its guards may add to the exact ones."""
    sizes = torch.stack([size for name in D.names if (size := D.magnitudes(name)) is not None])
    known = (factor.squares_and_errors()[1] for kept in D.factors.values() for factor in kept)
    errors = sum(error for error in known if error is not None)
    most = (exact.square() + errors).sqrt() - exact
    most += sum_error(torch.float32, max(D.additions(name) for name in D.names)) * sizes.norm(dim=0)
    norms = (D.row_norms() - D.norm_guard()).double()
    return norms - (norms - exact).clamp(min=0).minimum(most)


def worst(norms, exact):
    return float(((norms.double() - exact) / exact).abs().max())


@pytest.mark.parametrize("positions", [1, 7])
def test_difference_norm_is_as_good_as_materialised(positions):
    expanded = {}
    for s, bound in ((1e-1, 1e-5), (1e-2, 3e-5), (1e-3, 3e-4), (1e-4, 1e-3), (1e-5, 2e-2), (1e-6, 2e-1)):
        G_x, G_w, exact = two_points(positions, s)
        rows = G_x.materialise().matrix() - G_w.materialise().matrix()
        squares = G_x.row_norms().square() - 2 * G_x.inner(G_w) + G_w.row_norms().square()
        expanded[s] = worst(squares.clamp(min=0).sqrt(), exact)
        D = G_x - G_w
        assert worst(without_guards(D, exact), exact) < min(bound, 3 * worst(rows.norm(dim=1), exact) + 1e-6)
        # The clip weight comes from the norm, the sum from the factors: no row is longer than its norm.
        for norm, one in zip(D.row_norms().double(), torch.eye(16), strict=True):
            summed = torch.cat([t.double().flatten() for t in D.weighted_sums(one).values()]).norm()
            assert summed <= norm * (1 + 1e-5)
    assert expanded[1e-4] > 0.5
    assert expanded[1e-5] > 5


def test_guard_is_the_stated_one_and_is_carried_everywhere():
    G_x, G_w, _ = two_points(7, 1e-3)
    D, same, index = G_x - G_w, G_x - G_x, torch.tensor([4, 2])
    guard = 4 * EPS * (G_x.row_norms() + G_w.row_norms())
    exactly = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=0)  # guards are about 1e-6
    exactly(D.norm_guard(), guard)
    exactly((-2.0 * D).norm_guard(), 2 * guard)
    assert not G_x.norm_guard().any()
    assert (D.row_norms() >= guard).all()
    exactly(same.row_norms(), 8 * EPS * G_x.row_norms())
    exactly(D.rows(index).norm_guard(), guard[index])
    exactly(same.rows(index).row_norms(), same.row_norms()[index])
    one = 4 * EPS * (G_x.select(["bias0"]).row_norms() + G_w.select(["bias0"]).row_norms())
    exactly(D.select(["bias0"]).norm_guard(), one)
    exactly(D.norm_guard([["bias0"], ["weight1"]])[:, 0], one)
    exactly(D.row_norms([["bias0"]])[:, 0], D.select(["bias0"]).row_norms())
    exactly(D.materialise().norm_guard(), guard)


def conv(x, b, kernel):
    return ConvFactor(x, b, ConvGeometry.of((3, 3), 1, 1))._with(kernel)


@pytest.mark.parametrize("kernel", ["grouped", "unfold", "correlate", "gram", "rows_grouped"])
def test_convolutions_keep_their_difference(kernel):
    x, b, dx, db = (randn(5, 2, 3, 6, 6) for _ in range(4))
    near, far = ((x + 1e-4 * dx).float(), (b + 1e-4 * db).float()), (x.float(), b.float())
    wide = [conv(*(t.double() for t in point), "grouped").materialise() for point in (near, far)]
    exact = wide[0] - wide[1]
    D = FactoredGradients({"w": (conv(*near, kernel),)}) - FactoredGradients({"w": (conv(*far, kernel),)})
    assert worst(D.row_norms() - D.norm_guard(), exact.flatten(1).norm(dim=1)) < 1e-3
    torch.testing.assert_close(D.materialise().tensors["w"].double(), exact, rtol=1e-3, atol=1e-5)


def test_look_ups_keep_their_difference():
    b, index = randn(5, 6, 4), torch.randint(7, (5, 6))
    near = (b + 1e-4 * randn(5, 6, 4)).float()
    for other, far in ((index, b.float()), (index.flip(1), b.flip(1).float())):
        points = (index, near), (other, far)
        wide = [IndexFactor(place, value.double(), 7).materialise() for place, value in points]
        exact = wide[0] - wide[1]
        left, right = (FactoredGradients({"w": (IndexFactor(*point, 7),)}) for point in points)
        norms = exact.flatten(1).norm(dim=1)
        # Look-ups that moved cancel inside the row, whose own guard is added then.
        assert worst(without_guards(left - right, norms), norms) < 1e-3
        found = (left - right).materialise().tensors["w"].double()
        torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-6)


def test_points_that_use_a_parameter_differently():
    """Another kernel, another number of uses, no use at all: by rows where it must be."""
    outer, more = OuterFactor(randn(5, 3, 4), randn(5, 3, 6)), OuterFactor(randn(5, 2, 4), randn(5, 2, 6))
    table = IndexFactor(torch.randint(6, (5, 3)), randn(5, 3, 4), 6)
    forms = [
        (outer,),
        (outer._with("rows"),),
        (outer, more),
        (more, outer),
        (table, outer),
        (outer, table),
        (),
    ]
    for pair in product(forms, forms):
        biases = ((DenseFactor(randn(5, 2)),) for _ in pair)
        G, H = (
            FactoredGradients({"w": uses, "b": bias}, shapes={"w": (6, 4)})
            for uses, bias in zip(pair, biases, strict=True)
        )
        expected = G.materialise().matrix() - H.materialise().matrix()
        torch.testing.assert_close((G - H).materialise().matrix(), expected)
        torch.testing.assert_close((G - H).row_norms(), expected.norm(dim=1))
