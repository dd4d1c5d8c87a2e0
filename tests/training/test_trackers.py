"""Writers for experiment trackers get publishable numbers, and no times of steps."""

from __future__ import annotations

import sys
from types import ModuleType
from unittest.mock import MagicMock

import pytest
from small_problems import training

from equipoise.training import MLflowWriter, TensorBoardWriter, WandbWriter

PUBLIC = {"learning_rate", "clip_norm", "noise_std", "noise_norm", "released_norm", "epsilon"}


def test_tensorboard_gets_step_numbers_as_times(monkeypatch, tmp_path):
    module, made = ModuleType("torch.utils.tensorboard"), MagicMock()
    module.SummaryWriter = made
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    run = training(steps=2, writers=[TensorBoardWriter(tmp_path)])
    run.run(lambda model: {"score": 1.0}, progress=False)
    calls = [(*call.args, call.kwargs["walltime"]) for call in made(str(tmp_path)).add_scalar.call_args_list]
    assert {name for name, *_ in calls} <= PUBLIC | {"evaluation.score"}
    assert {("evaluation.score", 1.0, 2, 2)} <= {*calls}
    assert all(step == time for _, _, step, time in calls)


def test_the_files_of_tensorboard_hold_the_publishable_numbers(tmp_path):
    events = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs the extra tensorboard"
    )
    run = training(steps=2, writers=[TensorBoardWriter(tmp_path)])
    run.run(lambda model: {"score": 1.0}, progress=False)
    found = events.EventAccumulator(str(tmp_path)).Reload()
    names = set(found.Tags()["scalars"])
    assert {"evaluation.score", "noise_std"} <= names <= PUBLIC | {"evaluation.score"}
    scores = found.Scalars("evaluation.score")
    assert [(s.step, s.value, s.wall_time) for s in scores] == [(1, 1.0, 1.0), (2, 1.0, 2.0)]


def test_wandb_gets_a_row_for_each_step():
    class Run:
        rows: list = []  # noqa: RUF012

        def log(self, values, step):
            self.rows.append((step, values))

    run = training(steps=2, writers=[WandbWriter(Run())])
    run.run(lambda model: {"score": 1.0, "other": float("nan")}, progress=False)
    assert {step for step, _ in Run.rows} == {1, 2}
    assert (2, {"evaluation.score": 1.0}) in Run.rows
    assert all(set(values) <= PUBLIC | {"evaluation.score"} for _, values in Run.rows)


def test_mlflow_gets_step_numbers_as_times():
    client = MagicMock()
    training(steps=2, writers=[MLflowWriter(client, "run")]).run(progress=False)
    calls = client.log_metric.call_args_list
    assert {call.args[1] for call in calls} <= PUBLIC
    assert all(call.args[0] == "run" and call.kwargs["timestamp"] == call.kwargs["step"] for call in calls)
