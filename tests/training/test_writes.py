"""What a forward writes to buffers, attributes and variables is thrown away: the start says so, by name."""

from __future__ import annotations

import warnings
from collections import Counter, deque

import numpy as np
import pytest
import torch
from small_problems import CLASSES, FEATURES, RECORDS, loss, network, records, training
from torch import nn

import equipoise as eq
from equipoise.gradients.checks.errors import BufferWritesError, CrossRecordError, TensorWritesError
from equipoise.statements.assumptions import CHANGED, THROWN_AWAY

SAMPLING = eq.FixedEpochs(12, RECORDS, 5)
logged, counts, total = [], Counter(), 0


class Layer(nn.Module):
    """A linear model."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        self.note(out := self.linear(x))
        return out


class CountsInBuffer(Layer):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def note(self, out):
        self.calls += 1


class Average(CountsInBuffer):
    """It binds a new tensor in the place of the old one."""

    def note(self, out):
        self.calls = 0.9 * self.calls + out.detach().mean()


class Attributes(Layer):
    def __init__(self):
        super().__init__()
        self.seen, self.average = 0, torch.zeros(CLASSES)

    def note(self, out):
        self.seen += 1
        self.average = 0.9 * self.average + 0.1 * out.detach().mean(0)


class Harmless(Layer):
    """A cache, the latest output, and a buffer whose values stay."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(CLASSES))
        self.cache, self.latest = {}, None

    def note(self, out):
        self.cache.setdefault(out.shape[1], torch.arange(3))
        self.mask, self.latest = self.mask.clone(), out


class Statistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.InstanceNorm1d(1, track_running_stats=True), nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        return self.linear(self.norm(x[:, None])[:, 0])


class Observed(Layer):
    """Fake quantisation, whose ranges follow what goes through."""

    def __init__(self):
        super().__init__()
        self.observer = torch.ao.quantization.FakeQuantize(torch.ao.quantization.MovingAverageMinMaxObserver)

    def forward(self, x):
        return self.observer(self.linear(x))


def logging_loss(model, batch):
    found = loss(model, batch)
    logged.append(found.mean().item())
    return found


def counting_loss(model, batch):
    global total
    total += 1
    counts["calls"] += 1
    return loss(model, batch)


def closure():
    calls, history = 0, []

    def noting(model, batch):
        nonlocal calls
        calls += 1
        history.append(calls)
        return loss(model, batch)

    return noting


class Normaliser(nn.Module):
    """A loss with a buffer of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, model, batch):
        found = loss(model, batch)
        self.scale.mul_(0.9).add_(found.detach().mean())
        return found


CASES = {
    "average that nothing reads": (Average, loss, {"calls"}, "parameter"),
    "attributes": (Attributes, loss, {"seen", "average"}, "register_step_post_hook"),
    "list of losses": (network, logging_loss, {"logged"}, "evaluate="),
    "globals": (network, counting_loss, {"total", "counts"}, "register_step_post_hook"),
    "closure": (network, closure(), {"calls", "history"}, "register_step_post_hook"),
    "loss with a buffer": (network, Normaliser(), {"scale"}, "register_step_post_hook"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_forward_writes_to_is_named_at_the_start(case):
    make, own_loss, names, remedy = CASES[case]
    with pytest.warns(UserWarning, match="thrown away") as found:
        run = training(make(), loss=own_loss, sampling=SAMPLING)
    (text,) = (str(one.message) for one in found if "thrown away" in str(one.message))
    assert all(name in text for name in names)
    assert remedy in text
    assert set(run.describe().written) == names
    (said,) = (one for one in run.statement().assumptions if one.startswith(THROWN_AWAY))
    assert all(name in said for name in names)
    list(run)
    assert (logged, total, counts) == ([], 0, Counter())


class HomeMade(Layer):
    """Running statistics for evaluation alone, in a buffer that is bound anew."""

    def note(self, out):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * out.detach().mean(0)

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(CLASSES))

    def forward(self, x):
        out = super().forward(x)
        return out if self.training else out - self.mean


class Codebook(nn.Module):
    """A vector quantiser whose codes follow averages of what is assigned to them."""

    def __init__(self, binds=False):
        super().__init__()
        self.linear, self.binds = nn.Linear(FEATURES, CLASSES), binds
        self.register_buffer("codes", torch.randn(4, CLASSES, generator=torch.Generator().manual_seed(0)))
        self.register_buffer("sizes", torch.ones(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("used", torch.zeros(4))

    def forward(self, x):
        out = self.linear(x)
        chosen = nn.functional.one_hot(torch.cdist(out, self.codes).argmin(1), 4).to(out.dtype)
        found = chosen @ self.codes
        if self.training:
            with torch.no_grad():
                self.calls += 1
                self.used += chosen.sum(0)
                sizes, codes = 0.9 * self.sizes + 0.1 * chosen.sum(0), 0.9 * self.codes + chosen.T @ out
                if self.binds:
                    self.sizes, self.codes = sizes, codes / sizes[:, None]
                else:
                    self.sizes.copy_(sizes)
                    self.codes.copy_(codes / sizes[:, None])
        return out + (found - out).detach()


class Remembers(Layer):
    """What came out for the records of the last batch goes into the next one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(CLASSES))

    def note(self, out):
        out += self.last
        self.last.copy_(out[0].detach())


