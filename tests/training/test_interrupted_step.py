"""An error in a step: the repeated step is the same step, it is not charged again, and the key stays."""

from __future__ import annotations

import json

import pytest
import torch
from small_problems import loss, network, parameters, training

import equipoise as eq
from equipoise._host import read
from equipoise.privacy.ledger import ledger as ledger_module
from equipoise.training import step as step_module

STEPS = 6


def whole() -> torch.Tensor:
    model = network()
    list(training(model, steps=STEPS))
    return parameters(model)


def releases(folder) -> list[int]:
    lines = (folder / "private" / "journal.jsonl").read_text().splitlines()
    return [entry["index"] for entry in map(json.loads, lines) if entry["type"] == "release"]


def break_once(run, step: int, error: BaseException, moved: bool) -> None:
    """Let the optimiser fail in this step, before or after it moves the parameters."""
    update = run.optimizer.step
    broken = []

    def failing() -> None:
        if run.steps_done == step and not broken:
            broken.append(step)
            if moved:
                update()
            raise error
        update()

    run.optimizer.step = failing


ERRORS = [RuntimeError("broken optimiser"), KeyboardInterrupt(), torch.OutOfMemoryError("out of memory")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("step", [0, 3, STEPS - 1])
def test_an_error_after_the_release_costs_nothing(tmp_path, step, moved, error):
    model = network()
    run = training(model, steps=STEPS, run_dir=tmp_path / "run")
    break_once(run, step, error, moved)
    with pytest.raises(type(error)):
        run.run(progress=False)
    # done if and only if the parameters moved
    assert run.steps_done == step + moved
    assert all(p.grad is None for p in model.parameters())
    assert not (tmp_path / "run" / "statement.json").exists()
    result = run.run(progress=False)
    assert result.finished
    assert result.steps == STEPS
    assert releases(tmp_path / "run") == list(range(STEPS))
    assert torch.equal(parameters(model), whole())


@pytest.mark.parametrize(("place", "moved"), [(1, False), (2, True)])
def test_an_interrupt_where_the_host_waits_costs_nothing(tmp_path, monkeypatch, place, moved):
    model = network()
    run = training(model, steps=STEPS, run_dir=tmp_path / "run")
    reads = []

    def interrupted(*values) -> None:
        read(*values)
        if run.steps_done == 3 and values:
            reads.append(values)
        if len(reads) == place:
            reads.append(values)  # once
            raise KeyboardInterrupt

    monkeypatch.setattr(step_module, "read", interrupted)
    monkeypatch.setattr(ledger_module, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(run)
    assert run.steps_done == 3 + moved
    list(run)
    assert releases(tmp_path / "run") == list(range(STEPS))
    assert torch.equal(parameters(model), whole())


def test_the_key_stays_when_the_last_step_fails(tmp_path):
    run = training(steps=2, run_dir=tmp_path / "run", reproducible=False)
    break_once(run, 1, RuntimeError("broken optimiser"), moved=False)
    with pytest.raises(RuntimeError, match="broken optimiser"):
        run.run(progress=False)
    # every release is booked, but the last one was not used yet
    result = run.finish()
    assert not result.finished
    assert (tmp_path / "run" / "private" / "key").exists()
    assert run.run(progress=False).finished
    assert not (tmp_path / "run" / "private" / "key").exists()


def test_a_checkpoint_after_an_error_repeats_the_step(tmp_path):
    run = training(steps=STEPS, run_dir=tmp_path / "run")
    break_once(run, 3, RuntimeError("broken optimiser"), moved=False)
    with pytest.raises(RuntimeError, match="broken optimiser"):
        run.run(progress=False)
    run.save_checkpoint()
    run.close()
    model = network(seed=7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    again = eq.PrivateTraining.resume(
        tmp_path / "run", model, optimizer, loss=loss, data=run._setup.rows.source._nest
    )
    list(again)
    assert releases(tmp_path / "run") == list(range(STEPS))
    assert torch.equal(parameters(model), whole())


def test_a_step_whose_records_cannot_be_read_is_repeated(tmp_path, monkeypatch):
    """No record can be read, so it is no record's fault; nothing was released."""
    model = network()
    run = training(model, steps=STEPS, run_dir=tmp_path / "run")
    run.take_step()

    def gone(ids):
        raise OSError("the disk is gone")

    with monkeypatch.context() as broken:
        broken.setattr(run._setup.rows.source, "take", gone)
        with pytest.raises(OSError, match="the disk is gone"):
            run.take_step()
    list(run)
    assert releases(tmp_path / "run") == list(range(STEPS))
    assert torch.equal(parameters(model), whole())


def test_a_loss_that_fails_on_every_record_costs_a_step_and_is_told_once(tmp_path, caplog):
    """Whether a step stops must not hang on records and parameters; the keeper's log says what happened."""
    fails = []

    def sometimes(model, batch):
        if fails:
            raise NameError("a misspelt name")
        return loss(model, batch)

    run = training(steps=STEPS, loss=sometimes, run_dir=tmp_path / "run")
    run.take_step()
    fails.append(1)
    list(run)
    assert releases(tmp_path / "run") == list(range(STEPS))
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "every record of a draw" in caplog.text


def test_an_error_of_the_scheduler_leaves_the_step_done():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    run = training(model, steps=2, optimizer=lambda parameters, lr: optimizer, scheduler=scheduler)
    step = scheduler.step

    def failing() -> None:
        scheduler.step = step
        raise ValueError("broken scheduler")

    scheduler.step = failing
    with pytest.raises(ValueError, match="broken scheduler"):
        run.take_step()
    assert run.steps_done == 1
    list(run)
    assert run.ledger.releases_left == {"batch": 0}
