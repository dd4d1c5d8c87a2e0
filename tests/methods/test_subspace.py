"""Subspaces against their columns formed one by one."""

import pytest
import torch

from equipoise.gradients.factors import DenseFactor, IndexFactor, OuterFactor
from equipoise.gradients.factors.convolution import ConvFactor, ConvGeometry
from equipoise.gradients.operator import DenseGradients, FactoredGradients
from equipoise.methods.subspaces import held as held_subspace
from equipoise.methods.subspaces import principal_subspace, random_subspace

SHAPES = {"linear": (6, 5), "tied": (7, 4), "conv": (4, 2, 3, 3), "bias": (5,), "unused": (3, 3)}
K = 4


def gradients(records=6, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(records, *shape, generator=g, dtype=dtype)

    factors = {
        "linear": (OuterFactor(randn(3, 5), randn(3, 6)),),
        "tied": (
            IndexFactor(torch.randint(7, (records, 5), generator=g), randn(5, 4), 7),
            OuterFactor(randn(5, 4), randn(5, 7)),
        ),
        "conv": (ConvFactor(randn(2, 6, 6), randn(4, 4, 4), ConvGeometry.of((3, 3))),),
        "bias": (DenseFactor(randn(5)),),
        "unused": (),
    }
    return FactoredGradients(factors, shapes=SHAPES)


def held():
    g = torch.Generator().manual_seed(9)
    return held_subspace({n: torch.randn(K, *s, generator=g, dtype=torch.float64) for n, s in SHAPES.items()})


def seeded(dense_limit=0):
    return random_subspace(3, SHAPES, K, dtype=torch.float64, dense_limit=dense_limit)


KINDS = pytest.mark.parametrize("make", [held, seeded, lambda: seeded(40)], ids=["held", "seeded", "mixed"])


def columns(subspace):
    """V [P, K], one lift a column."""
    eye = torch.eye(subspace.dimension, dtype=torch.float64)
    return torch.stack([torch.cat([t.flatten() for t in subspace.lift(e).values()]) for e in eye], dim=1)


def close(actual, expected, tolerance=1e-10):
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=scale * tolerance)


@KINDS
def test_coordinates_lift_and_gram_agree(make):
    subspace, G = make(), gradients()
    V = columns(subspace)
    assert V.shape == (G.num_parameters, subspace.dimension)
    close(subspace.coordinates(G), G.materialise().matrix() @ V)
    close(subspace.coordinates(G.materialise()), G.materialise().matrix() @ V)
    close(subspace.gram(), V.t() @ V)
    y = torch.linspace(-1, 2, subspace.dimension, dtype=torch.float64)
    lifted = subspace.lift(y)
    assert {name: tuple(t.shape) for name, t in lifted.items()} == SHAPES
    close(torch.cat([t.flatten() for t in lifted.values()]), V @ y)
    assert subspace.coordinates(gradients(0)).shape == (0, subspace.dimension)


@KINDS
def test_residual_is_the_matrix_minus_its_part(make):
    subspace, G = make(), gradients()
    V, M = columns(subspace), G.materialise().matrix()
    R = M - M @ V @ V.t()
    rest = subspace.residual(G)
    close(rest.materialise().matrix(), R)
    close(rest.row_norms(), R.norm(dim=1))
    C = torch.linspace(-1, 1, 12, dtype=torch.float64).view(6, 2)
    sums = rest.weighted_sums(C)
    close(torch.cat([sums[n].reshape(2, -1) for n in SHAPES], 1), C.t() @ R)
    close(G.materialise().matrix(), M)


def test_seeded_columns_depend_on_the_seed_alone():
    first, again = seeded(), seeded()
    other = random_subspace(4, SHAPES, K, dtype=torch.float64, dense_limit=0)
    assert torch.equal(columns(first), columns(again))
    assert not torch.allclose(columns(first), columns(other))
    state = torch.get_rng_state()
    columns(first)
    assert torch.equal(torch.get_rng_state(), state)
    single = random_subspace(3, SHAPES, K, dense_limit=0)
    lifted = [torch.cat([t.flatten() for t in single.lift(e).values()]) for e in torch.eye(K)]
    close(columns(first), torch.stack(lifted, 1).double(), 1e-6)
    wide = random_subspace(0, {"a": (30, 20), "b": (50,)}, 400, dense_limit=0)
    assert wide.gram().diagonal().mean().item() == pytest.approx(1, abs=0.05)


def nearly_dependent(spread, seed=9, parameters=400, records=60):
    """Public rows with five strong directions and many weak ones; their directions, and which are weak."""
    g = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(parameters, parameters, generator=g, dtype=torch.float64))[0]
    U = torch.linalg.qr(torch.randn(records, records, generator=g, dtype=torch.float64))[0]
    s = torch.full((records,), 10.0**-spread, dtype=torch.float64)
    s[:5] = 1
    return ((U * s) @ Q[:, :records].t()).float(), Q, s < 0.1


def adversarial(Q, weak, count=600, seed=1):
    """Large rows in the weak directions of public rows, with next to nothing outside the span."""
    g = torch.Generator().manual_seed(seed)
    m, parameters = len(weak), len(Q)
    inside = torch.randn(count, m, generator=g, dtype=torch.float64) * weak
    outside = torch.randn(count, parameters - m, generator=g, dtype=torch.float64)
    share = 10 ** (torch.rand(count, 1, generator=g, dtype=torch.float64) * 4 - 5)
    inside, outside = (part / part.norm(dim=1, keepdim=True) for part in (inside, outside))
    return (1000 * (inside @ Q[:, :m].t() + share * outside @ Q[:, m:].t())).float()


@pytest.mark.parametrize("spread", [2.3, 2.45])
@pytest.mark.parametrize("form", ["kernel", "held", "orthonormal"])
def test_norms_of_residuals_and_projections_are_never_too_small(form, spread):
    """Each row of the weighted sums, taken alone, against the norm that was reported for it."""
    public, Q, weak = nearly_dependent(spread)
    basis = "held" if form != "kernel" else form
    found = principal_subspace(
        DenseGradients({"w": public}), [["w"]], 60, basis=basis, measure=False
    ).subspace
    subspace = found.orthonormal() if form == "orthonormal" else found
    G = DenseGradients({"w": adversarial(Q, weak)})
    for rows in (subspace.residual(G), subspace.projection(G)):
        clipped = rows.weighted_sums(torch.diag(rows.row_norms().reciprocal()))["w"]
        assert clipped.double().norm(dim=1).max() <= 1 + 1e-3