class Queue(Layer):
    """Outcomes of the last records, written at places that an index names."""

    def __init__(self, places):
        super().__init__()
        self.places = places
        self.register_buffer("queue", torch.zeros(64, CLASSES))

    def forward(self, x):
        before = self.queue.mean(0)
        out = self.linear(x)
        self.queue[self.places(len(out))] = out.detach()
        return out + before


REFUSED = {
    "queue": (lambda: Queue(torch.arange), {"queue"}, "parameter"),
    "queue that goes round": (lambda: Queue(lambda n: (torch.arange(n) + 60) % 64), {"queue"}, "parameter"),
    "running statistics": (
        Statistics,
        {"norm.running_mean", "norm.running_var"},
        "track_running_stats=False",
    ),
    "home-made statistics": (HomeMade, {"mean"}, ".eval()"),
    "codebook": (Codebook, {"codes", "sizes"}, "parameter"),
    "codebook bound anew": (lambda: Codebook(binds=True), {"codes", "sizes"}, "parameter"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_buffer_that_follows_records_and_is_read_is_refused(case):
    make, names, remedy = REFUSED[case]
    model = make()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with pytest.raises(BufferWritesError) as error:
        training(model, sampling=SAMPLING)
    assert set(error.value.names) == names
    assert remedy in str(error.value)
    assert model.training
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])


def test_a_state_that_goes_from_batch_to_batch_is_refused():
    with pytest.raises((BufferWritesError, CrossRecordError)):
        training(Remembers(), sampling=SAMPLING)


def frozen_statistics():
    model = Statistics()
    model.norm.eval()
    return model


def quiet_statistics():
    model = Statistics()
    model.norm = nn.InstanceNorm1d(1)
    return model


@pytest.mark.parametrize(
    "make",
    [
        frozen_statistics,
        quiet_statistics,
        lambda: HomeMade().eval(),
        lambda: Codebook().eval(),
        lambda: Observed().apply(torch.ao.quantization.disable_observer),
    ],
)
def test_each_remedy_trains(make):
    run = training(make(), sampling=SAMPLING)
    assert not run.describe().written
    run.take_step()


def test_a_public_count_is_kept_though_it_is_bound_anew():
    class Counts(CountsInBuffer):
        def note(self, out):
            self.calls = self.calls + 1

    run = training(model := Counts(), sampling=SAMPLING)
    assert not run.describe().written
    list(run)
    assert model.calls > 0


