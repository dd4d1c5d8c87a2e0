"""What is refused at the start names the way that works."""

from __future__ import annotations

import pytest
import torch
from small_problems import FEATURES, RECORDS, loss, network, records, training
from torch import nn
from torch.nn import functional as F

import equipoise as eq


def with_norm(trained=False):
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model[1].requires_grad_(trained)
    return model


def in_batch_softmax(model, batch):
    out = model(batch["input"])
    return F.cross_entropy(out @ out.T, torch.arange(len(out)), reduction="none")


def by_person(model, batch):
    return loss(model, batch) + 0 * batch["person"]


def loader():
    data = records()
    items = torch.utils.data.TensorDataset(data["input"], data["label"])
    sampler = torch.utils.data.WeightedRandomSampler(torch.ones(RECORDS), RECORDS)
    return torch.utils.data.DataLoader(items, sampler=sampler)


PERSONS = records() | {"person": torch.arange(RECORDS) // 2}
USERS = {"records_per_user": 2, "population": RECORDS // 2, "loss": by_person}


CASES = {
    "frozen norm": (lambda: training(with_norm()), r"eval\(\)"),
    "norm": (lambda: training(with_norm(trained=True)), "replace_batch_norm"),
    "weighted sampler": (lambda: training(data=loader()), "collate=loader.*weight the loss"),
    "name of a method": (lambda: training(method="dp-c4"), r"methods\.DPC4\("),
    "loss of torch": (lambda: training(loss=nn.CrossEntropyLoss()), "lambda model, batch"),
    "no delta": (lambda: eq.Budget(3.0), "needs delta.*1/population"),
    "loss with parameters": (
        lambda: training(
            optimizer=lambda own, lr: torch.optim.SGD([*own, *nn.Linear(3, 3).parameters()], lr)
        ),
        "ModuleDict",
    ),
    "no noise": (lambda: eq.DPSGD(noise_multiplier=0), "PlainSGD"),
    "no bound": (lambda: eq.Budget(float("inf"), 1e-5), "ClipSGD"),
    "in-batch softmax": (lambda: training(loss=in_batch_softmax), "negatives.*public.*pair"),
    "owner's column": (lambda: training(data=PERSONS, owner="person", **USERS), "owner=its values"),
    "scaler": (lambda: training(optimizer=lambda *_, **__: torch.amp.GradScaler("cpu")), "bfloat16"),
}


@pytest.mark.parametrize(("start", "remedy"), CASES.values(), ids=CASES)
def test_a_refusal_names_the_way_that_works(start, remedy):
    with pytest.raises((ValueError, TypeError, RuntimeError), match=remedy):
        start()


def test_a_delta_that_lets_a_record_leak_is_warned_of():
    with pytest.warns(UserWarning, match=r"delta=0\.1 is not below 1/population"):
        training(budget=eq.Budget(3.0, 0.1))


def with_public_negatives(model, batch):
    out, others = model(batch["input"]), model(torch.ones(5, FEATURES))
    near = (out * model(0.9 * batch["input"])).sum(1, keepdim=True)
    return -torch.cat([near, out @ others.T], 1).log_softmax(1)[:, 0]


def in_model(model, batch):
    return loss(model["own"], batch) + model["loss"](model["own"](batch["input"])).square().mean(1)


WAYS = {
    "eval": lambda: training(with_norm().train(False)),
    "public negatives": lambda: training(loss=with_public_negatives),
    "loss in the model": lambda: training(
        nn.ModuleDict({"own": network(), "loss": nn.Linear(3, 3)}), loss=in_model
    ),
    "owner's values": lambda: training(data=PERSONS, owner=PERSONS["person"], **USERS),
    "no noise": lambda: training(method=eq.methods.ClipSGD(clip_norm=0.5)),
}


@pytest.mark.parametrize("start", WAYS.values(), ids=WAYS)
def test_the_way_works(start):
    run = start()
    before = [p.detach().clone() for p in run.parameters.values()]
    run.take_step()
    assert not any(torch.equal(a, b) for a, b in zip(before, run.parameters.values(), strict=True))
