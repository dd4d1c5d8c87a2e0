"""What a forward leaves behind on a model, a loss or what these hold is forgotten when it ends."""

import copy
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn
from zoo import Net

from equipoise.gradients import CrossRecordError, ForwardWritesError, GradientEngine
from equipoise.gradients.capture.attributes import attributes_kept
from equipoise.gradients.engine_inputs import evaluate_loss

X = torch.arange(12.0).reshape(4, 3)


class Helper:
    """It counts, in the ways in which objects do."""

    def __init__(self):
        self.count, self.seen, self.inner = 0, [], SimpleNamespace(last=None)
        self.itself = self  # a circle

    def note(self, batch):
        self.count += 1
        self.seen.append(batch)
        self.inner.last = batch
        self.new = batch

    def kept(self):
        return [self.count, len(self.seen), self.inner.last, hasattr(self, "new")]


NOTHING = [0, 0, None, False]
GLOBAL_HELPER, GLOBAL_COUNT, LATE = Helper(), 0, None


def sums(model, batch):
    return model(batch).sum(1)


def in_a_module(helper):
    found = nn.Identity()
    found.helper = helper
    return [found]


@pytest.mark.parametrize(
    "wrap",
    [lambda one: one, lambda one: [(one,)], lambda one: one.note, lambda one: partial(one.note), in_a_module],
)
def test_a_helper_of_a_model_forgets(wrap):
    model, helper = nn.Linear(3, 2), Helper()
    model.held = wrap(helper)
    with attributes_kept(model):
        helper.note(X)
        assert helper.kept() != NOTHING
    assert helper.kept() == NOTHING


class ObjectLoss(Helper):
    def __call__(self, model, batch):
        self.note(batch)
        return sums(model, batch)


class ModuleLoss(nn.Module):
    def __init__(self):
        super().__init__()
        for name, value in {"centre": torch.zeros(3), "scale": torch.ones(3), "none": None}.items():
            self.register_buffer(name, value)
        self.helper = Helper()
        self.kept = self.helper.kept

    def forward(self, model, batch):
        self.helper.note(batch)
        self.centre.add_(batch.mean(0))
        self.scale = self.scale * 2
        self.register_buffer("more", batch)
        return sums(model, batch)


@pytest.mark.parametrize("wrap", [lambda loss: loss, partial, lambda loss: loss.__call__])
def test_a_loss_forgets(wrap):
    for loss in (ObjectLoss(), ModuleLoss()):
        buffers = dict(loss.named_buffers()) if isinstance(loss, nn.Module) else {}
        GradientEngine(nn.Linear(3, 2), wrap(loss), X)(X)
        assert loss.kept() == NOTHING
        if buffers:
            assert dict(loss.named_buffers()) == buffers
            assert not loss.centre.any()


def test_variables_that_a_loss_names_are_forgotten():
    helper, count = Helper(), 0

    def loss(model, batch):
        nonlocal count
        global GLOBAL_COUNT
        count += 1
        GLOBAL_COUNT += 1
        loss.calls = count
        helper.note(batch)
        GLOBAL_HELPER.note(batch)
        return sums(model, batch)

    evaluate_loss(nn.Linear(3, 2), loss, X, None)
    assert (count, GLOBAL_COUNT, vars(loss)) == (0, 0, {})
    assert helper.kept() == GLOBAL_HELPER.kept() == NOTHING


class Bank(list):
    """A container of one's own."""


class Named(dict):
    """One whose methods do something else."""

    def update(self, *given, **named):
        raise TypeError("use the fields")

    __getattr__ = dict.__getitem__


CONTAINERS = [
    [1], {"a": 1}, {1}, deque([1], maxlen=3), OrderedDict(a=1), defaultdict(int, a=1), Counter("aab"),
    Bank((1,)), Named(a=1),
]  # fmt: skip


@pytest.mark.parametrize("container", CONTAINERS, ids=lambda one: type(one).__name__)
def test_containers_are_what_they_were(container):
    model, before = nn.Linear(3, 2), copy.copy(container)
    model.kept = container
    with attributes_kept(model):
        for value in (2, 3, 4):
            if isinstance(container, dict):
                container[value] = value
            else:
                container.add(value) if isinstance(container, set) else container.append(value)
    assert model.kept is container
    assert container == before
    assert type(container) is type(before)


