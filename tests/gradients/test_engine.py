"""What the engine promises beside numbers: nothing left behind, batch forms, other parameters, errors."""

import collections
import copy
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from oracle_cases import Filling, close, compare, moved
from torch import nn
from zoo import CASES, Net, backward

from equipoise.gradients import (
    CoverageError,
    CrossRecordError,
    GradientEngine,
    dense_gradients,
    per_sample_gradients,
)
from equipoise.gradients.capture.recorder import PlanMismatch
from equipoise.gradients.checks import oracle


def floats(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def network():
    body = [nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Flatten(), nn.Dropout(0.3)]
    return nn.Sequential(*body, nn.Linear(36, 3)).double()


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch["image"]), batch["label"], reduction="none")


def images(count=6):
    return {"image": floats(count, 2, 5, 5), "label": torch.arange(count) % 3}


def summed(model, x):
    return model(x).square().sum(1)


def attributes(model):
    """Everything that hangs on the modules and parameters."""
    found = {}
    for path, module in model.named_modules():
        found[path] = (type(module), sorted(vars(module)), module.training)
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            found[path, hooks] = len(getattr(module, hooks))
    for name, p in model.named_parameters():
        found[name] = (id(p), type(p), p.grad, sorted(vars(p)), p._backward_hooks, p.requires_grad)
    return found


def test_nothing_is_left_on_the_model():
    model = network().append(nn.BatchNorm1d(3).eval().double())
    before, state, rng = attributes(model), copy.deepcopy(model.state_dict()), torch.get_rng_state()
    engine = GradientEngine(model, cross_entropy, images())
    assert torch.equal(torch.get_rng_state(), rng)
    assert attributes(model) == before
    engine(images())
    engine(images(), params=moved(model))
    dense_gradients(model, cross_entropy, images())
    assert attributes(model) == before
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not torch.nn.modules.module._global_forward_hooks


def test_dropout_is_drawn_as_in_training():
    model = network()
    engine = GradientEngine(model, cross_entropy, images())
    torch.manual_seed(3)
    G = engine(images())
    torch.manual_seed(3)
    losses = cross_entropy(model, images())
    losses.sum().backward()
    torch.testing.assert_close(G.losses, losses.detach())
    sums = G.weighted_sums(torch.ones(6).double())
    for name, p in model.named_parameters():
        torch.testing.assert_close(sums[name], p.grad)


Pair = collections.namedtuple("Pair", "image label")
FORMS = {
    "tuple": lambda b: (b["image"], b["label"]),
    "nest": lambda b: [b["image"], {"label": b["label"], "name": "digits", "scale": torch.tensor(2.0)}],
    "namedtuple": lambda b: Pair(**b),
    "mapping": collections.UserDict,
}


@pytest.mark.parametrize("form", FORMS)
def test_batch_forms(form):
    def loss(model, batch):
        image, label = (batch[name] for name in (Pair._fields if hasattr(batch, "keys") else (0, 1)))
        return F.cross_entropy(model(image), label["label"] if form == "nest" else label, reduction="none")

    compare(network().eval(), loss, FORMS[form](images()), how="rule")


def test_batches_of_any_size():
    model = network().eval()
    large, small = (GradientEngine(model, cross_entropy, images(count)) for count in (6, 1))
    for count in (1, 2, 6, 9):
        expected = dense_gradients(model, cross_entropy, images(count)).row_norms()
        for engine in (large, small):
            close(engine(images(count)).row_norms(), expected, 1e-12)


def test_an_empty_batch_gives_zero_rows_without_running_the_model():
    model = network().eval()
    engine = GradientEngine(model, cross_entropy, images())
    engine.loss = None
    for G in (engine(images(0)), per_sample_gradients(model, None, images(0))):
        assert G.shape == (0, sum(p.numel() for p in model.parameters()))
        assert G.row_norms().shape == G.losses.shape == (0,)
        sums = G.weighted_sums(torch.zeros(0))
        for name, p in model.named_parameters():
            assert torch.equal(sums[name], torch.zeros_like(p))


