"""What a forward writes to buffers, attributes and variables is thrown away: the start says so, by name."""

import warnings
from collections import Counter

import pytest
import torch
from small_problems import CLASSES, FEATURES, RECORDS, loss, network, records, training
from torch import nn

import equipoise as eq
from equipoise.gradients.checks.errors import BufferWritesError, TensorWritesError
from equipoise.statements.assumptions import CHANGED, THROWN_AWAY

SAMPLING = eq.FixedEpochs(12, RECORDS, 5)
logged, counts, total = [], Counter(), 0


class Layer(nn.Module):
    """A linear model that calls `write` with itself and its output."""

    def __init__(self, write=lambda *_: None):
        super().__init__()
        self.linear, self.write = nn.Linear(FEATURES, CLASSES), write
        self.register_buffer("calls", torch.zeros(()))
        self.seen, self.cache, self.average = 0, {}, torch.zeros(CLASSES)

    def forward(self, x):
        out = self.linear(x)
        self.write(self, out.detach())
        return out


def into_buffer(model, out):
    """It binds a new tensor in the place of the old one."""
    model.calls = 0.9 * model.calls + out.mean()


def attributes(model, out):
    model.seen += 1
    model.average = 0.9 * model.average + 0.1 * out.mean(0)


def global_loss(model, batch):
    global total
    total += 1
    found = loss(model, batch)
    counts["calls"] += 1
    logged.append(found.mean().item())
    return found


def closure():
    calls, history = 0, []

    def noting(model, batch):
        nonlocal calls
        calls += 1
        history.append(calls)
        return loss(model, batch)

    return noting


#: Model, loss and the names of what they write to, which nothing reads.
CASES = {
    "average": (lambda: Layer(into_buffer), loss, {"calls"}),
    "attributes": (lambda: Layer(attributes), loss, {"seen", "average"}),
    "globals": (network, global_loss, {"total", "counts", "logged"}),
    "closure": (network, closure(), {"calls", "history"}),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_forward_writes_to_is_named_at_the_start(tmp_path, case):
    make, own_loss, names = CASES[case]
    with pytest.warns(UserWarning, match="thrown away"):
        run = training(make(), loss=own_loss, sampling=SAMPLING, folder=tmp_path / "run")
    assert set(run.describe().written) == names
    (said,) = (one for one in run.statement().assumptions if one.startswith(THROWN_AWAY))
    assert all(name in said for name in names)
    run.run(progress=False)
    assert (logged, total, counts) == ([], 0, Counter())
    assert eq.verify_run(tmp_path / "run").consistent


class HomeMade(Layer):
    """Running statistics for evaluation alone, in a buffer that is bound anew."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(CLASSES))

    def forward(self, x):
        out = super().forward(x)
        if not self.training:
            return out - self.mean
        self.mean = 0.9 * self.mean + 0.1 * out.detach().mean(0)
        return out


class Codebook(nn.Module):
    """A vector quantiser whose codes follow averages of what is assigned to them."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
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
                self.sizes.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                self.codes = (0.9 * self.codes + chosen.T @ out) / self.sizes[:, None]
        return out + (found - out).detach()


class Stateful(nn.Module):
    """An LSTM whose state goes from batch to batch."""

    def __init__(self):
        super().__init__()
        self.lstm, self.state = nn.LSTM(FEATURES, 4), None
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x):
        out, state = self.lstm(x[None], self.state)
        self.state = tuple(part.detach() for part in state)
        return self.head(out[0])


def remembering():
    previous = None

    def remembering(model, batch):
        nonlocal previous
        before, previous = previous, model(batch["input"]).detach()
        return loss(model, batch) + (0 if before is None else before.square().mean(1))

    return remembering


#: Model, loss, and names of what records are followed by that is read again. Further holders are those of
#: `tests/gradients/test_attributes.py`.
REFUSED = {
    "home-made statistics": (HomeMade, loss, {"mean"}),
    "codebook": (Codebook, loss, {"codes", "sizes"}),
    "closure": (network, remembering(), {"previous"}),
    "LSTM": (Stateful, loss, {"state"}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_follows_records_and_is_read_again_is_refused_by_name(case):
    make, own_loss, names = REFUSED[case]
    model = make()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with pytest.raises((ValueError, BufferWritesError), match="|".join(names)) as error:
        training(model, loss=own_loss, sampling=SAMPLING)
    assert names <= {*getattr(error.value, "names", names)}
    assert model.training
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])


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


def harmless(model, out):
    """A cache, the latest output, and a buffer whose values stay."""
    model.cache.setdefault(out.shape[1], torch.arange(3))
    model.calls, model.latest = model.calls.clone(), out


def counted(model, out):
    model.calls = model.calls + 1


@pytest.mark.parametrize(
    "make",
    [network, lambda: Layer(harmless), lambda: Layer(counted), lambda: Codebook().eval(), Table],
)
def test_what_follows_no_record_is_not_named_and_trains(make):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run = training(model := make(), sampling=SAMPLING)
    assert not run.describe().written
    assert not any(one.startswith(THROWN_AWAY) for one in run.statement().assumptions)
    run.take_step()
    assert getattr(model, "write", None) is not counted or model.calls > 0  # a public count is kept


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
    data = records() | {"person": torch.arange(RECORDS)}
    return training(loss=own_loss, data=data, sampling=SAMPLING, **options)


@pytest.mark.parametrize(("make", "own_loss"), [(list, noting), (lambda: {"weight": 1.0}, weighting)])
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
