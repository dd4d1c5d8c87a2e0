"""Laws that hold for every operator: each operation equals the same one on the materialised matrix."""

import pytest
import torch

from equipoise.gradients.factors import DenseFactor, IndexFactor, OuterFactor
from equipoise.gradients.factors.convolution import ConvFactor, ConvGeometry
from equipoise.gradients.operator import DenseGradients, FactoredGradients
from equipoise.methods.subspaces import held

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
SHAPES = {
    "linear": (3, 4),
    "tied": (6, 4),
    "conv": (4, 2, 3, 3),
    "bias": (5,),
    "unused": (2, 2),
    "reused": (3, 2),
}
NAMES = tuple(SHAPES)


def factored(records=6, seed=0, dtype=torch.float64):
    """Every kind of factor; a tied embedding and head; a parameter with uses that cancel; one unused."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(records, *shape, generator=g, dtype=dtype)

    index = torch.randint(6, (records, 5), generator=g)
    a, b = randn(3, 2), randn(3, 3)
    factors = {
        "linear": (OuterFactor(randn(2, 4), randn(2, 3)),),
        "tied": (IndexFactor(index, randn(5, 4), 6), OuterFactor(randn(5, 4), randn(5, 6))),
        "conv": (ConvFactor(randn(2, 6, 6), randn(4, 3, 3), ConvGeometry.of((3, 3), 2, 1)),),
        "bias": (DenseFactor(randn(5)),),
        "unused": (),
        "reused": (OuterFactor(a, b), OuterFactor(a + randn(3, 2), -b), DenseFactor(randn(3, 2))),
    }
    return FactoredGradients(factors, losses=torch.arange(records, dtype=dtype), shapes=SHAPES)


def dense(records=6, seed=0, dtype=torch.float64):
    return factored(records, seed, dtype).materialise()


def difference(records=6, seed=0, dtype=torch.float64):
    return factored(records, seed, dtype) - factored(records, seed + 100, dtype)


def residual(records=6, seed=0, dtype=torch.float64):
    columns = {name: tensor / 20 for name, tensor in dense(3, 77, dtype).tensors.items()}
    return held(columns).residual(factored(records, seed, dtype))


def diagonal(dtype=torch.float64):
    """No entry follows the form of a factor."""
    g = torch.Generator().manual_seed(50)
    return {name: 2 * torch.rand(shape, generator=g, dtype=dtype) - 0.5 for name, shape in SHAPES.items()}


def sides(dtype=torch.float64):
    """Along the first dimension, the second, or as their product: what factors take in."""
    g = torch.Generator().manual_seed(60)

    def rand(*shape):
        return torch.rand(*shape, generator=g, dtype=dtype) + 0.1

    found = {"linear": (rand(3, 1), rand(4)), "tied": rand(1, 4), "conv": (rand(4, 1, 1, 1), rand(2, 1, 1))}
    return found | {"bias": rand(5), "unused": rand(()), "reused": (rand(()), rand(3, 1), rand(1, 2))}


def of_scale(make, scale):
    """The operator whose columns are scaled."""

    def scaled(records=6, seed=0, dtype=torch.float64):
        return make(records, seed, dtype).scaled(scale(dtype))

    return scaled


def combined(records=6, seed=0, dtype=torch.float64):
    return 1.7 * factored(records, seed, dtype) + -0.7 * factored(records, seed + 100, dtype)


def shifted(records=6, seed=0, dtype=torch.float64):
    row = {name: tensor[0] for name, tensor in dense(1, 88, dtype).tensors.items()}
    return factored(records, seed, dtype).shifted(row)


scaled_whole, scaled_sides = (of_scale(factored, scale) for scale in (diagonal, sides))
scaled_difference, shifted_and_scaled = (of_scale(make, diagonal) for make in (difference, shifted))
ALGEBRA = {
    "scaled whole": scaled_whole, "scaled sides": scaled_sides, "scaled difference": scaled_difference,
    "combined": combined, "shifted": shifted, "shifted and scaled": shifted_and_scaled,
}  # fmt: skip
KINDS = pytest.mark.parametrize("make", [factored, dense, difference, residual, *(ALGEBRA.values())])


def close(actual, expected, tolerance):
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=scale * tolerance)


def guard_of(dtype, *makes):
    """How much longer norms may read where terms or uses cancel, so that no bound is missed."""
    if dtype == torch.float64 or not {difference, *ALGEBRA.values()} & set(makes):
        return 0.0
    return 4e-5 if set(makes) == {difference} else 4e-4


def flat(sums, columns=None):
    lead = () if columns is None else (columns,)
    return torch.cat([sums[name].reshape(*lead, -1) for name in NAMES], dim=-1)


def check_rows(found, expected, tolerance, guard=0.0):
    """Rows, their norms, which are not shorter, their sums, and some of them."""
    C = torch.linspace(-1, 1, 6, dtype=expected.dtype)
    close(found.materialise().matrix(), expected, tolerance)
    close(found.row_norms(), expected.norm(dim=1), tolerance + guard)
    assert (found.row_norms() >= expected.norm(dim=1) * (1 - tolerance)).all()
    close(flat(found.weighted_sums(C)), C @ expected, tolerance)
    close(found.rows(slice(1, 3)).materialise().matrix(), expected[1:3], tolerance)


@DTYPES
@KINDS
def test_norms_sums_and_products_equal_the_matrix(make, dtype):
    G, tolerance, guard = make(dtype=dtype), TOLERANCE[dtype], guard_of(dtype, make)
    M, rows = G.materialise().matrix(), G.materialise().tensors
    assert M.shape == G.shape == (6, G.num_parameters)
    check_rows(G, M, tolerance, guard)
    C = torch.linspace(-1, 1, 12, dtype=dtype).view(6, 2)
    close(flat(G.weighted_sums(C), 2), C.t() @ M, tolerance)
    per_tensor = {name: C[:, 0] * (k + 1) for k, name in enumerate(NAMES)}
    for name, total in G.weighted_sums(per_tensor).items():
        close(total, torch.tensordot(per_tensor[name], rows[name], 1), tolerance)
    groups = [["linear", "tied"], ["bias"], ["unused"], []]
    by_group = G.row_norms(groups)
    assert by_group.shape == (6, 4)
    for k, names in enumerate(groups):
        parts = torch.cat([torch.zeros(6, 1, dtype=dtype), *(rows[name].flatten(1) for name in names)], 1)
        close(by_group[:, k], parts.norm(dim=1), tolerance + guard)
    chosen = G.select(["conv", "tied"])
    assert chosen.names == ("conv", "tied")
    of_chosen = torch.cat([rows[name].flatten(1) for name in chosen.names], 1)
    close(chosen.materialise().matrix(), of_chosen, tolerance)


@DTYPES
@KINDS
@pytest.mark.parametrize("other", [factored, dense, difference, residual, scaled_whole, combined, shifted])
def test_products_with_every_other_operator(make, other, dtype):
    G, H, tolerance = make(dtype=dtype), other(4, seed=5, dtype=dtype), 10 * TOLERANCE[dtype]
    M, N, guard = G.materialise().matrix(), H.materialise().matrix(), guard_of(dtype, make, other)
    close(G.cross_gram(H), M @ N.t(), tolerance)
    close(G.cross_gram(G).diagonal(), G.row_norms().square(), tolerance)
    close(G.inner(G), G.row_norms().square(), tolerance)
    named = G.cross_gram(H, per_tensor=True)
    assert tuple(named) == NAMES
    close(sum(named.values()), M @ N.t(), tolerance)
    some = G.rows(slice(0, 4))
    close(some.inner(H), (M[:4] * N).sum(1), tolerance)
    for found, expected in ((some - H, M[:4] - N), (some + H, M[:4] + N)):
        close(found.materialise().matrix(), expected, tolerance)
        close(found.row_norms(), expected.norm(dim=1), tolerance + guard)


@KINDS
def test_records_may_be_permuted_and_split(make):
    G = make()
    norms, C = G.row_norms(), torch.linspace(0, 1, 6, dtype=torch.float64)
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    close(G.rows(order).row_norms(), norms[order], 1e-10)
    close(flat(G.rows(order).weighted_sums(C[order])), flat(G.weighted_sums(C)), 1e-10)
    close(G.rows(order).cross_gram(G), G.cross_gram(G)[order], 1e-10)
    cuts = slice(0, 2), slice(2, 2), torch.tensor([False, False, True, True, True, True])
    parts = [G.rows(cut) for cut in cuts]
    close(torch.cat([part.row_norms() for part in parts]), norms, 1e-10)
    close(torch.cat([part.materialise().matrix() for part in parts]), G.materialise().matrix(), 1e-10)
    split = [flat(part.weighted_sums(C[cut])) for part, cut in zip(parts, cuts, strict=True)]
    close(sum(split), flat(G.weighted_sums(C)), 1e-10)


@KINDS
def test_sums_are_added_up_in_memory_of_their_own(make):
    G, C = make(), torch.linspace(0, 1, 6, dtype=torch.float64)
    before, sums = G.materialise().matrix().clone(), G.weighted_sums(C)
    kept = flat(sums)
    for total in G.weighted_sums(C).values():
        total.zero_()
    assert torch.equal(flat(sums), kept)
    assert torch.equal(G.materialise().matrix(), before)


@KINDS
def test_empty_batch(make):
    G = make(0)
    assert G.shape == G.materialise().matrix().shape == (0, make(1).num_parameters)
    assert G.row_norms().shape == G.inner(make(0, seed=2)).shape == (0,)
    assert G.row_norms([["bias"], ["conv"]]).shape == (0, 2)
    assert G.cross_gram(make(3)).shape == (0, 3)
    for weights in (torch.zeros(0), torch.zeros(0, 2)):
        for name, total in G.weighted_sums(weights).items():
            assert total.shape == (*weights.shape[1:], *SHAPES[name])
            assert not total.any()


@DTYPES
@KINDS
def test_columns_may_be_scaled_multiplied_and_rows_combined(make, dtype):
    """The oracle beside the fast path: each operation on the formed matrix."""
    G, H, tolerance = make(dtype=dtype), make(seed=3, dtype=dtype), 10 * TOLERANCE[dtype]
    tensors, D = G.materialise().tensors, diagonal(dtype)
    M, N = G.materialise().matrix(), H.materialise().matrix()
    d = torch.cat([scale.flatten() for scale in D.values()])
    g = torch.Generator().manual_seed(70)
    sizes = {name: SHAPES[name][1] for name in ("linear", "tied", "unused", "reused")}
    squares = {name: torch.randn(size, size, generator=g, dtype=dtype) for name, size in sizes.items()}
    products = {name: rows @ squares[name] if name in squares else rows for name, rows in tensors.items()}
    for found, expected in (
        (G.scaled(D), M * d),
        (-2.5 * G, -2.5 * M),
        (0.3 * G + 0.7 * H, 0.3 * M + 0.7 * N),
        (G.shifted({name: scale + 1 for name, scale in D.items()}), M + d + 1),
        (G.multiplied(squares), DenseGradients(products).matrix()),
    ):
        # A difference of far points that is combined again has terms much larger than its rows.
        guard = guard_of(dtype, make, shifted) * (10 if make in (difference, scaled_difference) else 1)
        check_rows(found, expected, tolerance, guard)
    assert G.scaled(D).select(["conv"]).names == ("conv",)
    C = torch.linspace(-1, 1, 6, dtype=dtype)
    moments = G.input_moments({name: (k + 1) * C for k, name in enumerate(squares)})
    for k, name in enumerate(squares):
        rows = (k + 1) * C[:, None, None] * tensors[name]
        close(moments[name], (rows.mT @ rows).sum(0), tolerance)


@pytest.mark.parametrize("size", [1e-40, 1e-35, 1e-25, 1e15, 1e25, 1e37])
def test_second_moments_keep_what_float32_squares_lose(size):
    """Inputs and errors of opposite sizes: the direction at length one, or shorter where a size is lost."""
    error = min(1e-10 / size, 1e38)
    G = FactoredGradients({"w": (OuterFactor(torch.full((1, 4), size), torch.full((1, 3), error)),)})
    moment = G.input_moments({"w": 1 / G.row_norms().clamp(min=1e-12)})["w"]
    assert float(moment.norm()) <= 1 + 1e-5
    if size in (1e-25, 1e15, 1e25):
        torch.testing.assert_close(moment, torch.full((4, 4), 0.25))


def test_a_single_outer_product_keeps_its_norm_under_any_diagonal(monkeypatch):
    a, b, D = (torch.randn(*shape) for shape in ((5, 7), (5, 3), (3, 7)))
    # Squares of these numbers vanish in float32, or are infinite there.
    a[0] *= 1e-25
    b[1] *= 1e-25
    a[2], b[2] = a[2] * 1e-22, b[2] * 1e21
    expected = ((b.double().unsqueeze(2) * a.double().unsqueeze(1)) * D.double()).flatten(1).norm(dim=1)
    G = FactoredGradients({"w": (OuterFactor(a, b),)}).scaled({"w": D})
    monkeypatch.setattr(OuterFactor, "materialise", None)
    torch.testing.assert_close(G.row_norms().double(), expected, rtol=1e-6, atol=1e-30)


def test_scaled_rows_that_cancel_read_too_long_rather_than_too_short():
    """Positions whose terms cancel, under a diagonal of many sizes: what is clipped stays below the norm."""
    g = torch.Generator().manual_seed(1)
    a, b = torch.randn(64, 40, 30, generator=g), torch.randn(64, 40, 20, generator=g)
    a[:, 20:], b[:, 20:] = a[:, :20], -b[:, :20] * (1 + 1e-6)
    D = 10 ** (4 * torch.rand(20, 30, generator=g) - 2)
    G = FactoredGradients({"w": (OuterFactor(a, b),)}).scaled({"w": D})
    norms, one = G.row_norms().double(), torch.eye(64)
    for i in range(8):
        assert G.weighted_sums(one[i])["w"].double().norm() <= norms[i] * (1 + 1e-6)


def test_results_are_detached_and_losses_follow():
    leaf = torch.randn(3, 4, requires_grad=True)
    G = FactoredGradients({"w": (OuterFactor(leaf, leaf * 2),)}, losses=leaf.sum(1))
    for result in (G.row_norms(), G.weighted_sums(torch.ones(3))["w"], G.losses, G.cross_gram(G), G.inner(G)):
        assert not result.requires_grad
    close(G.rows(torch.tensor([2, 0])).losses, leaf.detach().sum(1)[[2, 0]], 0)


def test_uses_that_cancel_keep_their_norm():
    """w used as f(x) - f(x'): the two uses' Gram matrices leave no digit in float32."""
    a, b = torch.randn(4, 1, 9), torch.randn(4, 1, 7)
    near = a + 2**-14 * torch.randn(4, 1, 9)
    G = FactoredGradients({"w": (OuterFactor(a, b), OuterFactor(near, -b))})
    exact = torch.bmm(b.double().transpose(1, 2), (a.double() - near.double())).flatten(1).norm(dim=1)
    close(G.row_norms().double(), exact, 2e-2)


def test_a_bad_record_is_left_out_by_rows():
    G = factored()
    tensors = {name: rows.clone() for name, rows in G.materialise().tensors.items()}
    tensors["bias"][1], tensors["conv"][4] = float("nan"), float("inf")
    for spoilt in (DenseGradients(tensors), G - DenseGradients(tensors)):
        norms = spoilt.row_norms()
        good = torch.isfinite(norms)
        assert good.tolist() == [True, False, True, True, False, True]
        kept = spoilt.rows(good)
        assert all(torch.isfinite(total).all() for total in kept.weighted_sums(torch.ones(4)).values())
        torch.testing.assert_close(kept.row_norms(), norms[good])


def test_autocast_does_not_reach_the_norms():
    G, again = (factored(dtype=torch.float32) for _ in range(2))
    plain = G.row_norms()
    with torch.autocast("cpu", torch.bfloat16):
        close(again.row_norms(), plain, 0)
        close(flat(again.weighted_sums(torch.ones(6))), flat(G.weighted_sums(torch.ones(6))), 0)
        close(again.cross_gram(again), G.cross_gram(G), 0)


REFUSED = [
    (lambda G: G.weighted_sums(torch.ones(5)), r"needs \[6\]"),
    (lambda G: G.weighted_sums({"bias": torch.ones(6)}), "no entry for 'linear'"),
    (lambda G: G.inner(factored(5)), "pairs records"),
    (lambda G: G - factored(5), "pairs records"),
    (lambda G: G.cross_gram(G.select(["bias"])), "different parameters"),
    (lambda G: G.select(["nothing"]), "unknown parameters"),
    (lambda G: G.row_norms([["bias", "bias"]]), "repeated"),
    (lambda G: G.rows(torch.ones(5, dtype=torch.bool)), "mask"),
    (lambda G: G.scaled({"bias": torch.ones(5)}), "give each parameter"),
    (lambda G: G.scaled(diagonal() | {"bias": torch.ones(4)}), "does not broadcast"),
    (lambda G: G.scaled(float("nan")), "not finite"),
    (lambda G: G.scaled(1e16), "apart from zero"),
    (lambda G: G.multiplied({"linear": torch.eye(3)}), r"needs \(4, 4\)"),
    (lambda G: G.multiplied({"linear": torch.eye(4) / 0}), "damp"),
    (lambda G: G.input_moments({"conv": torch.ones(6)}), "no matrix among"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_errors_teach(call, message):
    with pytest.raises(ValueError, match=message):
        call(factored())