BAD = [
    (lambda m, b: F.cross_entropy(m(b["image"]), b["label"]), images(), {}, r"shape \(\).*reduction='none'"),
    (lambda m, b: m(b["image"]), images(), {}, r"shape \(2, 3\).*shape \(2,\)"),
    (lambda m, b: [1.0], images(), {}, "type list"),
    # A list may be one record, whose length is private.
    (cross_entropy, images() | {"label": torch.zeros(3).long()}, {}, r"first sizes[^46]*$"),
    (cross_entropy, {"image": "none"}, {}, "no tensor"),
    (cross_entropy, images(0), {}, "0 records"),
    (cross_entropy, images(), {"5.wait": floats(3, 36)}, r"'5\.wait'"),
    (cross_entropy, images(), {"5.weight": floats(3)}, r"'5.weight'.*shape \(3,\)"),
]


@pytest.mark.parametrize(("loss", "batch", "params", "message"), BAD)
def test_bad_arguments_are_explained(loss, batch, params, message):
    attach = partial(per_sample_gradients, params=params) if params else GradientEngine
    with pytest.raises(ValueError, match=message):
        attach(network(), loss, batch)


class Recorder(nn.Module):
    """Keeps something of the records in buffers, in several ways."""

    def __init__(self, how):
        super().__init__()
        self.how, self.linear = how, nn.Linear(3, 2)
        self.register_buffer("seen", None if how == "made" else torch.zeros(3))

    def forward(self, x):
        with torch.no_grad():
            if self.how in ("in place", "data"):
                (self.seen if self.how == "in place" else self.seen.data).add_(x.sum(0))
            elif self.how == "registered":
                self.register_buffer("late", x.sum(0))
            else:
                self.seen = x.sum(0)
        return self.linear(x)


@pytest.mark.parametrize("how", ["in place", "data", "assigned", "made", "registered"])
def test_buffers_that_follow_the_records_are_kept(how):
    model = Recorder(how)
    engine = GradientEngine(model, summed, torch.ones(3, 3))
    for params in (None, {"linear.bias": torch.ones(2)}):
        engine(torch.ones(4, 3), params)
    assert (model.seen is None) if how == "made" else torch.equal(model.seen, torch.zeros(3))
    assert not hasattr(model, "late")


def test_a_plan_follows_no_private_record():
    model, usual = Filling(), torch.randn(5, 3)
    engine = GradientEngine(model, summed, usual)
    before = engine.coverage(), engine.by_plan(usual).materialise().matrix()
    rare = usual.clone()
    rare[2, 0] = -9
    for _ in range(2):
        with pytest.raises(PlanMismatch):
            engine.by_plan(rare)
    assert engine.coverage() == before[0]
    assert torch.equal(engine.by_plan(usual).materialise().matrix(), before[1])
    alone = [engine.alone(rare, place=place).materialise().matrix() for place in range(len(rare))]
    close(torch.cat(alone), dense_gradients(model, summed, rare).matrix(), 1e-5)


def test_a_record_alone_whose_loss_follows_no_parameter_has_a_row_of_zeros():
    engine = GradientEngine(Filling(), summed, torch.randn(5, 3))
    engine.loss = lambda model, x: x.sum(1)
    row = engine.alone(torch.ones(2, 3), place=1)
    assert (row.row_norms().tolist(), row.losses.tolist()) == ([0.0], [3.0])


def behind(layer):
    return Net(lambda self, x: layer(self.layer(x)), layer=nn.Linear(3, 3))


def test_a_mixture_that_gives_nan_is_seen():
    """No distance to NaN is larger than rounding."""

    def spoilt(x):
        is_large = bool(x.detach().abs().amax() > 10)
        return backward(lambda g: g * float("nan") if is_large else g)(x)

    with pytest.raises((CoverageError, CrossRecordError)):
        GradientEngine(behind(spoilt), summed, torch.randn(5, 3))


