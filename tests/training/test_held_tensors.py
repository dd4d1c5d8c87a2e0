"""What model and loss hold at the start: private records are refused, tensors as long as the data named."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from small_problems import FEATURES, RECORDS, OnDemand, loss, network, records, resumed, saved, training
from torch import nn

import equipoise as eq
from equipoise.statements.assumptions import HELD
from equipoise.training.record_source import DataError

DATA = records()
X, Y = DATA["input"], DATA["label"]
GRAPH = X @ X.T
GLOBAL = X[7:8].clone()


class Holding(nn.Module):
    """A model that adds nothing of what it holds."""

    def __init__(self, held=None, kind="attribute"):
        super().__init__()
        self.net = network()
        if kind == "buffer":
            self.register_buffer("held", held)
        elif kind == "parameter":
            self.held = nn.Parameter(held, requires_grad=False)
        else:
            self.held = held

    def forward(self, x):
        return self.net(x)


class Global(Holding):
    def forward(self, x):
        return self.net(x) + 0 * GLOBAL.sum()


class Callable:
    def __init__(self, held):
        self.held = held

    def __call__(self, model, batch):
        return loss(model, batch)


class LossModule(nn.Module):
    def __init__(self, held):
        super().__init__()
        self.register_buffer("held", held)

    def forward(self, model, batch):
        return loss(model, batch)


def with_global(model, batch):
    return loss(model, batch) + 0 * GLOBAL.sum()


def closing(held):
    def closed(model, batch):
        return loss(model, batch) + 0 * held.sum()

    return closed


def taking(model, batch, held=None):
    return loss(model, batch)


def default(held):
    def called(model, batch, held=held):
        return loss(model, batch)

    return called


HOLDERS = {
    "buffer": lambda held: {"model": Holding(held, "buffer")},
    "parameter": lambda held: {"model": Holding(held, "parameter")},
    "attribute": lambda held: {"model": Holding(held)},
    "array": lambda held: {"model": Holding(held.numpy())},
    "list": lambda held: {"model": Holding([held])},
    "closure": lambda held: {"loss": closing(held)},
    "partial": lambda held: {"loss": functools.partial(taking, held=held)},
    "default": lambda held: {"loss": default(held)},
    "object": lambda held: {"loss": Callable(held)},
    "method": lambda held: {"loss": LossModule(held).forward},
    "a function in a partial": lambda held: {"loss": functools.partial(closing(held))},
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_held_records_are_refused_by_the_holder_s_name(tmp_path, holder):
    with pytest.raises(DataError, match="held"):
        training(**HOLDERS[holder](X[3:9].clone()), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("given", [{"model": Global()}, {"loss": with_global}], ids=["model", "loss"])
def test_held_records_are_found_in_globals(given):
    with pytest.raises(DataError, match="GLOBAL"):
        training(**given)


COPIES = {
    "all": X,
    "a record": X[5],
    "another type": X[2:4].double(),
    "half precision": torch.cat([torch.zeros(1), X[2:4].flatten()]).bfloat16()[1:].view(2, FEATURES),
    "in another shape": X[2:4].reshape(2, 3, 4),
    "labels": Y,
    "labels as numbers": Y.float()[:, None],
    "among others": torch.cat([torch.zeros(3, FEATURES), X[-1:]]),
}
NO_COPIES = {
    "derived": GRAPH,
    "shuffled labels": Y[torch.randperm(RECORDS, generator=torch.Generator().manual_seed(0))],
    "numbers": torch.arange(RECORDS),
    "constants": torch.ones(RECORDS, FEATURES),
    "one-hot": torch.eye(FEATURES),
    "empty": torch.zeros(0, FEATURES),
    "whole numbers that agree by chance": torch.cartesian_prod(*[torch.arange(4)] * 4),
}


@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_is_refused_whatever_its_shape_and_type(kind):
    with pytest.raises(DataError, match=r"model\.held"):
        training(Holding(COPIES[kind].clone(), "buffer"))


@pytest.mark.parametrize("kind", NO_COPIES)
def test_what_is_no_copy_trains(kind):
    """Little content is equal by chance: numbers of records, rows of few values, one row for all."""
    data = DATA | {
        "id": torch.arange(RECORDS),
        "counts": torch.randint(4, (RECORDS, 4), generator=torch.Generator().manual_seed(0)),
        "ones": torch.ones(RECORDS, FEATURES),
        "one-hot": torch.eye(FEATURES)[torch.arange(RECORDS) % FEATURES],
        "grid": torch.randn(FEATURES).expand(RECORDS, FEATURES),
        "name": torch.randn(10, FEATURES)[torch.arange(RECORDS) % 10],
    }
    model = Holding(NO_COPIES[kind], "buffer")
    model.grid = data["grid"][0].clone()  # public: it is the same in every record
    model.names = data["name"][:10].clone()  # of their classes
    assert training(model, data=data, steps=1).run(progress=False).finished


def test_of_records_made_on_demand_those_that_were_read_are_compared():
    with pytest.raises(DataError, match=r"model\.held"):
        training(Holding(X.clone(), "buffer"), data=OnDemand(DATA))


def test_records_of_users_are_compared():
    users = {"owner": torch.arange(RECORDS) % 20, "records_per_user": 3, "rows": "mean"}
    for data in (DATA, OnDemand(DATA)):
        with pytest.raises(DataError, match=r"model\.held"):
            training(Holding(X.clone(), "buffer"), data=data, population=20, batch=4, **users)


def test_what_is_as_long_as_the_data_is_named(tmp_path):
    """A graph of all users: no epsilon covers it, and it moves every user's gradient."""
    model = Holding(GRAPH, "buffer")
    model.table = np.zeros((RECORDS, 3))
    folder = tmp_path / "run"
    run = training(model, loss=closing(torch.zeros(RECORDS, 2)), folder=folder, steps=3)
    said = f"{HELD}loss.held, model.held, model.table"
    assert run.describe().held == ["loss.held", "model.held", "model.table"]
    assert "model.table" in str(run.describe())
    saved(run)
    again = resumed(folder, model, loss=closing(torch.zeros(60, 2)))
    again.run(progress=False)
    assert again.statement().assumptions.count(said) == 1
    findings = eq.verify_run(folder).findings
    assert not [finding for finding in findings if finding.ok is False]
    assert not [finding for finding in findings if finding.subject == "further assumptions"]


def test_a_graph_is_refused_or_named():
    """A recommender that holds who liked what."""
    liked = (torch.rand(RECORDS, FEATURES, generator=torch.Generator().manual_seed(0)) < 0.2).float()
    data = {"input": liked, "label": Y}
    with pytest.raises(DataError, match=r"model\.held"):
        training(Holding(liked.clone(), "buffer"), data=data)
    normed = liked / liked.sum(1, keepdim=True).clamp(min=1)
    for held in (normed, GRAPH.to_sparse()):
        assert training(Holding(held), data=data).describe().held == ["model.held"]
    assert training(Holding(torch.zeros(66, 2)), population=66).describe().held == ["model.held"]
    assert training().describe().held == []


@pytest.mark.parametrize("held", [X.tolist(), tuple(map(tuple, X[3:9].tolist()))])
def test_lists_of_numbers_are_looked_at_too(held):
    def closed(model, batch):
        return loss(model, batch) + 0 * sum(len(str(one)) for one in held[:1])

    with pytest.raises(DataError, match="private records"):
        training(loss=closed)
    harmless = [0.1, 0.5, 0.2]
    training(loss=lambda model, batch: loss(model, batch) * sum(harmless))
