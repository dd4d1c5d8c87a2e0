"""Differences of gradients at near parameters: the norm survives where the expanded form is noise.

The table is that of DP-C4's analysis: a tanh net of three layers, float32, weights moved by a relative s.
"""

import functools
from itertools import pairwise

import pytest
import torch

from equipoise.gradients.factors import DenseFactor, IndexFactor, OuterFactor
from equipoise.gradients.factors.convolution import ConvFactor, ConvGeometry
from equipoise.gradients.numerics import sum_error
from equipoise.gradients.operator import FactoredGradients

EPS = torch.finfo(torch.float32).eps
SIZES = (20, 24, 24, 5)


def problem(positions, records=16):
    g = torch.Generator().manual_seed(positions)
    weights = [torch.randn(o, i, generator=g, dtype=torch.float64) / i**0.5 for i, o in pairwise(SIZES)]
    x = torch.randn(records, positions, SIZES[0], generator=g, dtype=torch.float64)
    target = torch.randn(records, positions, SIZES[-1], generator=g, dtype=torch.float64)
    directions = [torch.randn(w.shape, generator=g, dtype=torch.float64) * w.std() for w in weights]
    return weights, directions, x, target


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


def two_points(positions, s, dtype):
    weights, directions, x, target = problem(positions)
    near = [(w + s * d).to(dtype) for w, d in zip(weights, directions, strict=True)]
    here = [w.to(dtype) for w in weights]
    return gradients(near, x.to(dtype), target.to(dtype)), gradients(here, x.to(dtype), target.to(dtype))


def exact_norms(positions, s):
    """In float64, at the very float32 weights: what remains is float32 arithmetic."""
    weights, directions, x, target = problem(positions)
    near = [(w + s * d).float().double() for w, d in zip(weights, directions, strict=True)]
    here = [w.float().double() for w in weights]
    x, target = x.float().double(), target.float().double()
    G_x, G_w = gradients(near, x, target), gradients(here, x, target)
    return (G_x.materialise().matrix() - G_w.materialise().matrix()).norm(dim=1)


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
    safe_by_s, expanded_by_s = {}, {}
    for s, bound in ((1e-1, 1e-5), (1e-2, 3e-5), (1e-3, 3e-4), (1e-4, 1e-3), (1e-5, 2e-2), (1e-6, 2e-1)):
        G_x, G_w = two_points(positions, s, torch.float32)
        exact = exact_norms(positions, s)
        D = G_x - G_w
        rows = G_x.materialise().matrix() - G_w.materialise().matrix()
        squares = G_x.row_norms().square() - 2 * G_x.inner(G_w) + G_w.row_norms().square()
        safe_by_s[s] = worst(without_guards(D, exact), exact)
        expanded_by_s[s] = worst(squares.clamp(min=0).sqrt(), exact)
        assert safe_by_s[s] < bound
        assert safe_by_s[s] < 3 * worst(rows.norm(dim=1), exact) + 1e-6
    assert safe_by_s[1e-4] < 1e-3
    assert expanded_by_s[1e-4] > 0.5
    assert expanded_by_s[1e-5] > 5


def test_guard_is_the_stated_one_and_is_carried_everywhere():
    G_x, G_w = two_points(7, 1e-3, torch.float32)
    D = G_x - G_w
    guard = 4 * EPS * (G_x.row_norms() + G_w.row_norms())
    exactly = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=0)  # guards are about 1e-6
    exactly(D.norm_guard(), guard)
    assert not G_x.norm_guard().any()
    assert (D.row_norms() >= guard).all()
    same = G_x - G_x
    exactly(same.row_norms(), 8 * EPS * G_x.row_norms())
    index = torch.tensor([4, 2])
    exactly(D.rows(index).norm_guard(), guard[index])
    exactly(same.rows(index).row_norms(), same.row_norms()[index])
    one = 4 * EPS * (G_x.select(["bias0"]).row_norms() + G_w.select(["bias0"]).row_norms())
    exactly(D.select(["bias0"]).norm_guard(), one)
    exactly(D.norm_guard([["bias0"], ["weight1"]])[:, 0], one)
    exactly(D.row_norms([["bias0"]])[:, 0], D.select(["bias0"]).row_norms())
    exactly(D.materialise().norm_guard(), guard)


