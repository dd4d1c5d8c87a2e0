"""Bounded sums never move by more than their bound, whatever the rule and the records."""

import copy
import math
import pickle
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from privacy_rows import Flat, Greedy, rows

from equipoise.gradients import DenseGradients
from equipoise.methods.adaptive_rms import _squares
from equipoise.methods.clip_rules import NSGD, PSAC, Abadi, AutoS
from equipoise.methods.two_threshold_sums import clip_channels, clip_either, clip_selected, top_share
from equipoise.privacy import (
    Bounded,
    Draw,
    JointGaussian,
    Private,
    PrivateError,
    PrivateRows,
    capped,
    centred_indicator,
    clip,
    clip_coordinates,
    clip_jointly,
    histogram,
    indicator,
    input_moments,
    moment_action,
    second_moment,
    soft_indicator,
    sums_of,
)
from equipoise.privacy.bounds.bounded import after_exchange, make_bounded
from equipoise.privacy.bounds.clipping import cut_to, limited_weights
from equipoise.privacy.private import unwrap

DRAW = Draw("batch", 0)


def private(*records, draw=DRAW, dtype=torch.float32) -> PrivateRows:
    return PrivateRows(rows(*records, dtype=dtype), draw)


def vector(bounded: Bounded) -> torch.Tensor:
    return torch.cat([unwrap(t).double().flatten() for t in bounded.value.values()])


def two_layers(records: torch.Tensor) -> PrivateRows:
    return PrivateRows(DenseGradients({"a": records[:, :2], "b": records[:, 2:]}), DRAW)


def top(g, fraction, upper, lower):
    """The rows of largest norm clipped at `upper`, the others at `lower`, in a whole draw."""
    ids = Private(torch.arange(g.row_norms().shape[0]), DRAW)
    return clip_selected(g, ids, top_share(g.row_norms(), ids, fraction), upper, lower, Flat())


def tail(g):
    return soft_indicator(two_layers(g).row_norms(), 1.0, "above", width=0.5)


def matrices(g):
    """The same numbers as two weights."""
    return PrivateRows(DenseGradients({"a": g[:, :4].view(-1, 2, 2), "b": g[:, 4:].view(-1, 1, 1)}), DRAW)


def jointly(rows, groups=None, shares=None):
    return clip_jointly(rows, JOINT, groups, shares)["a"]


def mixed(rows):
    """Norms in an order that all records make."""
    return rows.row_norms().sort().values


JOINT = JointGaussian(("a",), [[1.0]], lambda n: n.clamp(max=1.0)[:, None], (1.0,), noise_multiplier=1.0)
LAYERS = [["a"], ["b"]]
PLACES = torch.tensor([0.0, 1.25, 9.0, -1.0, math.nan, math.inf])
COLUMNS = [{"a": 50 * torch.eye(2)}, {"b": 50 * torch.eye(3)}]
QUERIES = {
    "flat": lambda g: clip(two_layers(g), Flat(), 0.7),
    "a rule that asks for too much": lambda g: clip(two_layers(g), Greedy(), 0.7),
    "per layer": lambda g: clip(two_layers(g), Flat(), [0.3, 2.0], LAYERS),
    "per layer, greedy": lambda g: clip(two_layers(g), Greedy(), 1.0, LAYERS[::-1]),
    "indicator": lambda g: indicator(Private(g.norm(dim=1) > 1, DRAW)),
    "centred": lambda g: centred_indicator(Private(g.norm(dim=1) > 1, DRAW)),
    "histogram": lambda g: histogram(Private(g.norm(dim=1), DRAW), 5),
    "histogram of users' records": lambda g: 3 * histogram(Private(g[:, 0] + 2, DRAW), 2),
    "capped": lambda g: capped(Private(g.norm(dim=1) ** 2, DRAW), 3.0),
    "coordinates": lambda g: clip_coordinates(Private(g[:, :3], DRAW), Greedy(), 0.5),
    "coordinates by whole norms": lambda g: clip_coordinates(
        Private(g[:, :3], DRAW), Greedy(), 0.5, norms=two_layers(g).row_norms()
    ),
    "either": lambda g: clip_either(two_layers(g), tail(g), 2.0, 0.5, Greedy()),
    "channels": lambda g: clip_channels(two_layers(g), tail(g), 2.0, 0.5, Flat()),
    "second moment": lambda g: second_moment(two_layers(g), Flat(), 0.7, LAYERS),
    "action on columns far too long": lambda g: moment_action(two_layers(g), Flat(), 0.7, COLUMNS),
    "input moments": lambda g: input_moments(matrices(g), ["a", "b"]),
    "squares": lambda g: _squares(two_layers(g), 0.25),
    "top share": lambda g: top(two_layers(g), 0.4, 2.0, 0.5),
    "difference": lambda g: clip(two_layers(g), Flat(), 1.0) - clip(two_layers(g), Flat(), 0.25),
    "scaled": lambda g: -2.5 * clip(two_layers(g), Flat(), 1.0),
}


