"""Lines that are launched as graphs give the bits of their operations, whatever happens between launches."""

from __future__ import annotations

import pytest
import torch
from small_problems import loss, network, parameters, records, training
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import equipoise as eq
from equipoise import _launched as launched
from equipoise.gradients.trace import Line
from equipoise.training.setup.step_number import step_of, with_step, with_step_on
from tests.recorded_graphs import RecordedGraph


@pytest.fixture
def graphs(monkeypatch):
    """The processor captures graphs."""
    monkeypatch.setitem(launched.GRAPHS, "cpu", RecordedGraph)


def runs_of(run):
    """How each line of each form was run."""
    return [of for traced in run.engine._traced.values() if traced for of in traced.launches]


def images():
    torch.manual_seed(0)
    convolution = nn.Sequential(nn.Unflatten(1, (1, 3, 4)), nn.Conv2d(1, 4, 2), nn.Tanh(), nn.Flatten())
    return convolution.append(nn.Linear(24, 3))


RUNS = {
    "plain": {},
    "dropout": {"model": lambda: network(dropout=0.3)},
    "convolution": {"model": images},
    "microbatches": {"microbatch_size": 5},
    "two points": {
        "method": lambda: eq.methods.DPSVRG(clip_norm=0.5, anchor_batch_size=20),
        "budget": eq.Budget(8.0, 1e-3),
    },
    "two sums": {
        "method": lambda: eq.DiceSGD(clip_norm=0.1, residual_clip_norm=0.6),
        "budget": eq.Budget(8.0, 1e-3),
    },
    "losses alone": {
        "method": lambda: eq.methods.DPZO(clip_norm=0.5),
        "budget": eq.Budget(8.0, 1e-3),
        "launches": False,
    },
    "few records": {"batch": 1},
}


DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]


def result_of(options, steps=9, device="cpu"):
    made = {name: value() if name in ("model", "method") else value for name, value in options.items()}
    made.setdefault("model", network())
    run = training(steps=steps, device=device, **made)
    for _ in run:
        pass
    return run, parameters(made["model"])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", RUNS)
def test_a_launched_training_ends_as_one_of_operations(name, device, monkeypatch):
    graph = {"cpu": RecordedGraph, "cuda": launched.CudaGraph}[device]
    options = dict(RUNS[name])
    launches = options.pop("launches", True)
    monkeypatch.delitem(launched.GRAPHS, device, raising=False)
    _, expected = result_of(options, device=device)
    monkeypatch.setitem(launched.GRAPHS, device, graph)
    run, found = result_of(options, device=device)
    assert torch.equal(found, expected)
    # Losses alone are asked for at other parameters in each step, which lie elsewhere.
    assert not launches or sum(of.count for of in runs_of(run)) >= 9
    assert not any(of.refused for of in runs_of(run))
    words = {"two sums": "rows with norms as one graph"}.get(name, "as two graphs")
    assert run.describe().way_of_launching.startswith(words if launches else "operation by")


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_killed_run_goes_on_with_graphs_where_it_had_none(tmp_path, monkeypatch, dropout):
    """The repeated steps have the same sums, so none is charged again; places and masks are the same, too."""
    options = {"microbatch_size": 5, "sampling": eq.FullBatch(41, 9), "data": records(41)}  # the last: one
    monkeypatch.delitem(launched.GRAPHS, "cpu", raising=False)
    _, expected = result_of({"model": lambda: network(dropout=dropout), **options})
    run = training(network(dropout=dropout), folder=tmp_path / "run", **options)
    for step in run:
        if step.step == 2:
            run.save_checkpoint()
        if step.step == 6:
            break
    run.close()  # nothing of the last four steps was saved
    monkeypatch.setitem(launched.GRAPHS, "cpu", RecordedGraph)
    model = network(seed=7, dropout=dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    again = eq.PrivateTraining.resume(tmp_path / "run", model, optimizer, loss=loss, data=run._setup.data)
    list(again)
    assert torch.equal(parameters(model), expected)
    assert sum(of.count for of in runs_of(again)) > 9
    assert again.ledger.record.num_draws == 9


def test_rows_that_are_still_in_use_are_not_written_over(graphs):
    run, _ = result_of({})
    batch = {name: values[:16] for name, values in records().items()}
    form = run.engine.form(batch)
    run.engine._traced[form] = run.engine.line(batch)
    for _ in range(4):
        run.engine.by_plan(batch, None, None).weighted_sums(torch.ones(16))
    rows = run.engine.by_plan(batch, None, None)
    held = rows.factors  # and nothing of the rows themselves
    del rows
    before = {name: [vars(f).copy() for f in kept] for name, kept in held.items()}
    copies = {
        n: [{k: v.clone() for k, v in f.items() if torch.is_tensor(v)} for f in kept]
        for n, kept in before.items()
    }
    other = {name: values[16:32] for name, values in records().items()}
    run.engine.by_plan(other, None, None)
    for name, kept in before.items():
        for factor, copy in zip(kept, copies[name], strict=True):
            assert all(torch.equal(factor[key], value) for key, value in copy.items())


def test_parameters_that_lie_elsewhere_are_followed(graphs):
    model = network()
    run = training(model, steps=12)
    plain = network()
    other = training(plain, steps=12)
    for number, (_, _) in enumerate(zip(run, other, strict=True)):
        if number == 6:
            for one, same in zip(model.parameters(), plain.parameters(), strict=True):
                one.data = one.data.clone()
                same.data = same.data.clone()
    assert torch.equal(parameters(model), parameters(plain))


class Wrong(RecordedGraph):
    def launch(self):
        super().launch()
        self.outputs[-1].add_(1e-3)


class Empty(RecordedGraph):
    """What a graph holds whose kernels ran on another stream."""

    def launch(self):
        pass


@pytest.mark.parametrize("graph", [Wrong, Empty])
def test_a_graph_with_other_numbers_is_not_used(monkeypatch, graph):
    _, expected = result_of({})
    monkeypatch.setitem(launched.GRAPHS, "cpu", graph)
    run, found = result_of({})
    assert torch.equal(found, expected)
    assert "its numbers are not those of the operations" in run.describe().way_of_launching


def test_what_cannot_be_captured_runs_by_operations(monkeypatch):
    _, expected = result_of({})

    def fails(function, device):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setitem(launched.GRAPHS, "cpu", fails)
    run, found = result_of({})
    assert torch.equal(found, expected)
    assert "not permitted" in run.describe().way_of_launching


def test_no_microbatch_of_a_draw_runs_by_operations_because_of_the_one_before(graphs):
    """Rows are free for the next microbatch when their sums are taken, and sums when they are added up."""
    options = {"microbatch_size": 5, "sampling": eq.FullBatch(41, 6), "data": records(41)}  # nine a step
    run, _ = result_of(options)
    forward, _, weighed = runs_of(run)
    assert forward.count == 6 * 9
    assert weighed.count == 6 * 8 - 1  # the second of a draw is made while the first is not added up


class Grid(nn.Module):
    """It multiplies by a constant, which is a factor of the rows as it lies there."""

    def __init__(self):
        super().__init__()
        self.first, self.places, self.last = nn.Linear(12, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.grid = torch.randn(1, 6)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x) * self.places(self.grid.expand(len(x), 6))))


