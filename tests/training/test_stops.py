"""What a stopped run does and says: its exit code, and which weights are where."""

import os
import signal
import sys

import pytest
import small_problems
import torch
from torch import nn

import equipoise as eq

RECORDS = {"x": torch.randn(120, 2)}


def loss(model, batch):
    return model(batch["x"])[:, 0].square()


def begun(folder, **settings):
    sampling, budget = eq.Poisson(50, population=120, steps=4), eq.Budget(2.0, 1e-4)
    given = {"loss": loss, "data": RECORDS, "sampling": sampling, "method": eq.DPSGD(), "budget": budget}
    return small_problems.training(nn.Linear(2, 1), reproducible=False, folder=folder, **given, **settings)


def sends(number):
    def evaluate(model):
        os.kill(os.getpid(), number)
        return 0.0

    return evaluate


@pytest.mark.parametrize(
    ("number", "stop", "interactive", "exits"),
    [
        (signal.SIGTERM, None, False, True),
        (signal.SIGTERM, None, True, False),
        (signal.SIGTERM, "exit", True, True),
        (signal.SIGTERM, "return", False, False),
        (signal.SIGINT, "exit", False, False),
    ],
)
def test_a_terminated_script_does_not_count_as_done(tmp_path, monkeypatch, number, stop, interactive, exits):
    if interactive:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    training = begun(tmp_path / "run")
    given = {"evaluate": sends(number), "evaluate_every": 2, "progress": False, "stop": stop}
    if exits:
        with pytest.raises(SystemExit) as raised:
            training.run(**given)
        assert raised.value.code == 143
    else:
        assert not training.run(**given).finished
    assert training.steps_done == 2
    assert list((tmp_path / "run" / "checkpoint").iterdir())  # written before it exits


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_is_said_and_so_is_going_on(tmp_path, capsys, number):
    given = {"evaluate": sends(number), "evaluate_every": 2, "progress": False}
    folder = tmp_path / "run"
    training = begun(folder)
    if number == signal.SIGTERM:
        with pytest.raises(SystemExit):
            training.run(**given)
    else:
        assert training.run(**given).stopped_by == number
    said = capsys.readouterr().err
    assert "step 2 of 4" in said
    assert str(folder) in said
    assert "start_or_resume" in said
    training.close()
    training = small_problems.resumed(folder, nn.Linear(2, 1), loss=loss, data=RECORDS)
    assert training.run(progress=False).stopped_by is None
    assert "going on from step 2 of 4" in capsys.readouterr().err
    begun(None).run(**given | {"stop": "return"})
    assert capsys.readouterr().err == ""


def test_sigterm_in_the_last_step_is_no_failure(tmp_path):
    assert begun(tmp_path / "run").run(sends(signal.SIGTERM), evaluate_every=4, progress=False).finished


def test_a_stopped_run_says_which_weights_the_file_holds(tmp_path):
    training = begun(tmp_path / "run", ema_decay=0.5)
    next(iter(training))
    with pytest.warns(UserWarning, match="load_model"):
        training.finish()
    last = training.model.weight.detach().clone()
    eq.load_model(training.model, tmp_path / "run" / "model.safetensors")
    assert not torch.equal(training.model.weight, last)
    training = begun(None, ema_decay=0.5)
    next(iter(training))
    with pytest.warns(UserWarning, match=r"ema_decay.*folder"):
        training.finish()