@pytest.mark.parametrize("name", QUERIES)
def test_adversarial_neighbours(name):
    query, generator = QUERIES[name], torch.Generator().manual_seed(7)
    worst_add = worst_replace = 0.0
    for trial in range(35):
        size = trial % 5
        scale = 10.0 ** torch.randint(-3, 4, (size + 1, 1), generator=generator)
        g = torch.randn(size + 1, 5, generator=generator) * scale
        if trial % 3 == 0:
            g = g[:1].sign().expand(size + 1, 5) * scale  # all in one direction
        other = torch.randn(5, generator=generator) * 10.0 ** (trial % 7 - 3)
        replaced = torch.cat([g[:-1], -g[-1:] if trial % 2 else other[None]])
        whole = query(g)
        add = (vector(whole) - vector(query(g[:-1]))).norm()
        replace = (vector(whole) - vector(query(replaced))).norm()
        worst_add = max(worst_add, float(add) / whole.add_remove)
        worst_replace = max(worst_replace, float(replace) / whole.replace)
    assert worst_add <= 1 + 1e-5
    assert worst_replace <= 1 + 1e-5
    assert worst_add > 0.5  # the search does reach for the bound
    assert worst_replace > 0.3
    assert whole.replace <= 2 * whole.add_remove + 1e-12


@pytest.mark.parametrize(
    ("make", "value", "bounds"),
    [
        (lambda: clip(private([3.0, 4.0], [0.3, 0.4], [0.0, 0.0]), Flat(), 1.0), [0.9, 1.2], (1, 2)),
        (lambda: clip(two_layers(torch.ones(1, 4)), Flat(), [3.0, 4.0], LAYERS), [1] * 4, (5, 10)),
        (lambda: clip(two_layers(torch.ones(1, 4)), Flat(), 1.0, LAYERS), [0.5] * 4, (1, 2)),
        (lambda: top(private([3.0, 4.0]), 0.5, 3.0, 1.0), None, (5, 6)),
        (lambda: second_moment(two_layers(torch.ones(1, 5)), Flat(), 1.0, LAYERS), None, (1, 2**0.5)),
        (lambda: indicator(Private(torch.ones(3, dtype=torch.bool), DRAW)), [3], (1, 1)),
        (lambda: capped(Private(torch.ones(3), DRAW), 2.0), [3], (2, 2)),
        (lambda: centred_indicator(Private(torch.ones(3), DRAW)), [1.5], (0.5, 1)),
        # between two places, and without what is no number
        (lambda: histogram(Private(PLACES, DRAW), 3, records=4), [2, 0.75, 1.25], (4, 4 * 2**0.5)),
    ],
)  # fmt: skip
def test_a_sum_has_its_value_and_its_bounds(make, value, bounds):
    found = make()
    assert (found.add_remove, found.replace) == pytest.approx(bounds)
    assert value is None or vector(found).tolist() == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_records_get_weight_zero(bad):
    good = clip(private([3.0, 4.0], [0.1, 0.0]), Flat(), 1.0)
    out = clip(private([3.0, 4.0], [bad, 1.0], [0.1, 0.0]), Flat(), 1.0)
    assert torch.equal(unwrap(out.value["w"]), unwrap(good.value["w"]))
    assert unwrap(out.counts)[1] == 1
    united = sums_of([{"s": out}, {"s": good}])["s"]
    assert unwrap(united.counts)[1] == 1
    values = capped(Private(torch.tensor([bad, 1.0]), DRAW), 2.0)
    assert unwrap(values.value["sum"]).item() == 1.0
    only = clip(private([bad, bad]), Flat(), 1.0)
    assert torch.equal(unwrap(only.value["w"]), torch.zeros(2))
    grouped = PrivateRows(DenseGradients({"a": torch.tensor([[bad], [1.0]]), "b": torch.ones(2, 1)}), DRAW)
    parts = clip(grouped, Flat(), 5.0, groups=[["a"], ["b"]])
    assert unwrap(parts.value["b"]).item() == 1.0


