"""Lines that are launched as graphs give the bits of their operations, whatever happens between launches."""

from dataclasses import replace

import pytest
import torch
from small_problems import (
    loss,
    network,
    parameters,
    records,
    resumed,
    saved,
    training,
    weighted_loss,
    with_overflow,
)
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import equipoise as eq
from equipoise import _launched as launched
from equipoise.gradients import per_sample_gradients
from equipoise.gradients.trace import Line
from equipoise.privacy.noise.streams import NormalStream
from equipoise.training.setup.step_number import step_of, with_step, with_step_on
from tests.recorded_graphs import RecordedGraph


@pytest.fixture
def graphs(monkeypatch):
    """The processor captures graphs."""
    monkeypatch.setitem(launched.GRAPHS, "cpu", RecordedGraph)


def runs_of(run):
    """How each line of each form was run."""
    return [of for traced in run.engine._traced.values() if traced for of in traced.launches]


RUNS = {
    "plain": {},
    "dropout": {"model": lambda: network(dropout=0.3)},
    "microbatches": {"microbatch_size": 5},
    "two points": {"method": lambda: eq.methods.DPSVRG(noise_multiplier=1.0, anchor_noise_multiplier=1.0)},
    "two sums": {"method": lambda: eq.DiceSGD(clip_norm=0.1, residual_clip_norm=0.6, noise_multiplier=1.0)},
    "losses alone": {"method": lambda: eq.methods.DPZO(noise_multiplier=1.0), "launches": False},
}
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))
DEVICES = ["cpu", CUDA]


def result_of(options, steps=9, device="cpu"):
    made = {name: value() if name in ("model", "method") else value for name, value in options.items()}
    made.setdefault("model", network())
    run = training(steps=steps, device=device, **made)
    list(run)
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


def test_a_killed_run_goes_on_with_graphs_where_it_had_none(tmp_path, monkeypatch):
    """The repeated steps have the same sums, so none is charged again; places and masks are the same, too."""
    options = {"microbatch_size": 5, "sampling": eq.FullBatch(41, 9), "data": records(41)}  # the last: one
    monkeypatch.delitem(launched.GRAPHS, "cpu", raising=False)
    _, expected = result_of({"model": lambda: network(dropout=0.3), **options})
    run = training(network(dropout=0.3), folder=tmp_path / "run", **options)
    for step in run:
        if step.step == 2:
            run.save_checkpoint()
        if step.step == 6:
            break
    run.close()  # nothing of the last four steps was saved
    monkeypatch.setitem(launched.GRAPHS, "cpu", RecordedGraph)
    model = network(seed=7, dropout=0.3)
    again = resumed(tmp_path / "run", model, data=records(41))
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
    tensors = [v for kept in held.values() for f in kept for v in vars(f).values() if torch.is_tensor(v)]
    copies = [value.clone() for value in tensors]
    other = {name: values[16:32] for name, values in records().items()}
    run.engine.by_plan(other, None, None)
    assert tensors
    assert all(map(torch.equal, tensors, copies))


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


def not_captured(function, device):
    raise RuntimeError("operation not permitted when stream is capturing")


GRAPHS = [(Wrong, "numbers are not those"), (Empty, "numbers are not those"), (not_captured, "not permitted")]


@pytest.mark.parametrize(("graph", "said"), GRAPHS)
def test_a_graph_with_other_numbers_or_none_is_not_used(monkeypatch, graph, said):
    monkeypatch.delitem(launched.GRAPHS, "cpu", raising=False)
    _, expected = result_of({})
    monkeypatch.setitem(launched.GRAPHS, "cpu", graph)
    run, found = result_of({})
    assert torch.equal(found, expected)
    assert said in run.describe().way_of_launching


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


def test_a_constant_that_a_graph_returns_stays_as_it_is(graphs):
    """The capture marks the memory of its results, to see that a launch writes them; not a constant's."""
    model = Grid()
    before = model.grid.clone()
    run = training(model, sampling=eq.FullBatch(41, 6), data=records(41))
    list(run)
    assert torch.equal(model.grid, before)
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


ON_DEVICES = pytest.mark.parametrize("device", DEVICES)

NETWORKS = {
    "convolution": lambda: (
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(64, 3)),
        torch.randn(7, 2, 6, 6),
    ),
    "look-up": lambda: (
        nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 3), nn.Flatten(), nn.Linear(15, 3)),
        torch.randint(11, (7, 5)),
    ),
}


def losses(model, batch):
    return nn.functional.cross_entropy(model(batch["input"]), batch["label"], reduction="none")


@ON_DEVICES
@pytest.mark.parametrize("name", NETWORKS)
def test_norms_and_weighted_sums_are_those_of_each_record_alone(device, name):
    torch.manual_seed(0)
    model, inputs = NETWORKS[name]()
    model = model.to(device)
    batch = {"input": inputs.to(device), "label": torch.arange(7, device=device) % 3}
    alone = []
    for i in range(7):
        value = losses(model, {key: part[i : i + 1] for key, part in batch.items()}).sum()
        alone.append(torch.autograd.grad(value, list(model.parameters())))
    gradients = per_sample_gradients(model, losses, batch)
    norms = torch.stack([torch.cat([g.flatten() for g in row]).norm() for row in alone])
    torch.testing.assert_close(gradients.row_norms(), norms, rtol=1e-4, atol=1e-6)
    weights = torch.linspace(0.1, 1.0, 7, device=device)
    sums = gradients.weighted_sums(weights)
    for place, key in enumerate(dict(model.named_parameters())):
        want = sum(w * row[place] for w, row in zip(weights, alone, strict=True))
        torch.testing.assert_close(sums[key], want, rtol=1e-4, atol=1e-5)


@ON_DEVICES
def test_with_hardly_any_noise_a_training_ends_where_the_processor_does(device, tmp_path):
    """Resumed on the way. The noise itself follows from the digests of a device, so its numbers differ."""
    ends = []
    for where in ("cpu", device):
        method = eq.DPSGD(clip_norm=0.5, noise_multiplier=1e-6)
        options = {"method": method, "device": where, "sampling": eq.FullBatch(60, 5)}
        data, folder = with_overflow(), tmp_path / f"{len(ends)}"
        begun = training(network().to(where), data=data, loss=weighted_loss, folder=folder, **options)
        saved(begun, steps=3)
        run = resumed(folder, network(seed=2).to(where), data=data, loss=weighted_loss, device=where)
        run.run(progress=False)
        assert parameters(run.model).device.type == where
        ends.append(parameters(run.model).cpu())
    assert (ends[1] - ends[0]).norm() <= 1e-4 * ends[0].norm()


@ON_DEVICES
def test_noise_is_made_there_and_has_its_scale(device):
    drawn = NormalStream(b"k" * 32).draw(200_000, 3.0, device=device)
    assert drawn.device.type == device
    # four standard errors; a scale that is 1% off is rejected
    assert abs(float(drawn.std()) / 3.0 - 1) < 4 / (2 * 200_000) ** 0.5
    assert abs(float(drawn.mean())) < 4 * 3.0 / 200_000**0.5
    again = NormalStream(b"k" * 32).draw_ranges(200_000, 3.0, [(1_000, 1_010)], device=device)
    assert torch.equal(again, drawn[1_000:1_010])


@ON_DEVICES
def test_a_run_on_another_kind_of_device_repeats_no_noise(device):
    """Its noise has other numbers, so what it releases is charged anew."""
    setup = training(network().to(device), device=device)._setup
    other = torch.device("meta" if device == "cpu" else "cpu")
    assert replace(setup, device=other).kernels() != setup.kernels()
