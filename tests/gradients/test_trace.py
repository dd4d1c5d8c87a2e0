"""Replaying a trace gives the bits of the engine, whatever the model is; what has no trace runs eagerly."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from zoo import RIGHT_CASES, UNPROVED, Net

from equipoise.gradients import GradientEngine
from equipoise.gradients.capture.random_numbers import random_numbers_from
from equipoise.gradients.forward_only import LossEngine
from equipoise.gradients.operator import FactoredGradients
from equipoise.gradients.trace import Line, Replayed, line_of

#: They branch on values, ask Python for numbers, draw in a backward, or are compiled or dense.
UNTRACED = {name for name, why in UNPROVED.items() if why == "no trace"}
EXACT = "pairs in a record"


def entropy(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def batch():
    return {"x": torch.randn(6, 5), "y": torch.randint(3, (6,))}


def net(*parts):
    return nn.Sequential(nn.Linear(5, 7), *(parts or [nn.Tanh()]), nn.Linear(7, 3))


def started(model=None, loss=entropy):
    return GradientEngine(model or net(), loss, records := batch(), check=False), records


def of_case(name):
    case = RIGHT_CASES[name]
    return GradientEngine(case.model(), case.loss, records := dict(case.records()), check=False), records


def eager(engine, records):
    engine.never_replay("to compare")
    try:
        return engine.by_plan(records)
    finally:
        engine.never_replay("")


def same(left, right):
    """All that methods ask of rows."""
    weights = 1 / (1 + left.row_norms())
    assert torch.equal(left.losses, right.losses)
    for groups in (None, [(name,) for name in left.names]):
        replayed, exact = left.row_norms(groups), right.row_norms(groups)
        # A line cannot see whether a square is zero or vanished: it counts as the largest that vanishes.
        assert ((replayed == exact) | ((exact == 0) & (replayed < 1e-16))).all()
    for given in (weights, weights[:, None] * torch.ones(2), dict.fromkeys(left.names, weights)):
        one, other = left.weighted_sums(given), right.weighted_sums(given)
        assert all(torch.equal(one[name], other[name]) for name in other)
    some = torch.arange(left.num_records).flip(0)[:-1]
    assert torch.equal(left.rows(some).row_norms(), right.rows(some).row_norms())
    whole = weights.clone()
    whole[0] = 0.0
    for rows in (left.rows(slice(1, None)), left.rows(torch.arange(left.num_records) > 0)):
        cut, full = rows.weighted_sums(weights[1:]), right.weighted_sums(whole)
        assert all(torch.equal(cut[name], full[name]) for name in full)
        assert torch.equal(rows.materialise().matrix(), right.rows(slice(1, None)).materialise().matrix())


class Asked(TorchDispatchMode):
    """Notes each operation, its plain arguments, and the forms of its tensors."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {one.name: one.default_value for one in func._schema.arguments if one.has_default_value()}
        given |= dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | (kwargs or {})
        forms = tree_map_only(torch.Tensor, lambda one: (one.dtype, one.shape, one.stride()), given)
        self.calls += [(func, forms)] if func.namespace == "aten" else []  # others note what runs
        return func(*args, **(kwargs or {}))


def check_lines(engine, records, monkeypatch):
    """Functions for Python stand in the place of some operations; modes for functions see none of them."""
    met = []
    with monkeypatch.context() as patch:
        patch.setattr(Line, "__call__", lambda line, *given: met.append((line, given)) or line.graph(*given))
        engine.by_plan(records).weighted_sums(torch.ones(len(next(iter(records.values())))))
    for line, given in met[-3:]:
        with torch.no_grad(), Asked() as of_graph:
            line.graph(*given)
        with torch.no_grad(), Asked() as own, torch.device("meta"):
            line(*given)
        assert repr(own.calls) == repr(of_graph.calls)  # a NaN is no NaN


@pytest.mark.few(14)
@pytest.mark.parametrize("name", RIGHT_CASES)
def test_every_right_model_replays_to_the_bits_of_the_engine(name, monkeypatch):
    """And its line asks for the operations of its graph."""
    engine, records = of_case(name)
    with random_numbers_from(1):
        found = engine.by_plan(records)
    assert (not isinstance(found, Replayed)) == (name in UNTRACED | {EXACT})
    if isinstance(found, Replayed):
        with random_numbers_from(1):
            same(found, eager(engine, records))
        check_lines(engine, records, monkeypatch)


def written_apart(given):
    """New memory is new each time, and so is a copy that is written to."""
    first, second = (given["x"].new_empty(3).copy_(times * given["x"][0]) for times in (1, 2))
    third, fourth = given["x"].clone(), given["x"].clone()
    third += 1
    return {"first": first, "second": second, "third": third, "fourth": fourth}


def conjugated(given):
    z = torch.view_as_complex(given["x"][:, :2].contiguous())
    return {"square": (z * z.conj()).real, "plain": (z * z).real}


@pytest.mark.parametrize("function", [written_apart, conjugated])
def test_what_is_left_out_of_a_line_changes_nothing(function):
    x = torch.randn(4, 3)
    line, _ = line_of(function, {"x": x})
    for found, expected in zip(line(x.clone()), function({"x": x.clone()}).values(), strict=True):
        assert torch.equal(found, expected)


def times(value, wrong):
    def others(self, *given):
        found = getattr(FactoredGradients, wrong)(self, *given)
        return value * found if wrong == "row_norms" else {name: value * one for name, one in found.items()}

    return others


WRONG = [("row_norms", 2.0), ("row_norms", math.nan), ("weighted_sums", 2.0)]