@pytest.mark.parametrize("make", [network, Harmless])
def test_what_comes_out_alike_after_each_forward_is_not_named(make):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = training(make(), sampling=SAMPLING)
    assert not run.describe().written
    assert not any(one.startswith(THROWN_AWAY) for one in run.statement().assumptions)


def test_a_statement_that_names_it_verifies(tmp_path):
    with pytest.warns(UserWarning, match="thrown away"):
        training(Average(), sampling=SAMPLING, folder=tmp_path / "run").run(progress=False)
    assert eq.verify_run(tmp_path / "run").consistent


def test_a_buffer_that_something_else_changes_between_steps_is_still_refused():
    run = training(CountsInBuffer(), sampling=SAMPLING)
    run.take_step()
    run.model.calls += 1
    with pytest.raises(RuntimeError, match="'calls'"):
        run.take_step()


PERSONS = [f"patient-{number:02d}-Smith" for number in range(RECORDS)]
of_module, of_variable = nn.Module(), {}


def noting(model, batch):
    for held in (of_module.kept, of_variable):
        for name in map(PERSONS.__getitem__, batch["person"].tolist()):
            held[name] += [1.0] if isinstance(held[name], list) else 1
    return loss(model, batch)


def weighting(model, batch):
    return loss(model, batch) * of_variable[PERSONS[0]]["weight"]


def start(make, own_loss, **options):
    of_module.kept = {name: make() for name in PERSONS}
    of_variable.update((name, make()) for name in PERSONS)
    return training(
        loss=own_loss, data=records() | {"person": torch.arange(RECORDS)}, sampling=SAMPLING, **options
    )


@pytest.mark.parametrize(
    ("make", "own_loss"),
    [(list, noting), (lambda: np.zeros(1), noting), (lambda: {"weight": 1.0}, weighting)],
)
def test_names_of_persons_that_are_keys_of_a_dict_are_written_nowhere(tmp_path, make, own_loss):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run = start(make, own_loss, folder=tmp_path / "run", reproducible=False)
        if own_loss is weighting:
            run.take_step()
            of_variable[PERSONS[17]]["weight"] = 0.5
            run.take_step()
            assert CHANGED + "of_variable" in run.statement().assumptions
        else:
            assert {*run.describe().written} == {"kept", "of_variable"}
        run.run(progress=False)
    assert not [one for one in found if "Smith" in str(one.message)]
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 4
    assert not [path for path in files if b"-Smith" in path.read_bytes()]


def test_nor_are_they_in_an_error():
    with pytest.raises(TensorWritesError, match="kept") as error:
        start(lambda: torch.zeros(1), noting)
    assert "Smith" not in str(error.value)


class StepsAway(nn.Module):
    """It steps away from the outputs of the batch before, which `get` reads and `put` writes."""

    previous = None

    def __init__(self, get, put, summary=lambda out: out):
        super().__init__()
        self.linear, self.initial, self.outputs = nn.Linear(FEATURES, CLASSES), None, []
        self.get, self.put, self.summary = get, put, summary

    def forward(self, x):
        out = self.linear(x)
        found = self.summary(out.detach())
        before = self.get(self)
        self.put(self, found)
        return out + 0.3 * (out - (found if before is None or before.shape != found.shape else before))


def remembering_closure():
    previous = None

    def remembering(model, batch):
        nonlocal previous
        before, previous = previous, model(batch["input"]).detach()
        return loss(model, batch) + (0 if before is None else before.square().mean(1))

    return remembering


class Slots:
    __slots__ = ("largest",)


def with_slots():
    slots = Slots()

    def scaled(model, batch):
        if not hasattr(slots, "largest"):
            slots.largest = batch["input"].abs().max()
        return loss(model, batch) / slots.largest

    return scaled


def _attribute(name, **kwargs):
    return lambda: StepsAway(lambda m: getattr(m, name), lambda m, value: setattr(m, name, value), **kwargs)


