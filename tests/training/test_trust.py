"""`trust=` names modules for whose mixing of records the owner answers; nothing else becomes weaker by it."""

import pytest
import small_problems
import torch
from small_problems import MeanBackward, parameters, resumed, saved
from torch import nn
from torch.nn import functional as F
from zoo import Net

import equipoise as eq
from equipoise.gradients import CrossRecordError
from equipoise.gradients.checks.errors import BufferWritesError

RECORDS = 48


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class Capacity(nn.Module):
    """Each expert takes so many tokens of the batch, in their order; the others go by."""

    def __init__(self):
        super().__init__()
        self.gate, self.expert = nn.Linear(6, 4), nn.Linear(6, 6)

    def forward(self, x):
        score = self.gate(x).softmax(-1)
        place = (F.one_hot(score.argmax(-1), 4).cumsum(0) <= 5).to(x.dtype)
        return self.expert(x) * (place * score).sum(-1, keepdim=True)


def model(part):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), part, nn.Linear(6, 3))


def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def data():
    torch.manual_seed(1)
    return {"x": torch.randn(RECORDS, 5), "y": torch.randint(3, (RECORDS,))}


def training(net, steps=2, loss=loss, **more):
    return small_problems.training(
        net, loss=loss, data=data(), sampling=eq.Poisson(16, RECORDS, steps), **more
    )


@pytest.mark.parametrize("part", [Centred, Capacity])
def test_what_mixes_in_a_named_module_trains_unchecked(part, tmp_path):
    with pytest.raises(CrossRecordError, match="trust="):
        training(model(part()))
    found = training(model(part()), trust=("2",), folder=tmp_path / "run")
    assert found.independence.word == "unchecked"
    assert "2" in found.independence.reason
    assert found.engine.trials.excused[0].operation in found.independence.reason
    found.run(progress=False)
    statement = found.statement()
    assert statement.independence["model"] == "unchecked"
    assert any(found.independence.reason in text for text in statement.assumptions)
    assert eq.verify_run(tmp_path / "run").consistent


def test_rows_are_those_of_the_sum_of_losses():
    net = model(Centred())
    found = training(net, trust=("2",))
    batch = {name: values[:16] for name, values in data().items()}
    total = found.engine(batch).weighted_sums(torch.ones(16))
    expected = torch.autograd.grad(loss(net, batch).sum(), [*net.parameters()])
    for (name, _), gradient in zip(net.named_parameters(), expected, strict=True):
        torch.testing.assert_close(total[name].to(gradient), gradient, rtol=1e-4, atol=1e-5)


def contrastive(model, batch):
    out = model(batch["x"])
    return F.cross_entropy(out @ out.T, torch.arange(len(out)), reduction="none")


class Again(nn.Module):
    """Computes what a trusted module inside it did, by the same operations."""

    def __init__(self):
        super().__init__()
        self.inner = Centred()

    def forward(self, x):
        return self.inner(x) + (x - x.mean(0))


ELSEWHERE = [
    (Centred, "3", loss),
    (Centred, "2", contrastive),
    (Again, "2.inner", loss),
    (lambda: Net(lambda self, x: MeanBackward.apply(x)), "0", loss),
]


@pytest.mark.parametrize(("part", "name", "own_loss"), ELSEWHERE)
def test_what_mixes_elsewhere_is_refused(part, name, own_loss):
    with pytest.raises(CrossRecordError):
        training(model(part()), trust=(name,), loss=own_loss)


def test_a_backward_belongs_to_its_module():
    assert training(model(nn.LayerNorm(6)), trust=("2",)).independence.word == "proved"
    assert (
        training(model(Net(lambda self, x: MeanBackward.apply(x))), trust=("2",)).independence.word
        == "unchecked"
    )
    with pytest.raises(ValueError, match=r"trust=.*named_modules"):
        training(model(Centred()), trust=("9",))


def test_what_a_trusted_module_writes_to_buffers_is_refused_as_ever():
    with pytest.raises(BufferWritesError, match="track_running_stats=False") as error:
        training(model(nn.BatchNorm1d(6, affine=False)), trust=("2",))
    assert set(error.value.names) == {"2.running_mean", "2.running_var"}


def test_a_resume_trusts_as_before(tmp_path):
    whole = training(model(Centred()), steps=4, trust=("2",))
    whole.run(progress=False)
    saved(training(model(Centred()), steps=4, trust=["2"], folder=tmp_path / "run"))
    run = resumed(tmp_path / "run", again := model(Centred()), loss=loss, data=data())
    assert run.independence.word == "unchecked"
    run.run(progress=False)
    assert torch.equal(parameters(whole.model), parameters(again))