def test_union_of_micro_batches_equals_the_whole():
    g = torch.randn(7, 3, dtype=torch.float64)
    whole = clip(private(*g.tolist(), dtype=torch.float64), Flat(), 0.5)
    pieces = [g[:1], g[1:4], g[4:4], g[4:]]
    parts = [{"s": clip(PrivateRows(DenseGradients({"w": p}), DRAW), Flat(), 0.5)} for p in pieces]
    united = sums_of(parts)["s"]
    assert torch.allclose(unwrap(united.value["w"]), unwrap(whole.value["w"]), rtol=1e-12)
    assert united.add_remove == whole.add_remove == 0.5


def coordinates(values, **options):
    return clip_coordinates(values, Flat(), 1.0, **options)


OTHER = Draw("batch", 1)
of_other = private([1.0], draw=OTHER)
REFUSALS = {
    "made directly": (lambda g: Bounded({}, 1.0, 2.0, DRAW), PrivateError, "directly"),
    "raw rows": (lambda g: clip(rows([1.0]), Flat(), 1.0), TypeError, "PrivateRows"),
    "private threshold": (lambda g: clip(g, Flat(), g.row_norms().max()), PrivateError, "public"),
    "private thresholds": (lambda g: clip(g, Flat(), g.row_norms(), groups=[["w"]]), PrivateError, "public"),
    "private upper": (lambda g: capped(g.row_norms(), g.row_norms()[0]), PrivateError, "upper"),
    "zero threshold": (lambda g: clip(g, Flat(), 0.0), ValueError, "positive"),
    "nan threshold": (lambda g: clip(g, Flat(), math.nan), ValueError, "positive"),
    "missing group": (lambda g: clip(g, Flat(), 1.0, groups=[]), ValueError, "missing"),
    "unknown group": (lambda g: clip(g, Flat(), 1.0, groups=[["w"], ["v"]]), ValueError, "unknown"),
    "public mask": (lambda g: indicator(torch.ones(2, dtype=torch.bool)), TypeError, "Private"),
    "float mask": (lambda g: indicator(g.row_norms()), TypeError, "bool"),
    "scaled by private": (lambda g: clip(g, Flat(), 1.0) * g.row_norms().max(), TypeError, "public"),
    "other draw": (lambda g: clip(g, Flat(), 1) + clip(of_other, Flat(), 1), ValueError, "different draws"),
    "another draw's": (lambda g: make_bounded({"a": g.row_norms()}, 1, 2, OTHER), ValueError, "Compute both"),
    "other bounds": (lambda g: sums_of({"s": clip(g, Flat(), c)} for c in (1, 2)), ValueError, "bounds"),
    "no parts": (lambda g: sums_of([]), ValueError, "no micro-batch"),
    "plus a number": (lambda g: clip(g, Flat(), 1.0) + 1.0, TypeError, "bounded"),
    "mixed mask": (lambda g: indicator(mixed(g) > 0), PrivateError, "^mask must"),
    "mixed values": (lambda g: capped(mixed(g), 1.0), PrivateError, "^values must"),
    "mixed halves": (lambda g: centred_indicator(mixed(g)), PrivateError, "^inside must"),
    "mixed scores": (lambda g: soft_indicator(mixed(g), 1.0, "above"), PrivateError, "^scores must"),
    "mixed columns": (lambda g: coordinates(mixed(g)[:, None]), PrivateError, "^coordinates must"),
    "mixed norms": (lambda g: coordinates(g.matrix(), norms=mixed(g)), PrivateError, "^norms must"),
    "long shares": (partial(jointly, groups=[["w"]], shares=(1.1,)), ValueError, "sum to 1.21, above 1"),
    "many shares": (partial(jointly, groups=[["w"]], shares=(0.5, 0.5)), ValueError, "2 entries for 1"),
    "no share": (partial(jointly, groups=[["w"]], shares=(0.0,)), ValueError, r"shares\[0\]"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name):
    action, kind, text = REFUSALS[name]
    with pytest.raises(kind, match=text):
        action(private([3.0, 4.0], [1.0, 0.0]))


class Rule:
    """A clip rule of a function of norms and threshold."""

    def __init__(self, weights, held=None):
        self._weights, self.held, self.calls = weights, held, 0

    def weights(self, norms, threshold):
        self.calls += 1
        return self._weights(self, norms, threshold / norms)


COUNTING = {
    "parity": Rule(lambda rule, n, w: w.clamp(max=1) * (1 if len(n) % 2 else -1)),
    "shorter if there are many": Rule(lambda rule, n, w: w.clamp(max=1.0 if n.shape[0] > 100 else 0.5)),
    "flat": Flat(),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTING)
@pytest.mark.parametrize("records", [[0], [1, 100], [101], [1023, 1024, 1025, 3000]], ids=str)
def test_a_rule_cannot_count_records(name, records):
    """It gives a record one weight, however many others there are."""
    norms = torch.linspace(0.5, 2, 3000)
    weights = [limited_weights(COUNTING[name], norms[:count], 1.0) for count in records]
    assert [len(found) for found in weights] == records
    assert all(torch.equal(found, weights[-1][: len(found)]) for found in weights)


def held(number):
    return Rule(lambda rule, n, w: (w / (1 + rule.held)).clamp(max=1), number)


LOOKING = {
    "median": Rule(lambda rule, n, w: (n.median() / n).clamp(max=1)),
    "by operations that may mix": Rule(lambda rule, n, w: w.flip(0).flip(0).clamp(max=1)),
    "weights of no norm": Rule(lambda rule, n, w: torch.full((len(n),), 0.5)),
    "a private number": held(Private(torch.tensor(3.0), DRAW)),
    "a private number of no draw": held(Private(torch.tensor(3.0))),
    "private numbers, as many as a block": held(Private(torch.ones(1024), DRAW)),
    "another answer at every call": Rule(lambda rule, n, w: w.clamp(max=1) / rule.calls),
    "a coin that the records share": Rule(lambda rule, n, w: w.clamp(max=1) * torch.rand(())),
}


@pytest.mark.parametrize("name", LOOKING)
def test_a_rule_looks_at_public_numbers_and_its_norm_alone(name):
    with pytest.raises(PrivateError, match=r"on its own|asked the same again"):
        clip(private([3.0], [4.0]), LOOKING[name], 1.0)


def test_a_bound_cannot_be_forged():
    part = clip(PrivateRows(rows([3.0, 4.0])), Flat(), 1.0)
    for name in Bounded.__slots__:
        with pytest.raises(PrivateError, match="cannot be changed"):
            setattr(part, name, 1e-3)
    # A copy would be another part of the draw, and its records count twice.
    for copied in (copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))):
        with pytest.raises(PrivateError):
            copied(part)
    assert not hasattr(part, "__setstate__")
    with pytest.raises(ValueError, match="twice"):
        sums_of([{"s": part}, {"s": part}])