def test_a_guard_against_nan_is_seen_under_anomaly_detection():
    case = CASES["custom function whose backward gives nothing where some gradient is NaN"]
    with torch.autograd.set_detect_anomaly(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CrossRecordError, match=r"0\.weight"):
            GradientEngine(case.model(), case.loss, case.records())


def test_a_large_batch_of_a_model_that_takes_no_outliers_is_tried_with_exchanged_records():
    def forward(self, x):
        if bool((x > 1).any()):
            raise ValueError("not a share")
        return backward(lambda g: g - g.mean(0) if len(g) > 8 else g)(self.layer(x)).square()

    records = 0.9 + 0.1 * torch.rand(16, 3)  # three times as large, all are too large
    engine = GradientEngine(Net(forward, layer=nn.Linear(3, 3)), summed, records[:5])
    assert engine.independence.word == "compared"
    with pytest.raises(CoverageError, match=r"layer\.weight"):
        engine.check(records)


def test_what_few_of_the_first_records_run_is_dense_from_the_start():
    usual = torch.randn(5, 3)
    usual[1, 0] = -9
    engine = GradientEngine(Filling(), summed, usual)
    kept = engine.coverage()
    for record in range(5):
        engine.by_plan(usual[record : record + 1])
    assert engine.coverage() == kept
    assert "dense" in {covered.how for covered in kept}


def test_rows_of_a_gradient_penalty_are_formed_together(monkeypatch):
    """By vmap, though the loss calls requires_grad_ inside; they are those of single records."""
    critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    batch = {"x": torch.randn(5, 6), "fake": torch.randn(5, 6), "share": torch.rand(5, 1)}

    def loss(model, batch):
        between = (batch["share"] * batch["x"] + (1 - batch["share"]) * batch["fake"]).requires_grad_()
        (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
        return (model(batch["fake"]) - model(batch["x"])).squeeze(1) + (slope.norm(dim=1) - 1).square()

    single = [{name: value[i : i + 1] for name, value in batch.items()} for i in range(5)]
    expected = [torch.autograd.grad(loss(critic, one).sum(), critic[0].weight)[0] for one in single]
    monkeypatch.setattr(oracle, "_loop", None)  # a record at a time
    rows, _ = oracle.dense_rows(critic, loss, batch)
    torch.testing.assert_close(rows["0.weight"], torch.stack(expected))
    engine = GradientEngine(critic, loss, batch)
    assert engine.independence.word == "proved"
    for G in (engine(batch), engine.by_plan(batch)):
        (factor,) = G.factors["0.weight"]
        assert (factor.kind, factor.uses) == ("outer", 4)  # x, fake, and between them twice
        torch.testing.assert_close(factor.materialise(), torch.stack(expected))


def test_sums_of_products_are_noted_as_their_terms_and_nothing_else_is():
    a, b, c, d = (torch.randn(shape) for shape in ((5, 3, 2), (5, 2, 4), (5, 4, 1), (5, 1, 3)))
    with oracle.SumsOfProducts() as noted:
        total = (torch.bmm(a, b).transpose(1, 2) + torch.bmm(c, d)).view(5, 4, 3)
        others = [total + 1, 2 * total, total + torch.bmm(c[:1], d[:1]), torch.add(total, total, alpha=2)]
        others += [total + a.sum(), total[:, :2], total.transpose(0, 1), total.to(torch.float64)]
        factor, kinds = noted.factor(total), [noted.factor(other).kind for other in others]
        a.mul_(2)
        kinds.append(noted.factor(total).kind)  # what it is of is another now
    assert (factor.kind, factor.uses) == ("outer", 3)
    torch.testing.assert_close(factor.materialise(), total)
    assert kinds == ["dense"] * 9
