"""The trace and its laws: it lies in [0, 1], knows no norm, and comes out of structured columns exactly."""

from __future__ import annotations

import math

import pytest
import torch

from equipoise.gradients import DenseGradients, FactoredGradients
from equipoise.gradients.factors.outer import OuterFactor
from equipoise.methods.subspaces import held as held_subspace
from equipoise.methods.subspaces import random_subspace
from equipoise.methods.two_thresholds import record_normals, record_uniforms, sub_weibull, subspace_trace
from equipoise.privacy import Private, PrivateRows
from equipoise.privacy.private import unwrap

P, K = 60, 7


def columns(seed, dimension=K, size=P, tail_index=2.0, signs="symmetric"):
    rng = torch.Generator().manual_seed(seed)
    return sub_weibull((dimension, size), rng, tail_index, signs).double()


def scores(rows, held):
    guarded = PrivateRows(DenseGradients({"w": rows}))
    return unwrap(subspace_trace(held_subspace({"w": held}))(guarded))


def gaussian_rows(count, size=P, seed=5):
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("signs", ["symmetric", "positive"])
def test_the_trace_is_a_share_that_scales_do_not_change(signs):
    g, held = gaussian_rows(20), columns(0, signs=signs)
    first = scores(g, held)
    assert (first >= 0).all()
    assert (first <= 1).all()
    torch.testing.assert_close(scores(g * torch.logspace(-3, 3, 20)[:, None].double(), held), first)
    torch.testing.assert_close(scores(g, held * torch.logspace(-2, 2, K)[:, None].double()), first)


def test_rows_without_a_direction_score_zero():
    g = gaussian_rows(3)
    g[0] = 0
    g[1, 0] = math.nan
    assert scores(g, columns(0))[:2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("tail_index", [0.5, 2.0])
def test_every_direction_expects_the_same_trace(tail_index):
    """E[lambda | g] = k / P for symmetric entries, whatever g: the trace carries no information."""
    sparse = torch.zeros(P).double()
    sparse[3] = 1
    fixed = torch.stack([sparse, torch.ones(P).double(), gaussian_rows(1)[0]])
    found = torch.stack([scores(fixed, columns(seed, tail_index=tail_index)) for seed in range(250)])
    error = found.std(0) / math.sqrt(len(found))
    assert ((found.mean(0) - K / P).abs() <= 3.5 * error).all()


def test_khatri_rao_columns_through_factors_equal_the_dense_computation():
    rng = torch.Generator().manual_seed(0)
    a = torch.randn(6, 3, 9, generator=rng, dtype=torch.float64)
    b = torch.randn(6, 3, 8, generator=rng, dtype=torch.float64)
    bias = torch.randn(6, 8, generator=rng, dtype=torch.float64)
    parts = {
        "w": (OuterFactor(a, b, torch.Size([8, 9])),),
        "bias": DenseGradients({"bias": bias}).factors["bias"],
    }
    ghost = FactoredGradients(parts)
    shapes, how = {"w": (8, 9), "bias": (8,)}, {"dtype": torch.float64, "entries": sub_weibull}
    V = random_subspace(3, shapes, K, dense_limit=10, **how)
    (held,) = V.columns()
    dense = PrivateRows(ghost.materialise())
    expected = unwrap(subspace_trace(held_subspace(held))(dense))
    torch.testing.assert_close(unwrap(subspace_trace(V)(PrivateRows(ghost))), expected, rtol=0, atol=1e-10)
    basis = torch.linalg.qr(torch.cat([held["w"].flatten(1), held["bias"].flatten(1)], 1).T).Q
    g = unwrap(dense.matrix())
    torch.testing.assert_close(expected, (g @ basis).square().sum(1) / g.square().sum(1), rtol=0, atol=1e-10)


@pytest.mark.parametrize("dense_limit", [0, 10**6])
def test_the_trace_without_signs_is_that_of_the_absolute_rows(dense_limit):
    shapes = {"w": (5, 4), "b": (7,)}
    how = {"dtype": torch.float64, "entries": sub_weibull}
    subspace = random_subspace(3, shapes, 4, dense_limit=dense_limit, **how)
    rng = torch.Generator().manual_seed(0)
    signed = {name: torch.randn(6, *shape, generator=rng).double() for name, shape in shapes.items()}
    absolute = {name: value.abs() for name, value in signed.items()}
    found = subspace_trace(subspace, absolute=True)(PrivateRows(DenseGradients(signed)))
    assert found.by_record
    expected = unwrap(subspace_trace(subspace)(PrivateRows(DenseGradients(absolute))))
    torch.testing.assert_close(unwrap(found), expected, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(unwrap(subspace_trace(subspace)(PrivateRows(DenseGradients(signed)))), expected)


def test_records_keep_their_numbers():
    """Uniform, from the record's number and the seed alone, however the batch is cut."""
    ids = torch.arange(50_000)
    u = unwrap(record_uniforms(Private(ids), seed=4))
    assert (u >= 0).all()
    assert (u < 1).all()
    gap = (u.sort().values - torch.arange(1, len(u) + 1) / len(u)).abs().max()
    assert gap < 1.95 / math.sqrt(len(u))
    part = unwrap(record_uniforms(Private(ids[[7, 40_000, 3]]), seed=4))
    assert torch.equal(part, u[[7, 40_000, 3]])
    other = unwrap(record_uniforms(Private(ids), seed=5))
    assert abs(float(torch.corrcoef(torch.stack([u, other]))[0, 1])) < 0.02
    assert abs(float(torch.corrcoef(torch.stack([u[1:], u[:-1]]))[0, 1])) < 0.02
    z = unwrap(record_normals(Private(ids), seed=4))
    assert abs(float(z.mean())) < 0.02
    assert abs(float(z.std()) - 1) < 0.02
    assert abs(float(z.pow(4).mean()) - 3) < 0.2
