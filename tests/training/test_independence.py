"""Whether records are kept apart, as a run says it: proved only of what its steps run."""

import copy
import functools
import json
import warnings

import pytest
import torch
from small_problems import loss, records, resumed, saved, training
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.rnn import pad_sequence

import equipoise as eq
from equipoise.distributed.backend import is_no_records_fault
from equipoise.gradients import CrossRecordError, GradientEngine
from equipoise.statements.assumptions import MODEL


class Texts(torch.utils.data.Dataset):
    """Items of 3 to 40 numbers."""

    def __init__(self, lengths):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, i):
        rng = torch.Generator().manual_seed(i)
        return {"x": torch.randn(self.lengths[i], 4, generator=rng), "length": torch.tensor(self.lengths[i])}


def padded(items):
    x = pad_sequence([item["x"] for item in items], batch_first=True)
    return {"x": x, "length": torch.stack([item["length"] for item in items])}


class Mean(nn.Module):
    """A text's mean; batches of some length are centred, if there is one."""

    def __init__(self, centred=None):
        super().__init__()
        self.linear, self.centred = nn.Linear(4, 2), centred

    def forward(self, x, length):
        if x.shape[1] == self.centred:
            x = x - x.mean(0)
        there = torch.arange(x.shape[1]) < length[:, None]
        return (self.linear(x) * there[..., None]).sum(1) / length[:, None]


def squared(model, batch):
    return model(batch["x"], batch["length"]).square().sum(1)


def texts(lengths, steps):
    given = {"data": Texts(lengths), "collate": padded, "population": len(lengths), "microbatch_size": 2}
    return training(Mean(), loss=squared, steps=steps, batch=1.5, **given)


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize(("forms", "word"), [(8, "proved"), (14, "compared"), (24, "unchecked")])
def test_eight_forms_are_traced_and_eight_compared(forms, word):
    run = texts([3 + i for i in range(forms)], 40)
    run.run(progress=False)
    assert run.independence.word == word
    if word == "proved":
        return
    assert "PadTo" in run.independence.reason
    assert run.statement().independence["data"] == "compared"


def test_a_form_that_mixes_stops_the_run():
    """No record is computed by itself instead, which would hide it."""

    def of_length(length):
        return {"x": torch.randn(4, length, 4), "length": torch.full((4,), length)}

    engine = GradientEngine(Mean(centred=7), squared, of_length(5))
    engine.by_plan(of_length(6))
    assert engine.independence.word == "proved"
    with pytest.raises(CrossRecordError, match=r"aten\.sub") as caught:
        engine.by_plan(of_length(7))
    assert is_no_records_fault(caught.value)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(spectral_norm(nn.Linear(12, 16)), nn.Tanh(), nn.Linear(16, 3))
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, x):
        with torch.no_grad():
            self.steps.add_(1)
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.net(x)


def test_buffers_that_follow_no_record_are_kept_and_others_named(tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = Counting()
        run = training(copy.deepcopy(model), steps=60, folder=tmp_path / "run")
    assert run.describe().written == ["mean"]
    assert any("mean" in str(one.message) for one in caught)
    saved(run, steps=30)
    again = Counting()
    resumed(tmp_path / "run", again).run(progress=False)
    whole = training(model, steps=60)
    whole.run(progress=False)
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    assert float(model.steps) == 60
    assert not model.mean.any()
    with torch.no_grad():
        norm = torch.linalg.matrix_norm(model.eval().net[0].weight, 2)
    assert float(norm) == pytest.approx(1.0, abs=0.05)
    assert eq.verify_run(tmp_path / "run").consistent


def test_a_resumed_run_says_the_weakest_that_its_processes_found(tmp_path):
    saved(training(steps=3, folder=tmp_path / "run"))
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    others = [text for text in config["assumptions"] if not text.startswith(MODEL)]
    weaker = {"assumptions": [*others, MODEL + "compared (a value is read (line 3))"]}
    (tmp_path / "run" / "config.json").write_text(json.dumps(config | weaker))
    again = resumed(tmp_path / "run")
    assert str(again.independence) == "compared (a value is read (line 3))"
    assert again.statement().independence["model"] == "compared"
    again.close()


def test_what_is_kept_of_a_first_batch_is_public():
    """Where nobody looks, as in a function that caches."""
    kept = []
    for times in (1.0, 100.0):
        seen: list = []
        largest = functools.lru_cache(maxsize=1)(lambda seen=seen: seen[0].abs().max())

        def scaled(model, batch, seen=seen, largest=largest):
            seen[:] = [batch["input"].detach()]
            return loss(model, {**batch, "input": batch["input"] / largest()})

        training(data=records() | {"input": times * records()["input"]}, loss=scaled).take_step()
        kept.append(float(largest()))
    assert kept[0] == kept[1] > 0
