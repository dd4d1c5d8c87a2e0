"""The loop: what may not change the result, what must, and what a step is."""

import copy
import json
import random
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from small_problems import (
    RECORDS,
    OnDemand,
    check_named,
    lines,
    loss,
    network,
    parameters,
    records,
    relative_difference,
    resumed,
    training,
)
from torch import nn

import equipoise as eq
from equipoise.gradients.capture.random_numbers import GlobalState
from equipoise.privacy import PlanUsedUpError
from equipoise.statements.assumptions import Assumption
from equipoise.statements.statement import STOPPED
from equipoise.training.forwards import forward_rows


def finished(**options):
    run = training(**options)
    list(run)
    return run


def test_without_clipping_and_noise_it_is_plain_sgd():
    private, plain = network(dtype=torch.float64), network(dtype=torch.float64)
    data = records(dtype=torch.float64)
    sampling = eq.FullBatch(population=RECORDS, steps=20)
    method = eq.DPSGD(clip_norm=1e8, noise_multiplier=1e-22)
    finished(model=private, data=data, sampling=sampling, method=method)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3)
    for _ in range(20):
        optimizer.zero_grad()
        loss(plain, data).mean().backward()
        optimizer.step()
    assert relative_difference(private, plain) < 1e-10


def test_the_divisor_is_the_expected_batch_size_whatever_is_drawn():
    """Twice the records with the same public numbers: the same clipped mean gradient counts twice."""
    single, double = network(dtype=torch.float64), network(dtype=torch.float64)
    start = parameters(single)
    data = records(dtype=torch.float64)
    twice = {name: torch.cat([value, value]) for name, value in data.items()}
    for model, these in ((single, data), (double, twice)):
        method = eq.DPSGD(clip_norm=1.0, noise_multiplier=1e-15)
        finished(model=model, data=these, sampling=eq.FullBatch(RECORDS, steps=1), method=method)
    torch.testing.assert_close(parameters(double) - start, 2 * (parameters(single) - start))


def test_an_empty_draw_takes_a_step_of_noise():
    model = network()
    before = parameters(model).clone()
    run = training(model, steps=3, batch=1e-6)
    steps = list(run)
    assert [s.step for s in steps] == [1, 2, 3]
    # What is released is noise alone, of 131 numbers: four deviations of the length of three draws' mean.
    shares = [s.released_norm / s.noise_norm for s in steps]
    assert abs(sum(shares) / 3 - 1) < 4 / (2 * 131 * 3) ** 0.5
    assert not torch.equal(parameters(model), before)


def test_a_schedule_that_ends_early_or_is_stepped_twice_is_named():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    options = {"optimizer": lambda *_, **__: optimizer, "steps": 6}
    schedules = torch.optim.lr_scheduler
    with pytest.raises(ValueError, match="ends after 5 steps, and 6 are planned"):
        training(model, scheduler=schedules.OneCycleLR(optimizer, 0.3, total_steps=5), **options)
    scheduler = schedules.OneCycleLR(optimizer, 0.3, total_steps=6)
    run = training(model, scheduler=scheduler, **options)
    run.take_step()
    run.take_step()
    scheduler.step()
    with pytest.warns(UserWarning, match="the training loop steps it too"):
        run.take_step()


def test_an_optimizer_that_does_nothing_is_named():
    class Seldom(torch.optim.SGD):
        def step(self, closure=None):
            pass

    run = training(optimizer=Seldom)
    run.take_step()
    with pytest.warns(UserWarning, match="moved no parameter"):
        run.take_step()


def test_a_training_is_not_copied():
    with pytest.raises(TypeError, match="resume"):
        copy.deepcopy(training())


def test_a_scheduler_sets_the_rate_of_each_step_and_frozen_parameters_stay():
    model = network()
    model[0].weight.requires_grad_(False)
    frozen = model[0].weight.detach().clone()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    run = training(model, optimizer=lambda *_, **__: optimizer, scheduler=scheduler, steps=3)
    assert [step.learning_rate for step in run] == [1.0, 0.5, 0.25]
    assert torch.equal(model[0].weight, frozen)


