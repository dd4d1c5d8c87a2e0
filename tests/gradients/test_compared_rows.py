"""What the comparison of rows sees where nothing is traced, and what else a start finds out."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zoo import Net, backward, where

from equipoise.gradients import CoverageError, CrossRecordError, GradientEngine
from equipoise.gradients.capture.random_numbers import random_numbers_constant, use_of_random_numbers
from equipoise.gradients.capture.recorder import PlanMismatch
from equipoise.gradients.compare import with_others
from equipoise.gradients.engine_inputs import num_records
from equipoise.gradients.forward_only import LossEngine


def centred(x):
    return x - 0.5 * x.mean(0)


#: Kinds of mixtures; the comparison meets each of them.
WRONG = {
    "a mean": centred,
    "the record before": lambda x: x + 0.1 * x.roll(1, 0),
    "the record behind": lambda x: x + 0.1 * x.roll(-1, 0),
    "large values": where(lambda x: bool(x.abs().max() > 30), centred),
    "a blank record": where(lambda x: bool((x - x.mean(0)).abs().sum(1).min() == 0), centred),
    "not finite": where(lambda x: not bool(x.isfinite().all()), centred),
    "pairs": lambda x: x + 0.1 * x[(torch.arange(len(x)) ^ 1).clamp(max=len(x) - 1)],
    "order": lambda x: x * (1 + 0.1 * x.sum(1).argsort().argsort()[:, None]),
    "capacity": lambda x: x * ((x[:, :1] > 0).cumsum(0) < 3),
    "a coin of torch": where(lambda x: float(torch.rand(())) < 0.4, centred),
    "a coin of NumPy": where(lambda x: np.random.rand() < 0.4, centred),
    "a coin of Python": where(lambda x: random.random() < 0.4, centred),
    "a backward": backward(lambda g: g - g.mean(0)),
    "a backward, by a coin": backward(lambda g: g - g.mean(0) if random.random() < 0.4 else g),
    "a backward that guards": backward(lambda g: g if bool(g.isfinite().all()) else torch.zeros_like(g)),
    "a backward that clips": backward(lambda g: g / max(1.0, float(g.norm()) / 1e6)),
}
HONEST = {
    "each record": torch.tanh,
    "a branch per record": lambda x: torch.stack([row if bool(row.sum() > 0) else 2 * row for row in x]),
    "dropout": lambda x: F.dropout(x, 0.5),
    "noise": lambda x: x + 0.1 * torch.randn_like(x),
    "a coin for all": lambda x: x if random.random() < 0.5 else -x,
    "a backward per record": backward(lambda g: g / (1 + g.norm(dim=1, keepdim=True))),
    "numbers replaced": backward(lambda g: g.nan_to_num(0.0, 0.0, 0.0)),
}


def engine(layer, gate=False):
    def forward(self, x):
        x = self.first(x)
        assert not bool((x == 1234.5).any())  # a value is read: no trace can follow
        return self.head(layer(x))

    model = Net(forward, first=nn.Linear(4, 4), head=nn.Linear(4, 2))
    if gate:
        nn.init.zeros_(model.head.weight)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(7))
    return GradientEngine(model, lambda model, x: torch.sin(model(x)).sum(1), x)


@pytest.mark.few(16)
@pytest.mark.parametrize("gate", [False, True], ids=["", "behind zeros"])
@pytest.mark.parametrize("name", WRONG)
def test_mixtures_are_refused(name, gate):
    with pytest.raises((CoverageError, CrossRecordError)):
        engine(WRONG[name], gate)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", HONEST)
def test_the_honest_are_compared_and_say_why(name):
    found = engine(HONEST[name]).independence
    assert found.word == "compared"
    assert "test_compared_rows.py" in found.reason


@pytest.mark.parametrize("count", [2, 3, 7, 40])
def test_companies_keep_the_same_records_and_change_all_others(count):
    flag = torch.ones(count, 2, dtype=torch.bool)
    batch = {"x": torch.randn(count, 3), "y": torch.arange(count), "flag": flag}
    for changed, same in (form for forms in with_others(batch) for form in forms):
        assert num_records(changed) == count
        kept = torch.zeros(count, dtype=torch.bool).index_fill(0, torch.arange(count)[same], True)
        for name, before in batch.items():
            has_moved = (changed[name] != before).reshape(count, -1).any(1)
            assert not has_moved[kept].any()
            assert name == "flag" or has_moved[~kept].all()


def squares(model, x):
    return model(x).square().flatten(1).sum(1)


@pytest.mark.parametrize(
    "by_place", [lambda n: torch.arange(1.0, n + 1), lambda n: 1.0 - 2 * (torch.arange(n) % 2)]
)
def test_a_model_that_draws_and_follows_a_records_place_is_refused(by_place):
    """It reads a value, so that it has no trace."""

    def forward(self, x):
        y = F.dropout(self.linear(x), 0.3, True)
        float(y.detach().sum())
        return y * by_place(len(x))[:, None]

    with pytest.raises(CoverageError, match="place"):
        GradientEngine(Net(forward, linear=nn.Linear(4, 8)), lambda m, x: m(x).mean(1), torch.randn(8, 4))


@pytest.mark.parametrize(("scale", "is_traced"), [(1.0, True), (255.0, False)])
def test_records_without_a_gradient_move_no_rows(scale, is_traced):
    labels = torch.tensor([-100, 0, 1, 2, -100, 1, 2, 0])

    def loss(model, x):
        outputs = model(x["x"])
        if not is_traced:
            float(outputs.detach().sum())
        return F.cross_entropy(outputs, x["y"], reduction="none", ignore_index=-100)

    engine = GradientEngine(nn.Linear(64, 3), loss, {"x": torch.rand(8, 64) * scale, "y": labels})
    assert engine.independence.word == ("proved" if is_traced else "compared")
    assert [one.how for one in engine.coverage()] == ["rule", "rule"]


def test_dense_rows_of_a_model_that_draws_are_compared():
    def forward(self, x):
        tokens = x.reshape(-1, 4)
        order = tokens[:, 0].argsort()
        y = self.linear(tokens[order])
        return F.dropout(torch.empty_like(y).index_copy(0, order, y).view(len(x), -1), 0.3, True)

    engine = GradientEngine(Net(forward, linear=nn.Linear(4, 3)), squares, torch.randn(8, 5, 4))
    assert engine.independence.word == "compared"
    assert {one.how for one in engine.coverage()} == {"dense"}


def test_lengths_by_which_a_loss_divides_are_planned_publicly():
    def forward(self, words, count):
        mask = torch.arange(words.shape[1])[None] < count[:, None]
        return self.linear((self.words(words) * mask[..., None]).sum(1) / count[:, None])

    model = Net(forward, words=nn.Embedding(20, 8), linear=nn.Linear(8, 3))
    batch = torch.randint(0, 20, (8, 5)), torch.randint(1, 6, (8,))
    engine = GradientEngine(model, lambda m, b: m(*b).square().sum(1), batch, publicly=True)
    assert engine.is_planned_publicly
    assert engine.independence.word == "proved"


def test_rows_of_routed_positions_are_those_of_their_records():
    """Each position goes to one of two experts, which get as many of a record as values say."""

    def forward(self, x):
        flat = x.flatten(0, 1)
        share = self.router(flat).softmax(1)
        chosen, out = share.argmax(1), flat.new_zeros(len(flat), 5)
        for number, expert in enumerate(self.experts):
            here = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, here, expert(flat[here]) * share[here, number : number + 1])
        return self.head(out.unflatten(0, x.shape[:2]).mean(1))

    experts = nn.ModuleList([nn.Linear(4, 5), nn.Linear(4, 5)])
    model = Net(forward, router=nn.Linear(4, 2), head=nn.Linear(5, 3), experts=experts)
    engine = GradientEngine(model, squares, torch.randn(8, 3, 4))
    planned = 0
    for _ in range(8):
        batch = torch.randn(8, 3, 4)
        try:
            rows = engine.by_plan(batch)
        except PlanMismatch:
            continue
        planned += 1
        for k, weights in enumerate(torch.eye(8)):
            found, loss = rows.weighted_sums(weights), squares(model, batch[k : k + 1])
            for name, expected in zip(
                found, torch.autograd.grad(loss.sum(), [*model.parameters()]), strict=True
            ):
                torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-6)
    assert planned


def test_a_layer_whose_gradient_is_zero_at_first_is_no_mixture():
    """The positions come first, and the head starts at zero."""

    def forward(self, x):
        hidden = torch.tanh(self.body(x.transpose(0, 1).flatten(0, 1)))
        return self.head(hidden.unflatten(0, (x.shape[1], len(x))).mean(0))

    model = Net(forward, body=nn.Linear(4, 5), head=nn.Linear(5, 3))
    nn.init.zeros_(model.head.weight)
    assert GradientEngine(model, squares, torch.randn(8, 3, 4)).independence.word == "proved"


OWN = torch.Generator()


def forked(x):
    with torch.random.fork_rng(devices=[]):
        return x + torch.rand(())


def attention(share):
    def attended(x):
        q = x.reshape(len(x), 1, 2, 2)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=share).reshape(len(x), 4)

    return attended


#: What the forward does, and whose random numbers it takes.
FORWARDS = {
    "none": (torch.tanh, "none"),
    "dropout": (lambda x: F.dropout(x, 0.5), "own"),
    "dropout of nothing": (lambda x: F.dropout(x, 0.0), "none"),
    "dropout in evaluation": (lambda x: F.dropout(x, 0.5, training=False), "none"),
    "torch's own dropout": (lambda x: torch.dropout(x, 0.5, train=True), "own"),
    "torch's own dropout in evaluation": (lambda x: torch.dropout(x, 0.5, train=False), "none"),
    "dropout beneath the functions": (lambda x: torch.ops.aten.native_dropout(x, 0.5, True)[0], "own"),
    "torch": (lambda x: x + torch.rand(()), "shared"),
    "torch, put back": (forked, "shared"),
    "torch, of its own": (lambda x: x + torch.rand((), generator=OWN.manual_seed(0)), "shared"),
    "NumPy": (lambda x: x + np.random.rand(), "shared"),
    "Python": (lambda x: x + random.random(), "shared"),
    "attention": (attention(0.0), "none"),
    "attention with dropout": (attention(0.5), "own"),
    "attention layer": (nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True), "own"),
    "recurrent layer": (nn.LSTM(4, 4, 2, dropout=0.5, batch_first=True), "own"),
}


def losses(model, x):
    return model(x).square().sum(1)


@pytest.mark.parametrize("name", FORWARDS)
def test_whose_numbers_a_model_takes(name):
    behind, whose = FORWARDS[name]

    def forward(self, x):
        x = self.layer(x)
        if not isinstance(behind, nn.Module):
            return behind(x)
        return behind(*([x[:, None]] * (3 if isinstance(behind, nn.MultiheadAttention) else 1)))[0][:, 0]

    x, parts = torch.randn(4, 4), {"behind": behind} if isinstance(behind, nn.Module) else {}
    model = Net(forward, layer=nn.Linear(4, 4), **parts)

    def run(count, weights):
        found = losses(model, x[:count])
        return found, torch.autograd.grad(found, [*model.layer.parameters()], weights)

    assert use_of_random_numbers(run, 2, 4) == whose


@pytest.mark.parametrize("is_large", [False, True])
def test_a_forward_alone_tells_whether_records_follow_the_plan(is_large):
    """Large values go through one more layer."""

    def forward(self, x):
        return self.low(x) if x.max() < 9 else self.high(self.low(x))

    model, x = Net(forward, low=nn.Linear(4, 4), high=nn.Linear(4, 4)), torch.rand(3, 4)
    planned, other = (10 * x + 9, x) if is_large else (x, 10 * x + 9)
    for kind in (GradientEngine, LossEngine):
        tried = kind(model, losses, planned, check=False)
        assert torch.equal(tried.by_plan(planned).losses, losses(model, planned))
        with pytest.raises(PlanMismatch):
            tried.by_plan(other)


@pytest.mark.parametrize("drop", [F.dropout, F.dropout1d, F.alpha_dropout])
def test_numbers_held_constant_leave_something_of_a_dropout_of_many(drop):
    with random_numbers_constant():
        one, other = (drop(fill(2, 3, 4), 0.9, training=True) for fill in (torch.ones, torch.zeros))
    assert not torch.equal(one, other)