def test_a_constant_that_a_graph_returns_stays_as_it_is(graphs, monkeypatch):
    """The capture marks the memory of its results, to see that a launch writes them; not a constant's."""
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Grid()
        before = model.grid.clone()
        run = training(model, sampling=eq.FullBatch(41, 6), data=records(41))
        list(run)
        assert torch.equal(model.grid, before)
        found.append(parameters(model))
        monkeypatch.delitem(launched.GRAPHS, "cpu", raising=False)
    assert torch.equal(*found)
    assert not any(of.refused for of in runs_of(run))


def test_a_number_of_the_host_is_in_no_graph():
    """A graph of a device would keep the value that it had."""
    moved = with_step_on(with_step(lambda model, batch, step: batch * step), torch.device("meta"))
    assert step_of(moved).device.type == "meta"
    held = torch.ones(())
    line = Line(make_fx(lambda x: [x * held])(torch.ones(2)), ("x",), ("y",))
    assert line.is_on(torch.device("cpu"))
    assert not line.is_on(torch.device("meta"))


def test_a_parameter_turned_where_it_lies_is_read_anew(graphs):
    """Its address is the same, and its strides are others."""
    turned = launched.launched(lambda t: [t.flatten() * 1], [False], torch.device("cpu"))
    matrix = torch.arange(6.0).view(2, 3)
    for _ in range(4):
        turned(matrix)
    assert turned.count > 0
    matrix.data = matrix.data.t()
    assert torch.equal(turned(matrix)[0], matrix.flatten())


@pytest.mark.parametrize("device", DEVICES)
def test_a_loss_follows_the_number_of_its_step(device, graphs, monkeypatch):
    """On a device the number lies there, too: a graph would keep one of the host as it was at first."""

    def warmed(model, batch, step):
        return loss(model, batch) * torch.clamp(step / 20, max=1)

    found = []
    for _ in range(2):
        model = network()
        run = training(model, loss=warmed, sampling=eq.FullBatch(41, 9), data=records(41), device=device)
        list(run)
        found.append(parameters(model).cpu())
        for kind in ("cpu", "cuda"):
            monkeypatch.delitem(launched.GRAPHS, kind, raising=False)
    assert torch.equal(*found)