def test_the_model_is_left_as_it_was():
    model = network(dropout=0.5)
    attributes = set(vars(model)), [set(vars(m)) for m in model.modules()]
    model[1].eval()
    finished(model=model, steps=2)
    assert (set(vars(model)), [set(vars(m)) for m in model.modules()]) == attributes
    assert not model[1].training
    assert model[2].training
    assert not any(m._forward_hooks or m._backward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(p.grad is None for p in model.parameters())


class NoisyItems(OnDemand):
    """Items that draw random numbers of torch, NumPy and Python."""

    def __getitem__(self, i):
        item = super().__getitem__(i)
        return {**item, "input": item["input"] + torch.rand(()) + random.random() + np.random.random()}


def test_a_start_leaves_the_global_random_numbers_where_they_were():
    before = GlobalState()
    training(network(dropout=0.5), data=NoisyItems(records()))
    assert before.moved() == []


def replace_weight(model):
    model[0].weight = nn.Parameter(model[0].weight.detach() + 1)


@pytest.mark.parametrize(
    ("change", "then", "back", "said"),
    [
        (lambda model: model[2].bias.data.add_(1e-3), "save_checkpoint", None, "public_step"),
        (lambda model: model.load_state_dict(network(seed=5).state_dict()), "take_step", None, "public_step"),
        (lambda model: model.double(), "take_step", lambda model, weight: model.float(), "'0.weight'"),
        (replace_weight, "finish", lambda model, weight: setattr(model[0], "weight", weight), "'0.weight'"),
    ],
    ids=["data", "load_state_dict", "double", "replaced"],
)
def test_nothing_but_steps_moves_the_parameters_or_replaces_them(tmp_path, change, then, back, said):
    whole = finished(steps=4)
    run = training(steps=4, folder=tmp_path / "run")
    run.take_step()
    left, weight = run.ledger.releases_left, run.model[0].weight
    change(run.model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=said):
            getattr(run, then)()
    assert run.ledger.releases_left == left  # found before anything is booked
    if back is not None:
        back(run.model, weight)
        list(run)
        assert torch.equal(parameters(run.model), parameters(whole.model))


def test_the_moving_average_is_what_the_formula_says(tmp_path):
    model = network(dtype=torch.float64)
    expect = parameters(model).clone()
    run = training(model, data=records(dtype=torch.float64), steps=4, ema_decay=0.2, folder=tmp_path / "run")
    for step in run:
        decay = min(0.2, step.step / (9 + step.step))
        expect = decay * expect + (1 - decay) * parameters(model)
    seen = []
    assert run.evaluate(lambda m: seen.append(parameters(m).clone()) or float(m.training)) == {"score": 0.0}
    torch.testing.assert_close(seen[0], expect)
    assert not torch.allclose(parameters(model), expect)
    run.finish()
    torch.testing.assert_close(parameters(model), expect)
    loaded = eq.load_model(network(dtype=torch.float64), tmp_path / "run" / "model.safetensors")
    torch.testing.assert_close(parameters(loaded), expect)


def test_views_are_averaged_before_the_clip():
    """Views that are the record itself change nothing; views of opposite sign cancel in a linear model."""
    plain, doubled = network(dtype=torch.float64), network(dtype=torch.float64)
    data, calls = records(dtype=torch.float64), []
    unclipped = eq.DPSGD(clip_norm=1e3, noise_multiplier=1e-15)
    for model, options in ((plain, {}), (doubled, {"augmentation": lambda batch, rng: batch, "views": 2})):
        finished(model=model, data=data, steps=5, method=unclipped, **options)
    assert relative_difference(doubled, plain) < 1e-8

    def flip(batch, rng):
        calls.append(1)
        return batch | {"input": batch["input"] * (-1.0) ** len(calls)}

    model = nn.Linear(12, 3, bias=False).double()
    before, sampling = model.weight.detach().clone(), eq.FullBatch(RECORDS, 1)
    options = {"augmentation": flip, "views": 2, "loss": lambda m, batch: m(batch["input"]).sum(1)}
    finished(model=model, data=data, sampling=sampling, method=unclipped, **options)
    torch.testing.assert_close(model.weight.detach(), before)


def test_a_run_folder_keeps_public_and_private_apart(tmp_path):
    folder = tmp_path / "run"
    run = training(steps=4, folder=folder, budget=eq.Budget(50.0, 1e-3), reproducible=False)
    assert (folder / "private" / "key").stat().st_mode & 0o777 == 0o600
    assert run.run(evaluate=lambda model: {"accuracy": 0.5}, progress=False).finished
    public = {"statement.json", "metrics.jsonl", "model.safetensors", "config.json"}
    assert {p.name for p in folder.iterdir()} == public | {"checkpoint", "private"}
    assert not (folder / "private" / "key").exists()
    for name in ("journal.jsonl", "diagnostics.jsonl"):
        assert (folder / "private" / name).stat().st_mode & 0o777 == 0o600
    text = "".join(p.read_text() for p in folder.glob("*.json*"))
    for private in ("training_loss", "records_not_finite", "batch.records", "clip_fraction", "seconds"):
        assert private not in text
    rows = lines(folder / "metrics.jsonl")
    assert [row["step"] for row in rows if "released_norm" in row] == [1, 2, 3, 4]
    assert any(row.get("evaluation.accuracy") == 0.5 for row in rows)
    assert all(row["training_loss"] > 0 for row in lines(folder / "private" / "diagnostics.jsonl"))
    assert json.loads((folder / "statement.json").read_text())["guarantee"] == "proven"


def test_the_statement_names_what_the_published_numbers_of_a_user_follow(tmp_path):
    folder, both = tmp_path / "run", {Assumption.SCHEDULED, Assumption.EVALUATED}

    def scheduled(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    optimizer = torch.optim.SGD((model := network()).parameters(), lr=0.1)
    options = {
        "sampling": eq.FixedEpochs(12, RECORDS, 3),
        "folder": folder,
        "scheduler": scheduled(optimizer),
    }
    run = training(model, optimizer=lambda *_, **__: optimizer, reproducible=False, **options)
    assert both & set(run.statement().assumptions) == {Assumption.SCHEDULED}
    run.take_step()
    run.evaluate(lambda model: 0.5)
    run.close()
    optimizer = torch.optim.SGD((model := network()).parameters(), lr=0.1)
    again = resumed(folder, model, lambda *_, **__: optimizer, scheduler=scheduled(optimizer))
    again.run(progress=False)
    check_named(folder, *both)
    assert not both & set(training(steps=1).statement().assumptions)


def test_masks_of_private_records_follow_the_secret_key():
    """Public masks would be dealt by place: a record that enters would change everybody else's gradient."""

    def masks(reproducible):
        seen: SimpleQueue = SimpleQueue()  # a list would be forgotten with the forward

        def watching(model, batch):
            hidden = model[2](torch.ones(len(batch["input"]), 8))
            seen.put(hidden.detach())
            return loss(model, batch) + 0 * hidden.sum(1)

        options = {"sampling": eq.FullBatch(RECORDS, 2), "microbatch_size": RECORDS, "loss": watching}
        run = training(network(dropout=0.5), reproducible=reproducible, **options)
        run.engine.never_replay("to watch")
        before = seen.qsize()
        list(run)
        found = [seen.get() for _ in range(seen.qsize())][before:]
        return [mask[:RECORDS] for mask in found if len(mask) == forward_rows(RECORDS)]

    torch.manual_seed(5)  # the global generator plays no part
    assert all(map(torch.equal, masks(True), masks(True)))
    first, second = masks(False), masks(False)
    assert len(first) == len(second) == 2
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[0], first[1])


def test_a_run_that_ended_early_claims_its_plan(tmp_path):
    """Whoever stops by what was released has spent more than the steps taken, whatever is said later."""
    run = training(steps=3, folder=tmp_path / "run")
    planned = run.plan.epsilon(run.delta).value
    run.take_step()
    statement = run.statement()
    assert statement.epsilon == planned > run.epsilon_so_far()
    assert STOPPED not in statement.assumptions
    assert run.finish().epsilon == planned  # and the run may go on
    run.take_step()
    run.end()
    assert run.finish(stop_fixed_beforehand=True).epsilon == planned
    assert eq.verify_run(tmp_path / "run").consistent


@pytest.mark.parametrize("killed", [False, True])
def test_a_stop_that_was_fixed_beforehand_claims_the_steps_taken(tmp_path, monkeypatch, killed):
    """It is booked before it is published: killed in between, the run cannot go on beyond its statement."""
    run = training(steps=3, folder=tmp_path / "run")
    run.take_step()
    spent = run.epsilon_so_far()
    if killed:

        def interrupted(*args, **options):
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr("equipoise.training.loop.write_atomically", interrupted)
            with pytest.raises(KeyboardInterrupt):
                run.finish(stop_fixed_beforehand=True)
        with pytest.raises(PlanUsedUpError):
            run.take_step()
    found = run.finish(stop_fixed_beforehand=not killed)
    assert found.epsilon == spent < run.plan.epsilon(run.delta).value
    assert STOPPED in found.statement.assumptions
    with pytest.raises(RuntimeError, match="its key was deleted"):
        run.take_step()
    checked = eq.verify_run(tmp_path / "run")
    assert checked.consistent
    assert any("fixed beforehand" in text for text in checked.not_checked)


def test_diagnostics_of_a_run_that_is_not_private_are_those_of_its_gradients():
    """By the gradients of all records, taken one by one: at the first step noise alone is random."""
    model, data, found = network(), records(), {}
    parts = [loss(model, {name: value[i : i + 1] for name, value in data.items()})[0] for i in range(RECORDS)]
    rows = torch.stack(
        [torch.cat([g.flatten() for g in torch.autograd.grad(one, [*model.parameters()])]) for one in parts]
    ).double()
    options = {"learning_rate": 1.0, "diagnostics": found.__setitem__}
    run = training(model, sampling=eq.FullBatch(RECORDS, steps=2), **options)
    before = parameters(model).clone()
    run.take_step()
    estimate = (before - parameters(model)).double()
    run.take_step()
    assert found.keys() == {1, 2}
    true, norms = rows.sum(0), rows.norm(dim=1)
    wanted = {
        "median_norm": norms.median(), "largest_norm": norms.max(), "true_norm": true.norm() / RECORDS,
        "cosine": torch.cosine_similarity(true, estimate, dim=0), "clipped": (norms > 0.5).double().mean(),
    }  # fmt: skip
    assert found[1] == pytest.approx({name: float(one) for name, one in wanted.items()}, rel=1e-4)
