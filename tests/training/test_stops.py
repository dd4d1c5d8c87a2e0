"""What a stopped run does and says: its exit code, and which weights are where."""

import os
import signal
import sys

import pytest
import torch
from torch import nn

import equipoise as eq


def begun(folder, **settings):
    model = nn.Linear(2, 1)
    return eq.PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda model, batch: model(batch["x"])[:, 0].square(),
        data={"x": torch.randn(120, 2)},
        sampling=eq.Poisson(50, population=120, steps=4),
        budget=eq.Budget(2.0, 1e-4),
        run_dir=folder,
        **settings,
    )


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
        (signal.SIGINT, None, False, False),
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


def test_sigterm_in_the_last_step_is_no_failure(tmp_path):
    assert begun(tmp_path / "run").run(sends(signal.SIGTERM), evaluate_every=4, progress=False).finished


def test_stop_is_checked(tmp_path):
    with pytest.raises(ValueError, match="stop"):
        begun(tmp_path / "run").run(stop="never")


def test_a_stopped_run_says_which_weights_the_file_holds(tmp_path):
    training = begun(tmp_path / "run", ema_decay=0.5)
    next(iter(training))
    with pytest.warns(UserWarning, match="load_model"):
        training.finish()
    last = training.model.weight.detach().clone()
    eq.load_model(training.model, tmp_path / "run" / "model.safetensors")
    assert not torch.equal(training.model.weight, last)