class Keeping(nn.Module):
    """It keeps something in every other place."""

    seen: ClassVar[list] = []
    calls = 0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def note(self, batch, kept=[]):  # noqa: B006
        global LATE
        LATE = batch
        GLOBAL_HELPER.note(batch)
        kept.append(batch)
        self.seen.append(batch)
        Keeping.calls += 1

    def forward(self, x):
        self.note(x)
        self.linear.register_forward_hook(lambda module, given, out: out + 1)
        self.more = nn.Identity()
        self.eval()
        return self.linear(x)

    def kept(self):
        own = [len(self.seen), self.calls, len(self.linear._forward_hooks), hasattr(self, "more")]
        return [*own, len(self.note.__defaults__[0]), LATE is None, *GLOBAL_HELPER.kept(), self.training]


def test_a_model_forgets_what_it_keeps_elsewhere():
    """In its classes, in defaults and globals, hooks, modules and the mode: 7.5 clip norms."""
    model = Keeping()
    before = model.kept()
    first = evaluate_loss(model, sums, X, None)
    assert model.kept() == before
    assert torch.equal(first, evaluate_loss(model, sums, X, None))


def test_hooks_that_were_there_stay():
    model, met = nn.Linear(3, 2), []
    model.register_forward_hook(lambda module, given, out: met.append(out))
    with attributes_kept(model):
        model(X)
        model.register_forward_pre_hook(lambda module, given: None)
    assert (len(model._forward_hooks), len(model._forward_pre_hooks), met) == (1, 0, [])


class Cache:
    """A class that code names or holds, and never makes an object of."""

    mean = None

    @classmethod
    def settle(cls, x):
        cls.mean = x


class Function(torch.autograd.Function):
    mean = None


class ByCall:
    def __call__(self, x):
        global LATE
        LATE = x


class ByGetattr:
    def __getattr__(self, name):
        global LATE
        if name != "touch":
            raise AttributeError(name)
        LATE = X


def bind_a_global(held, x):
    global BOUND
    BOUND = x


FARTHER = [
    (None, lambda _, x: setattr(Cache, "mean", x), lambda _: Cache.mean),
    (Cache, lambda held, x: setattr(held, "mean", x), lambda held: held.mean),
    (None, lambda _, x: Cache.settle(x), lambda _: Cache.mean),
    (None, lambda _, x: setattr(Function, "mean", x), lambda _: Function.mean),
    (None, lambda _, x: setattr(Function, "late", x), lambda _: getattr(Function, "late", None)),
    (None, bind_a_global, lambda _: globals().get("BOUND")),
    (ByCall(), lambda held, x: held(x), lambda _: LATE),
    (ByGetattr(), lambda held, x: held.touch, lambda _: LATE),
    (nn.Linear(3, 2), lambda held, x: held._state_dict_hooks.update(mean=x),
     lambda held: held._state_dict_hooks.get("mean")),
]  # fmt: skip


@pytest.mark.parametrize(("held", "write", "read"), FARTHER)
def test_what_is_kept_in_farther_places_is_forgotten(held, write, read):
    model = nn.Linear(3, 2)
    model.held, model.write = held, write
    for _ in range(2):
        assert read(held) is None
        with attributes_kept(model):
            write(held, X)
            assert read(held) is not None
    assert read(held) is None


def in_a_closure():
    total = torch.zeros(())

    def loss(model, batch):
        total.add_(batch.detach().sum())
        return sums(model, batch)

    return loss


class Target:
    """A target network that follows the model, whenever it is called."""

    def __init__(self):
        self.network = nn.Linear(3, 2)

    def __call__(self, model, batch):
        with torch.no_grad():
            self.network.weight.lerp_(model.weight, 0.01)
            goal = self.network(batch)
        return (model(batch) - goal).square().sum(1)


def queued(self, x):
    self.queue[: len(x)] = x.detach()
    return self.linear(x)


@pytest.mark.parametrize(
    ("model", "loss", "name"),
    [
        (nn.Linear(3, 2), in_a_closure(), "total"),
        (nn.Linear(3, 2), Target(), "weight"),
        (Net(queued, linear=nn.Linear(3, 2), queue=torch.zeros(4, 3)), sums, "queue"),
    ],
)
def test_a_tensor_that_changes_in_place_is_refused(model, loss, name):
    with pytest.raises(ForwardWritesError, match=name):
        GradientEngine(model, loss, X)


def test_what_other_threads_work_on_is_left_alone():
    class Worker(threading.Thread):
        count = 0

    model = nn.Linear(3, 2)
    model.lock, model.worker = threading.Lock(), Worker()
    with attributes_kept(model):
        model.worker.count = 1
    assert model.worker.count == 1


def test_a_loss_that_settles_at_its_first_batch_is_refused():
    means = []

    def centred(model, batch):
        if not means:
            means.append(batch.mean(0))
        return sums(model, batch - means[0]).square()

    with pytest.raises(CrossRecordError):
        GradientEngine(nn.Linear(3, 2), centred, torch.randn(8, 3))
    assert not means