def test_the_norm_bounds_the_row_that_is_summed():
    """The clip weight comes from the norm, the sum from the factors: no row is longer than its norm."""
    for positions in (1, 7):
        for s in (1e-3, 1e-5, 1e-7):
            G_x, G_w = two_points(positions, s, torch.float32)
            D = G_x - G_w
            norms = D.row_norms()
            for i in range(16):
                one = torch.zeros(16)
                one[i] = 1
                summed = torch.cat([t.double().flatten() for t in D.weighted_sums(one).values()]).norm()
                assert summed <= norms[i].double() * (1 + 1e-5)


def conv(x, b, kernel):
    return ConvFactor(x, b, ConvGeometry.of((3, 3), 1, 1))._with(kernel)


@pytest.mark.parametrize("kernel", ["grouped", "unfold", "correlate", "gram", "rows_grouped"])
def test_convolutions_keep_their_difference(kernel):
    g = torch.Generator().manual_seed(0)
    x, b = (torch.randn(5, 2, 3, 6, 6, generator=g, dtype=torch.float64) for _ in range(2))
    dx, db = (1e-4 * torch.randn(5, 2, 3, 6, 6, generator=g, dtype=torch.float64) for _ in range(2))
    near, far = ((x + dx).float(), (b + db).float()), (x.float(), b.float())
    exact = conv(near[0].double(), near[1].double(), "grouped").materialise()
    exact = exact - conv(far[0].double(), far[1].double(), "grouped").materialise()
    D = FactoredGradients({"w": (conv(*near, kernel),)}) - FactoredGradients({"w": (conv(*far, kernel),)})
    assert worst(D.row_norms() - D.norm_guard(), exact.flatten(1).norm(dim=1)) < 1e-3
    torch.testing.assert_close(D.materialise().tensors["w"].double(), exact, rtol=1e-3, atol=1e-5)


def test_look_ups_keep_their_difference():
    g = torch.Generator().manual_seed(0)
    b = torch.randn(5, 6, 4, generator=g, dtype=torch.float64)
    index = torch.randint(7, (5, 6), generator=g)
    near = (b + 1e-4 * torch.randn(5, 6, 4, generator=g, dtype=torch.float64)).float()
    for other in (index, index.flip(1)):
        b_w = b.float() if other is index else b.flip(1).float()
        left, right = IndexFactor(index, near, 7), IndexFactor(other, b_w, 7)
        exact = (
            IndexFactor(index, near.double(), 7).materialise()
            - IndexFactor(other, b_w.double(), 7).materialise()
        )
        D = FactoredGradients({"w": (left,)}) - FactoredGradients({"w": (right,)})
        norms = exact.flatten(1).norm(dim=1)
        # look-ups that moved cancel inside the row, whose own guard is added then
        assert worst(without_guards(D, norms), norms) < 1e-3
        torch.testing.assert_close(D.materialise().tensors["w"].double(), exact, rtol=1e-3, atol=1e-6)


def test_points_that_use_a_parameter_differently():
    """Another kernel, another number of uses, no use at all: by rows where it must be."""
    g = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    outer, more = OuterFactor(randn(5, 3, 4), randn(5, 3, 6)), OuterFactor(randn(5, 2, 4), randn(5, 2, 6))
    table = IndexFactor(torch.randint(6, (5, 3), generator=g), randn(5, 3, 4), 6)
    forms = [
        (outer,),
        (outer._with("rows"),),
        (outer, more),
        (more, outer),
        (table, outer),
        (outer, table),
        (),
    ]
    for left in forms:
        for right in forms:
            G = FactoredGradients({"w": left, "b": (DenseFactor(randn(5, 2)),)}, shapes={"w": (6, 4)})
            H = FactoredGradients({"w": right, "b": (DenseFactor(randn(5, 2)),)}, shapes={"w": (6, 4)})
            expected = G.materialise().matrix() - H.materialise().matrix()
            D = G - H
            torch.testing.assert_close(D.materialise().matrix(), expected)
            torch.testing.assert_close(D.row_norms(), expected.norm(dim=1))