@pytest.mark.parametrize("threshold", [1.0, 1e-20, 1e-30, 1e-38])
@pytest.mark.parametrize("norm", [1e-30, 1e-3, 1.0, 1e15, 1e30])
def test_weights_hold_at_the_edges_of_float32(norm, threshold):
    """Among denormals a rounded quotient may lie far above the exact one."""
    asked = torch.tensor([math.nan, math.inf, -math.inf, 9.0, -9.0, 0.1])
    assert cut_to(1.0, asked, torch.full((6,), 0.5)).tolist() == pytest.approx([0, 0, 0, 2, -2, 0.1])
    norms = torch.tensor([norm])
    weight = limited_weights(Flat(), norms, threshold)
    assert float(weight.double() * norms.double()) <= threshold * (1 + 2e-6)


#: Sums of rows, and whether they count the rows that they make shorter.
COUNTED = {
    **{name: (QUERIES[name], True) for name in ("flat", "per layer", "coordinates by whole norms")},
    **{n: (QUERIES[n], False) for n in ("second moment", "action on columns far too long", "input moments")},
    "jointly": (lambda g: jointly(two_layers(g)), True),
    "jointly in groups": (lambda g: jointly(two_layers(g), LAYERS), True),
    "exchanged": (lambda g: after_exchange({"s": QUERIES["flat"](g)}, list)["s"], True),
    "in parts": (lambda g: sums_of({"s": QUERIES["flat"](some)} for some in g.split(1))["s"], True),
    "minus another": (lambda g: QUERIES["flat"](g) - QUERIES["flat"](g), True),
    "scaled": (lambda g: 2 * QUERIES["flat"](g), True),
}


