"""An adversary looks for neighbouring batches whose bounded sums differ by more than the bound.

Four searches: random records of wild scales added to random batches, empty and one-record batches, records
found by gradient ascent on the difference itself, and records whose own terms cancel. Every clip rule, flat
and per layer, and the count of a learned threshold.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from equipoise.gradients import GradientEngine
from equipoise.gradients.factors import DenseFactor, IndexFactor, OuterFactor
from equipoise.gradients.factors.base import merged
from equipoise.gradients.factors.convolution import ConvFactor, ConvGeometry
from equipoise.gradients.operator import FactoredGradients
from equipoise.methods import NSGD, PSAC, Abadi, ClipRule
from equipoise.methods.clip_rules import layers
from equipoise.privacy import Draw, PrivateRows, clip
from equipoise.privacy.bounds.clipping import limited_weights
from equipoise.privacy.private import unwrap

# Every clip rule of the library with its own settings, and some with others.
RULES = [
    *(rule() for rule in ClipRule.kinds().values() if rule.__module__.startswith("equipoise")),
    NSGD(regulariser=0.5),
    PSAC(regulariser=1e-4),
]
SLACK = 1 + 1e-5
FEATURES, CLASSES = 6, 4


def network(dtype=torch.float32) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES)).to(dtype)


def loss(model: nn.Module, batch: dict) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none") * batch["scale"]


def wild_batch(count: int, rng: torch.Generator) -> dict:
    """Records whose gradients span twenty orders of magnitude, zero included."""
    scale = 10 ** (20 * torch.rand(count, generator=rng) - 10)
    scale[torch.rand(count, generator=rng) < 0.1] = 0.0
    return {
        "x": 3 * torch.randn(count, FEATURES, generator=rng),
        "y": torch.randint(CLASSES, (count,), generator=rng),
        "scale": scale,
    }


def part(batch: dict, index) -> dict:
    return {name: value[index] for name, value in batch.items()}


@functools.cache
def attached(dtype: torch.dtype) -> GradientEngine:
    example = wild_batch(3, torch.Generator().manual_seed(0))
    example = {name: v.to(dtype) if v.is_floating_point() else v for name, v in example.items()}
    return GradientEngine(network(dtype), loss, example)


def gradients(batch: dict):
    return attached(batch["x"].dtype)(batch)


def bounded(batch, rule, threshold, groups=None):
    return clip(PrivateRows(gradients(batch), Draw("batch", 0)), rule, threshold, groups)


def vector(sums) -> torch.Tensor:
    return torch.cat([unwrap(value).double().flatten() for value in sums.value.values()])


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize(("per_layer", "threshold"), [(False, 1.0), (True, 1e-3)])
def test_random_neighbours(rule, per_layer, threshold):
    rng = torch.Generator().manual_seed(1)
    groups = layers([name for name, _ in network().named_parameters()]) if per_layer else None
    limits = [0.8 * threshold, 0.6 * threshold] if per_layer else threshold
    largest = 0.0
    for trial in range(40):
        batch = wild_batch(1 + trial % 6, rng)
        whole = bounded(batch, rule, limits, groups)
        without = bounded(part(batch, slice(1, None)), rule, limits, groups)
        assert whole.add_remove == pytest.approx(threshold)
        assert whole.replace == pytest.approx(2 * threshold)
        largest = max(largest, float((vector(whole) - vector(without)).norm()))
        other = wild_batch(1, rng)
        replaced = {name: torch.cat([other[name], batch[name][1:]]) for name in batch}
        change = float((vector(whole) - vector(bounded(replaced, rule, limits, groups))).norm())
        assert change <= 2 * threshold * SLACK
    assert largest <= threshold * SLACK
    assert largest > 0.9 * threshold  # the search comes near the bound: it could find an excess


def moved_by(rows) -> float:
    """The largest norm of what one record moves the clipped sum by, for one weight column and for five."""
    weights = limited_weights(Abadi(), rows.row_norms(), 1.0)
    found = 0.0
    for i in range(rows.num_records):
        one = torch.zeros_like(weights)
        one[i] = weights[i]
        found = max(found, math.hypot(*(float(v.double().norm()) for v in rows.weighted_sums(one).values())))
        five = rows.weighted_sums(one.unsqueeze(1).expand(-1, 5).contiguous())
        found = max(found, math.hypot(*(float(v[4].double().norm()) for v in five.values())))
    return found


def draw(rng, *shape):
    return torch.randn(*shape, generator=rng)


def log_uniform(rng, low, high) -> float:
    return 10 ** (low + (high - low) * float(torch.rand((), generator=rng)))


def opposed(rng, positions, width, records=2):
    """Near-opposite positions, v and -(1 + e) v, up to 1e10 long and down to rounding apart."""
    v = draw(rng, records, 1, width).expand(-1, positions, -1) * log_uniform(rng, -3, 10)
    sign = torch.ones(positions, 1)
    sign[positions // 2 :] = -1 - log_uniform(rng, -8, -0.5)
    return v * sign + log_uniform(rng, -9, -5) * v.abs().mean() * draw(rng, records, positions, width)


def alike(rng, positions, width, records=2):
    return draw(rng, records, 1, width) * (1 + log_uniform(rng, -8, -2) * draw(rng, 1, positions, width))


def an_outer(rng, positions):
    return OuterFactor(alike(rng, positions, 3), opposed(rng, positions, 4))


def an_expanded(rng, positions):
    return (OuterFactor(alike(rng, positions, 3, 1).expand(3, -1, -1), opposed(rng, positions, 4, 3)),)


def a_convolution(rng, positions):
    inputs = alike(rng, 2 * positions + 1, 2).transpose(1, 2)
    return ConvFactor(inputs, opposed(rng, positions, 3).transpose(1, 2), ConvGeometry.of((3,), 2))


def a_square_convolution(rng, positions):
    x = alike(rng, 36, 2).transpose(1, 2).reshape(2, 2, 6, 6)
    return ConvFactor(x, opposed(rng, 16, 3).transpose(1, 2).reshape(2, 3, 4, 4), ConvGeometry.of((3, 3)))


def look_ups(rng, positions):
    index = torch.randint(2, (2, positions), generator=rng)
    return IndexFactor(index, opposed(rng, positions, 3), 4)


def tied_products(rng, positions):
    one = an_outer(rng, positions)
    return one, OuterFactor(one.a * (1 + log_uniform(rng, -8, -1)), -one.b)


def tied_look_ups(rng, positions):
    table = look_ups(rng, positions)
    chosen = F.one_hot(table.index, table.num_rows).float()
    return table, OuterFactor(-table.b * (1 + log_uniform(rng, -8, -1)), chosen)


def tied_rows(rng, positions):
    one = an_outer(rng, positions)
    return one, DenseFactor(-(1 + log_uniform(rng, -8, -1)) * one.materialise())


SINGLE, CONVOLVED = [an_outer, look_ups], [a_convolution, a_square_convolution]
FORMS = [
    *(
        (make, kernel)
        for make in SINGLE
        for kernel in ("auto", "gram", "product" if make is an_outer else "sort")
    ),
    *((make, kernel) for make in CONVOLVED for kernel in ("grouped", "unfold", "correlate", "gram")),
    *((make, "auto") for make in (an_expanded, tied_products, tied_look_ups, tied_rows)),
]


@pytest.mark.parametrize(("make", "kernel"), FORMS, ids=lambda part: getattr(part, "__name__", part))
def test_terms_that_cancel_inside_a_record(make, kernel):
    """The sum rounds the terms, not the row: the norm has to carry what that adds."""
    rng, largest = torch.Generator().manual_seed(6), 0.0
    for trial in range(24):
        factors = make(rng, (2, 3, 4, 6, 16, 64, 256, 600)[trial % 8])
        if not isinstance(factors, tuple):
            factors = (factors if kernel == "auto" else factors._with(kernel),)
        rows = FactoredGradients(
            {"w": factors, "other": (DenseFactor(torch.zeros(factors[0].num_records, 1)),)}
        )
        chosen = rows.select(["w"]).rows(torch.tensor([1, 0]))
        keep = {name: torch.ones(shape) for name, shape in rows.shapes.items()}
        largest = max(largest, *(moved_by(part) for part in (rows, chosen, rows.scaled(keep))))
    assert 0.9 < largest <= SLACK


def two_groups(rng, positions, width, share):
    """Positions of two groups with features all alike, whose products cancel to a share of their size.

    Sums of products that are all alike drift, and differently so for each pair of groups.
    """
    half = positions // 2
    first, second, gradient = (log_uniform(rng, -1.3, 1.3) for _ in range(3))
    opposite = -half * first * gradient * (1 - 2 * share) / ((positions - half) * second)
    a, b = torch.full((1, positions, width), second), torch.full((1, positions, width), opposite)
    a[:, :half], b[:, :half] = first, gradient
    return a, b


def one_by_one(a, b):
    return ConvFactor(a.transpose(1, 2).contiguous(), b.transpose(1, 2).contiguous(), ConvGeometry.of((1,)))


def halves(a, b):
    half = a.shape[1] // 2
    return OuterFactor(a[:, :half], b[:, :half]), OuterFactor(a[:, half:], b[:, half:])


def token(b):
    return IndexFactor(torch.zeros(b.shape[:2], dtype=torch.long), b, 2)


def a_table_and_a_product(a, b):
    half, terms = a.shape[1] // 2, a * b[..., :1]
    ones = F.one_hot(torch.zeros(1, a.shape[1] - half, dtype=torch.long), 2).float()
    return token(terms[:, :half]), OuterFactor(terms[:, half:], ones)


WIDE = {
    **{f"linear, {k}": lambda a, b, k=k: OuterFactor(a, b, kernel=k) for k in ("gram", "product")},
    **{f"convolution, {k}": lambda a, b, k=k: one_by_one(a, b)._with(k) for k in ("gram", "unfold")},
    **{f"look-ups, {k}": lambda a, b, k=k: token(a * b[..., :1])._with(k) for k in ("gram", "sort")},
    "a difference": lambda a, b: OuterFactor(a, b).difference(OuterFactor(a * 0.75, b)),
    "uses, tied": halves,
    "uses of a recurrent weight": lambda a, b: tuple(
        merged([OuterFactor(a[:, s : s + 1], b[:, s : s + 1]) for s in range(a.shape[1])])
    ),
    "a table and a product": a_table_and_a_product,
}


@pytest.mark.parametrize("make", WIDE.values(), ids=WIDE.keys())
@pytest.mark.parametrize(("width", "positions"), [(256, 8), (256, 300), (1000, 4)])
def test_wide_features_all_alike_that_cancel(make, width, positions):
    rng, largest = torch.Generator().manual_seed(9), 0.0
    for trial in range(12):
        a, b = two_groups(rng, positions, width, share=(1e-1, 3e-2, 1e-2, 1e-3)[trial % 4])
        factors = make(a, b)
        kept = factors if isinstance(factors, tuple) else (factors,)
        rows = FactoredGradients({"w": kept})
        one = 1 / rows.row_norms()
        largest = max(largest, float(rows.weighted_sums(one)["w"].double().norm()))
    assert 0.9 < largest <= SLACK


def test_the_search_finds_a_rule_that_forgets_a_parameter():
    """A norm without the biases lets records pass the bound: the searches above would see it."""
    rng = torch.Generator().manual_seed(4)
    worst = 0.0
    for _ in range(30):
        rows = gradients(wild_batch(1, rng))
        norms = rows.row_norms([[name for name in rows.names if "weight" in name]])[:, 0]
        value = rows.weighted_sums(Abadi().weights(norms, 1.0))
        worst = max(worst, math.hypot(*(float(v.double().norm()) for v in value.values())))
    assert worst > 1.01
