"""Every kind of factor, by every kernel, against its rows formed by hand."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from equipoise.gradients import FactoredGradients, numerics
from equipoise.gradients.factors import DenseFactor, IndexFactor, OuterFactor
from equipoise.gradients.factors.convolution import ConvFactor, ConvGeometry
from equipoise.gradients.factors.pair_products import gram, inner

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
RECORDS = 5


def randn(*shape, dtype):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)), dtype=dtype)


def outer(a, b, shape=()):
    return OuterFactor(a, b, *([shape] if shape else [])), torch.einsum("bso,bsi->boi", b, a).view(
        len(b), *shape or (b.shape[2], a.shape[2])
    )


def outer_of(positions, d_in, d_out):
    return lambda dtype: outer(*(randn(RECORDS, positions, size, dtype=dtype) for size in (d_in, d_out)))


def outer_sequence_first(dtype):
    return outer(*(randn(4, RECORDS, size, dtype=dtype).transpose(0, 1) for size in (6, 3)))


def outer_shared(dtype):
    return outer(randn(1, 4, 6, dtype=dtype).expand(RECORDS, 4, 6), randn(RECORDS, 4, 3, dtype=dtype))


def outer_viewed(dtype):
    return outer(randn(RECORDS, 2, 6, dtype=dtype), randn(RECORDS, 2, 4, dtype=dtype), (2, 2, 6))


def outer_cancelling(dtype):
    """Two positions that nearly cancel: the Gram matrices alone keep no digit of the norm."""
    a, b = randn(RECORDS, 1, 6, dtype=dtype), randn(RECORDS, 1, 5, dtype=dtype)
    return outer(torch.cat([a, a * (1 + 2**-12)], dim=1), torch.cat([b, -b], dim=1))


def look_up(positions, tail):
    def make(dtype):
        index = torch.arange(RECORDS * positions).view(RECORDS, positions) * 7 % 5
        b = randn(RECORDS, positions, *tail, dtype=dtype)
        rows = torch.zeros(RECORDS, 6, *tail, dtype=dtype)
        for i, s in product(range(RECORDS), range(positions)):
            rows[i, index[i, s]] += b[i, s]
        return IndexFactor(index, b, 6), rows

    return make


def dense(*shape, order=()):
    def make(dtype):
        g = randn(RECORDS, *shape, dtype=dtype)
        g = g.permute(order) if order else g
        return DenseFactor(g), g

    return make


def conv(size, kernel, c_in=4, c_out=6, stride=1, padding=0, dilation=1, groups=1, transposed=False):
    def make(dtype):
        geometry = ConvGeometry.of(kernel, stride, padding, dilation, groups)
        x = randn(RECORDS, c_in, *size, dtype=dtype)
        shape = (c_in, c_out // groups) if transposed else (c_out, c_in // groups)
        weight = torch.zeros(RECORDS, *shape, *kernel, dtype=dtype, requires_grad=True)
        pairs = [side for pair in reversed(geometry.padding) for side in pair]
        run = getattr(F, f"conv{'_transpose' * transposed}{len(kernel)}d")
        y = torch.cat([
            run(x[i : i + 1], weight[i], None, stride, padding, groups=groups, dilation=dilation)
            if transposed
            else run(F.pad(x[i : i + 1], pairs), weight[i], None, stride, 0, dilation, groups)
            for i in range(RECORDS)
        ])  # fmt: skip
        b = randn(*y.shape, dtype=dtype)
        (rows,) = torch.autograd.grad((y * b).sum(), weight)
        return (ConvFactor(b, x, geometry) if transposed else ConvFactor(x, b, geometry)), rows

    return make


CASES = {
    "outer, one position": outer_of(1, 7, 3),
    "outer, few positions": outer_of(3, 12, 10),
    "outer, many positions": outer_of(40, 3, 4),
    "outer, wide output": outer_of(2, 3, 17),
    "outer, sequence first": outer_sequence_first,
    "outer, shared input": outer_shared,
    "outer, viewed as another shape": outer_viewed,
    "outer, positions that cancel": outer_cancelling,
    "index, one position": look_up(1, (3,)),
    "index, collisions": look_up(9, (3,)),
    "index, many positions": look_up(40, (2,)),
    "index, table of numbers": look_up(4, ()),
    "index, table of matrices": look_up(4, (2, 3)),
    "dense, scalar": dense(),
    "dense, vector": dense(7),
    "dense, tensor": dense(2, 3, 4),
    "dense, channels last": dense(4, 3, 2, 2, order=(0, 1, 4, 2, 3)),
    "conv1d": conv((9,), (3,), padding=1),
    "conv2d": conv((6, 7), (3, 2)),
    "conv2d, one channel": conv((8, 8), (4, 4), c_in=1, stride=2, padding=1),
    "conv2d, stride and dilation": conv((11, 10), (3, 2), stride=(2, 3), dilation=(2, 1), padding=(1, 0)),
    "conv2d, groups": conv((6, 6), (3, 3), groups=2, padding=1, stride=2),
    "conv2d, depthwise": conv((6, 6), (3, 3), c_out=4, groups=4),
    "conv2d, one by one": conv((5, 4), (1, 1), stride=2),
    "conv2d, whole input": conv((3, 3), (3, 3)),
    "conv2d, same padding of an even kernel": conv((6, 5), (2, 4), padding="same"),
    "conv3d": conv((5, 4, 4), (2, 3, 2), c_in=2, c_out=3, stride=(2, 1, 1), padding=1),
    "transposed 1d": conv((4,), (3,), stride=2, padding=1, transposed=True),
    "transposed 2d": conv((4, 3), (3, 2), stride=2, groups=2, padding=1, transposed=True),
    "transposed 3d": conv((2, 3, 3), (2, 2, 3), c_in=2, c_out=2, dilation=2, transposed=True),
}


def close(actual, expected, tolerance, scale=None):
    scale = expected.abs().max() if scale is None else scale
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=float(scale) * tolerance)


def every_kernel(factor):
    lazy = {"outer": ("gram", "product"), "index": ("gram", "sort"), "dense": ()}
    forced = lazy.get(factor.kind, ("grouped", "correlate", "unfold", "gram"))
    return [factor, *(factor._with(name) for name in dict.fromkeys((*factor.kernels(), *forced)))]


@DTYPES
@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_every_kernel_equals_the_rows(make, dtype):
    factor, rows = make(dtype)
    # What float32 positions that cancel to 2^-12 leave is known to 2^-12; the Gram route alone knows nothing.
    cancelling = make is outer_cancelling and dtype == torch.float32
    tolerance = 4e-3 if cancelling else TOLERANCE[dtype]
    weights, matrix = randn(RECORDS, 9, dtype=dtype), rows.reshape(RECORDS, -1)
    assert factor.shape == rows.shape[1:]
    for form in every_kernel(factor):
        close(form.materialise(), rows, tolerance)
        squares = matrix.double().square().sum(1)
        close(form.norms_squared(), squares, 2 * tolerance, 0.0)
        for m in (1, 2, 9):
            sums = form.weighted_sum(weights[:, :m])
            assert sums.shape == (m, *factor.shape)
            close(sums.reshape(m, -1), weights[:, :m].t() @ matrix, tolerance)
        if dtype == torch.float64:
            check_some(form, rows)


def check_some(form, rows):
    """Some of the records, and none."""
    mask = torch.tensor([True, False, False, True, True])
    close(form.rows(mask).materialise(), rows[mask], 1e-10)
    close(form.rows(torch.tensor([3, 0, 3])).materialise(), rows[[3, 0, 3]], 1e-10)
    close(form.rows(slice(1, 4)).norms_squared(), rows[1:4].reshape(3, -1).square().sum(1), 1e-10)
    empty = form.rows(slice(0, 0))
    assert empty.num_records == 0
    assert empty.norms_squared().shape == inner(empty, empty).shape == (0,)
    assert empty.materialise().shape == (0, *form.shape)
    assert gram(empty, form).shape == (0, RECORDS)
    for m in (1, 2, 9):
        sums = empty.weighted_sum(torch.zeros(0, m))
        assert sums.shape == (m, *form.shape)
        assert not sums.any()


@DTYPES
def test_products_of_every_kind_with_every_kind(dtype):
    """For a parameter of shape (6, 4), and outer factors of long and short S."""
    factors = [OuterFactor(randn(5, s, 4, dtype=dtype), randn(5, s, 6, dtype=dtype)) for s in (1, 3, 50)] + [
        OuterFactor(randn(5, 2, 12, dtype=dtype), randn(5, 2, 2, dtype=dtype), shape=(6, 4)),
        IndexFactor(torch.arange(20).view(5, 4) * 5 % 6, randn(5, 4, 4, dtype=dtype), 6),
        DenseFactor(randn(5, 6, 4, dtype=dtype)),
    ]
    for left, right in product(factors, factors):
        rows, others = left.materialise().flatten(1), right.materialise().flatten(1)
        scale = float(rows.norm(dim=1).max() * others.norm(dim=1).max())
        close(inner(left, right), (rows * others).sum(1), TOLERANCE[dtype], scale)
        close(gram(left, right.rows(slice(1, 4))), rows @ others[1:4].t(), TOLERANCE[dtype], scale)
        close(left.difference(right).materialise().flatten(1), rows - others, TOLERANCE[dtype])


def changed(factor, change, of_inputs=lambda a: a):
    """The factor with other gradients and inputs."""
    if isinstance(factor, OuterFactor):
        return OuterFactor(of_inputs(factor.a), change(factor.b), factor.shape)
    if isinstance(factor, IndexFactor):
        return IndexFactor(factor.index, change(factor.b), factor.num_rows)
    if isinstance(factor, ConvFactor):
        return ConvFactor(of_inputs(factor.a), change(factor.b), factor.geometry)
    return DenseFactor(change(factor.materialise()))


@pytest.mark.parametrize("name", [n for n in CASES if n != "dense, scalar"])
def test_a_bad_record_shows_and_does_not_touch_the_others(name):
    factor, _ = CASES[name](torch.float64)
    good, clean = torch.tensor([0, 1, 3, 4]), factor.norms_squared()

    def spoilt(b, bad):
        b = b.contiguous().clone()
        b[2].view(-1)[0] = bad
        return b

    for bad in (float("nan"), float("inf"), float("-inf")):
        for form in every_kernel(changed(factor, partial(spoilt, bad=bad))):
            squares = form.norms_squared()
            assert not torch.isfinite(squares[2])
            close(squares[good], clean[good], 1e-10)
            assert torch.isfinite(form.rows(good).weighted_sum(torch.ones(4, 1))).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["outer, few positions", "index, collisions", "dense, vector", "conv2d"])
def test_half_precision_is_summed_in_float32_at_least(name, dtype):
    factor, _ = CASES[name](torch.float32)
    half = changed(factor, *(lambda t: t.to(dtype),) * 2)
    wide = changed(half, *(torch.Tensor.double,) * 2)
    assert half.norms_squared().dtype == torch.float64
    assert half.weighted_sum(torch.ones(RECORDS, 1)).dtype == torch.float32
    close(half.norms_squared().double(), wide.norms_squared(), 1e-5)


@pytest.mark.parametrize(("small", "large"), [(1e-23, 1e22), (1e-10, 1e22), (1e-25, 1e12), (1e-21, 1e15)])
@pytest.mark.parametrize(("positions", "kernel"), [(1, "gram"), (3, "gram"), (3, "product")])
@pytest.mark.parametrize("is_device", [False, True])
def test_a_tiny_input_beside_a_huge_gradient_keeps_its_norm(
    monkeypatch, positions, kernel, small, large, is_device
):
    """Squares of 1e-23 vanish in float32 and those of 1e22 are infinite; the row 1e-23 * 1e22 is neither."""
    monkeypatch.setattr("equipoise.gradients.factors.outer.host_waits", lambda device: is_device)
    a, b = torch.full((3, positions, 100), 1.0), torch.full((3, positions, 2), 1.0)
    a[1, 0], b[1, 0] = small, large
    b[1, 1:] = 0.0  # the other positions do not hide what the first one loses
    for factor in (OuterFactor(a, b, kernel=kernel), OuterFactor(b, a, kernel=kernel)):
        expected = factor.materialise().double().flatten(1).norm(dim=1)
        close(factor.norms_squared().sqrt().double(), expected, 1e-4)


@pytest.mark.parametrize("kernel", ["gram", "grouped", "unfold"])
def test_a_convolution_keeps_the_norm_of_a_tiny_input_beside_a_huge_gradient(kernel):
    x, b = torch.full((2, 3, 4, 4), 1e-23), torch.full((2, 2, 3, 3), 1e22)
    factor = ConvFactor(x, b, ConvGeometry.of((2, 2)), kernel)
    expected = factor.materialise().double().flatten(1).norm(dim=1)
    close(factor.norms_squared().sqrt().double(), expected, 1e-4)


def test_norms_that_lost_digits_are_nan_where_nobody_looks():
    """A record by itself; a row of zeros lost none."""
    a, b = torch.ones(4, 3, 5), torch.ones(4, 3, 2)
    a[1, 0], b[1, 0], b[1, 1:], b[2] = 1e-23, 1e22, 0.0, 0.0
    opposite = torch.tensor([1.0, -1.0, 1e-9]).view(3, 1)
    looked_up = torch.stack([torch.ones(3, 2), opposite.expand(3, 2), torch.zeros(3, 2), torch.ones(3, 2)])
    uses = torch.ones(4, 6), torch.tensor([1.0, -1.0, 0.0, 1.0])[:, None].expand(4, 6)
    for of in (
        OuterFactor(a, b, kernel="gram").norms_squared,
        OuterFactor(b, a, kernel="gram").norms_squared,
        IndexFactor(torch.zeros(4, 3, dtype=torch.long), looked_up, 7, kernel="gram").norms_squared,
        lambda: FactoredGradients({"w": tuple(map(DenseFactor, uses))}).row_norms(),
    ):
        with numerics.lost_are_nan():
            marked = of()
        assert marked.isnan().tolist() == [False, True, False, False]
        close(marked[[0, 2, 3]], of()[[0, 2, 3]], 1e-12)


def test_masked_positions_and_records_keep_the_gram_route_exact():
    """Gradients that are exactly zero are not mistaken for underflow, nor a record of them for a bad one."""
    a, b = torch.randn(4, 5, 7), torch.randn(4, 5, 6)
    b[0, 2:], b[1], a[2, 1] = 0.0, 0.0, 0.0
    b[3, 0, 0] = torch.nan
    factor = OuterFactor(a, b, kernel="gram")
    norms = factor.norms_squared().sqrt().float()
    close(norms[:3], factor.materialise()[:3].flatten(1).norm(dim=1), 1e-5)
    assert torch.isnan(norms[3])


@pytest.mark.parametrize("rows", [2, 6, 300])
@pytest.mark.parametrize("tail", [(), (3,), (2, 2)])
def test_products_of_look_ups_are_those_of_their_rows(rows, tail):
    """Few look-ups of one index, many, or none; against look-ups, against rows; a bad record stays alone."""
    left, right = (
        IndexFactor(torch.randint(rows, (n, 4)), randn(n, 4, *tail, dtype=torch.float64), rows)
        for n in (5, 7)
    )
    expected = left.materialise().flatten(1) @ right.materialise().flatten(1).t()
    b = left.b.clone()
    b[2] = torch.nan
    spoilt = IndexFactor(left.index, b, rows)
    for other in (right, DenseFactor(right.materialise())):
        close(gram(left, other), expected, 1e-12)
        close(gram(other, left), expected.t(), 1e-12)
        close(gram(spoilt, other)[[0, 1, 3, 4]], expected[[0, 1, 3, 4]], 1e-12)


def test_wide_products_lose_less_than_is_stated():
    """One large feature first: a sum from end to end would drop all the small ones that follow."""
    for width in (64, 768, 4096):
        a = torch.full((1, 20, width), 0.99 * 2**-12)
        a[..., 0] = 1.0
        squares = (a.double() @ a.double().transpose(1, 2)).square().sum()
        stated = numerics.products_error(torch.float32, 20, width, width)
        lost = 1 - float(OuterFactor(a, a, kernel="gram").norms_squared() / squares)
        assert lost < stated < 2.1e-5  # all positions are alike: M^2 is the square itself