@pytest.mark.parametrize("name", COUNTED)
def test_a_sum_counts_the_records_that_are_finite_that_are_not_and_those_made_shorter(name):
    query, counts_shorter = COUNTED[name]
    g = torch.tensor([[0.01] * 5, [10.0] * 5, [math.nan] * 5, [0.02] * 5])
    counts = query(g).counts
    assert (unwrap(counts).tolist(), counts.draw) == ([3, 1, 1][: 2 + counts_shorter], DRAW)


def test_groups_have_shares_whose_squares_sum_to_one():
    """A record as long as its bound in every group makes the sum as long as its bound."""
    value = jointly(two_layers(torch.full((1, 5), 1e3)), LAYERS).value
    assert sum(float(unwrap(one).norm()) ** 2 for one in value.values()) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("rule", [Abadi(), AutoS(0.5), NSGD(0.1), PSAC()])
def test_a_rule_is_asked_once_for_each_threshold_and_its_operations_give_the_same_bits(rule, monkeypatch):
    norms, few = torch.rand(2, 40) * 3
    limited_weights(rule, norms, 0.7)
    expected = rule.weights(few, 0.7)
    monkeypatch.setattr(type(rule), "_weights", lambda *_: 1 / 0)
    assert torch.equal(limited_weights(rule, few, 0.7), expected)
    with pytest.raises(ZeroDivisionError):
        limited_weights(rule, few, 1.3)


@dataclass(frozen=True)
class Writing:
    """It writes to a tensor of its own while it answers: noted operations would read it later."""

    def weights(self, norms, threshold):
        power, out = torch.full((), 1.0), norms * 0
        for _ in range(2):
            out = out + norms * power * 0.01
            power.mul_(0.5)
        return out


@dataclass(frozen=True)
class Power:
    """Kernels compute it in another way at the end of a vector."""

    def weights(self, norms, threshold):
        return threshold / (norms + 0.01) ** 1.3


@pytest.mark.parametrize("rule", [Writing(), Power()])
def test_operations_that_were_noted_answer_as_the_rule_does_however_many_norms_there_are(rule):
    norms = torch.linspace(0.1, 5, 1500)
    every = limited_weights(rule, norms, 0.7)
    torch.testing.assert_close(every, cut_to(0.7, rule.weights(norms, 0.7), norms))
    for count in (1, 7, 130, 1025):
        assert torch.equal(limited_weights(rule, norms[:count], 0.7), every[:count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e30, 1.0])
def test_coordinates_are_cut_however_long_they_are_and_added_up_as_floats(size, dtype):
    found = clip_coordinates(Private(torch.full((300, 4), size, dtype=dtype), DRAW), Flat(), 1.0)
    assert unwrap(found.value["coordinates"]).dtype == torch.float32
    assert float(vector(found).norm()) == pytest.approx(300, rel=1e-2)
    assert unwrap(found.counts).tolist() == [300, 0, 300]
    norms = Private(torch.tensor([1.0, math.nan]), DRAW)
    lost = clip_coordinates(Private(torch.ones(2, 1), DRAW), Flat(), 1.0, norms=norms)
    assert (float(vector(lost)), unwrap(lost.counts).tolist()[:2]) == (1.0, [1, 1])