REMEMBERED = {
    "attribute of the class": (_attribute("previous"), loss, "previous"),
    "attribute that starts as None": (_attribute("initial"), loss, "initial"),
    "mean": (_attribute("initial", summary=lambda out: out.mean(0)), loss, "initial"),
    "list": (
        lambda: StepsAway(lambda m: (m.outputs or [None])[-1], lambda m, value: m.outputs.append(value)),
        loss,
        "outputs",
    ),
    "first batch": (
        lambda: StepsAway(lambda m: (m.outputs or [None])[0], lambda m, value: m.outputs.append(value)),
        loss,
        "outputs",
    ),
    "closure": (network, remembering_closure(), "previous"),
    "slot that is filled late": (network, with_slots(), "largest"),
}


@pytest.mark.parametrize("case", REMEMBERED)
def test_what_a_forward_takes_from_the_records_before_is_refused_by_name(case):
    """Twice the same records show nothing of it."""
    make, own_loss, name = REMEMBERED[case]
    with pytest.raises(ValueError, match=rf"\b{name}\b.*register_step_post_hook"):
        training(make(), loss=own_loss, sampling=SAMPLING)


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.state = nn.LSTM(FEATURES, 4), None
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x):
        out, state = self.lstm(x[None], self.state)
        self.state = tuple(part.detach() for part in state)
        return self.head(out[0])


class Centred:
    """A loss that subtracts its running average, in a holder of some kind."""

    def __init__(self, center, mean, add):
        self.center, self.mean, self.add = center, mean, add

    def __call__(self, model, batch):
        found = loss(model, batch)
        center = self.mean(self.center)
        self.add(self.center, float(found.detach().mean()))
        return found * (1 + center)


class Meter:
    total = count = 0

    def update(self, value):
        self.total, self.count = self.total + value, self.count + 1


STATES = {
    "LSTM": (Stateful, lambda: loss, "state"),
    "deque": (network, lambda: Centred(deque(maxlen=9), lambda d: sum(d), deque.append), "center"),
    "array": (network, lambda: Centred(np.zeros(1), lambda a: a[0], lambda a, v: a.__iadd__(v)), "center"),
    "meter": (network, lambda: Centred(Meter(), lambda m: m.total, Meter.update), "total"),
}


@pytest.mark.parametrize("case", STATES)
def test_a_state_that_losses_follow_is_named(case):
    make, make_loss, name = STATES[case]
    with pytest.raises(ValueError, match=rf"\b{name}\b.*register_step_post_hook"):
        training(make(), loss=make_loss(), sampling=SAMPLING)


def test_a_random_generator_of_its_own_is_refused_with_its_own_remedy():
    generator = torch.Generator()

    def drawing(model, batch):
        return loss(model, batch) * torch.rand((), generator=generator)

    with pytest.raises(ValueError, match=r"torch\.rand") as found:
        training(loss=drawing, sampling=SAMPLING)
    assert "register_step_post_hook" not in str(found.value)


class Table(nn.Module):
    """Masks and positions, built when the first batch of a shape comes."""

    mask = None

    def __init__(self):
        super().__init__()
        self.linear, self.tables, self.built = nn.Linear(FEATURES, CLASSES), {}, False

    def forward(self, x):
        if self.mask is None or self.mask.shape != x.shape:
            self.mask = torch.ones_like(x).tril()
        if not self.built:
            self.positions, self.built = torch.arange(x.shape[1]) / 9, True
        factors = self.tables.setdefault(len(x), torch.linspace(1, 2, x.shape[1]))
        return self.linear(x * factors + self.positions) + 0 * (self.mask * x).sum(1, keepdim=True)


def test_what_is_built_from_shapes_alone_trains():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(training(Table(), sampling=SAMPLING))


def test_a_buffer_that_a_loss_binds_anew_is_named():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("times", torch.zeros(()))

        def forward(self, model, batch):
            self.times = self.times + 1
            return loss(model, batch)

    with pytest.warns(UserWarning, match=r"\btimes\b.*thrown away"):
        run = training(loss=Counting(), sampling=SAMPLING)
    assert run.describe().written == ["times"]