@pytest.mark.parametrize(("wrong", "value"), WRONG)
def test_a_replay_of_other_gradients_is_found_at_the_start(monkeypatch, wrong, value):
    monkeypatch.setattr(Replayed, wrong, times(value, wrong))
    monkeypatch.setattr("equipoise.gradients.trace.are_lost_nan", lambda: True)  # it takes no other way
    engine = GradientEngine(net(), entropy, batch())
    assert engine.independence.word == "compared"
    assert "other gradients" in engine.independence.reason


def test_what_a_model_says_of_its_records_stands_in_no_reason(monkeypatch):
    def fails(*given):
        raise RuntimeError("record 7 holds 4.25")

    engine, records = started()
    monkeypatch.setattr(engine.trials, "_other_replay", fails)
    assert engine.check(records).word == "compared"
    assert "4.25" not in engine.independence.reason


def test_a_pair_whose_norm_loses_digits_is_taken_exactly():
    engine, records = of_case(EXACT)
    values = [dict(f()) for f in (engine.model.named_parameters, engine.model.named_buffers)]
    found, _ = engine.traced(records).gradients(*values, records)
    assert not isinstance(found, Replayed)
    assert torch.equal(engine.by_plan(records).row_norms(), eager(engine, records).row_norms())


def test_records_whose_norms_float32_does_not_hold_are_computed_exactly():
    engine, records = started()
    assert isinstance(engine.by_plan(records), Replayed)
    for bad in (math.nan, math.inf, 1e30, 1e-30):
        records["x"][2] = bad
        found, expected = engine.by_plan(records).row_norms(), eager(engine, records).row_norms()
        torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-6, atol=0)


def test_a_vanished_square_makes_a_norm_longer_and_never_shorter():
    model = nn.Linear(4, 1, bias=False)
    engine = GradientEngine(model, lambda m, x: m(x)[:, 0] * 1e10, torch.ones(3, 4), check=False)
    engine.by_plan(torch.ones(3, 4))
    records = torch.full((3, 4), 1e-25) * torch.arange(3.0)[:, None]
    found, expected = engine.by_plan(records).row_norms(), eager(engine, records).row_norms()
    assert (found >= expected).all()
    assert (found <= expected + 1e-8).all()  # next to every clipping norm


def test_rows_of_zeros_are_replayed():
    """Look-ups, products over positions, and a table that is used twice; a record has weight zero."""

    def forward(self, x):
        return self.mid(self.table(x)).tanh() @ self.table.weight.t()

    def masked(model, batch):
        each = F.cross_entropy(model(batch["x"]).transpose(1, 2), batch["x"], reduction="none")
        return each.mean(1) * batch["mask"]

    records = {"x": torch.randint(7, (6, 40)), "mask": (torch.arange(6) != 2).float()}
    model = Net(forward, table=nn.Embedding(7, 4), mid=nn.Linear(4, 4))
    engine = GradientEngine(model, masked, records, check=False)
    found = engine.by_plan(records)
    assert isinstance(found, Replayed)
    torch.testing.assert_close(found.row_norms(), eager(engine, records).row_norms(), rtol=0, atol=1e-11)


def test_a_forward_that_writes_to_a_tensor_of_its_own_has_no_trace():
    held = torch.zeros(3, 2)

    def losses(given):
        held[0] = given["x"].sum(0)
        return {"losses": given["x"].sum(1)}

    with pytest.raises(RuntimeError, match="hold"):
        line_of(losses, {"x": torch.ones(3, 2)})
    assert not held.any()


def seeded(model, x):
    torch.manual_seed(7)
    return model(x) * torch.rand(3)


def forked(model, x):
    with torch.random.fork_rng():
        torch.manual_seed(7)
        factor = torch.rand(3)
    return model(x) * factor


def twice_the_same(model, x):
    state = torch.get_rng_state()
    first = torch.rand(3)
    torch.set_rng_state(state)
    return model(x) * first / torch.rand(3)


@pytest.mark.parametrize("run", [seeded, forked, twice_the_same])
def test_a_forward_that_sets_a_generator_is_not_replayed(run):
    engine, records = started(loss=lambda model, batch: entropy(lambda x: run(model, x), batch))
    with random_numbers_from(3):
        found = engine.by_plan(records)
    assert not isinstance(found, Replayed)
    with random_numbers_from(3):
        assert torch.equal(found.row_norms(), eager(engine, records).row_norms())


def test_a_row_that_is_lost_deals_the_others_no_other_numbers():
    engine, records = started(net(nn.Dropout(0.5)))
    with random_numbers_from(1):
        before = engine.by_plan(records).row_norms()
    records["x"][0] = math.nan
    with random_numbers_from(1):
        after = engine.by_plan(records).row_norms()
    torch.testing.assert_close(after[1:], before[1:])


class WritesThroughAView(nn.Module):
    """A write to one buffer is read through another, which is a view of it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("whole", torch.arange(6.0))
        self.register_buffer("part", self.whole[:3])

    def forward(self, x):
        self.whole.add_(1.0)
        return self.linear(x) * self.part


@pytest.mark.parametrize("kind", [GradientEngine, LossEngine])
def test_buffers_that_share_their_memory(kind):
    def loss(model, x):
        return model(x).square().sum(1)

    x, model = torch.randn(6, 4), WritesThroughAView()
    engine = kind(model, loss, x)
    assert "compared" in str(engine.independence)
    found = engine.by_plan(x).losses
    assert torch.equal(model.part, torch.arange(3.0))
    torch.testing.assert_close(found, loss(model, x).detach())
