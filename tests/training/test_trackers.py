"""Writers for experiment trackers get publishable numbers, and no times of steps."""

from __future__ import annotations

import json
import os
import sys
from types import ModuleType
from unittest.mock import MagicMock

import pytest
from small_problems import training

from equipoise.report import RunFolderError
from equipoise.training import MLflowWriter, TensorBoardWriter, WandbWriter
from equipoise.training.metrics import rewind_jsonl

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


def test_wandb_and_mlflow_get_the_publishable_numbers_of_each_step():
    run, client = MagicMock(), MagicMock()
    writers = [WandbWriter(run), MLflowWriter(client, "run")]
    training(steps=2, writers=writers).run(
        lambda model: {"score": 1.0, "other": float("nan")}, progress=False
    )
    rows = [(call.kwargs["step"], call.args[0]) for call in run.log.call_args_list]
    assert {step for step, _ in rows} == {1, 2}
    assert (2, {"evaluation.score": 1.0}) in rows
    calls = client.log_metric.call_args_list
    names = {name for _, values in rows for name in values} | {call.args[1] for call in calls}
    assert names <= PUBLIC | {"evaluation.score"}
    assert all(call.args[0] == "run" and call.kwargs["timestamp"] == call.kwargs["step"] for call in calls)


@pytest.mark.parametrize(("step", "cut"), [(0, ""), (3, '{"step": 10, "eps'), (9, "\n"), (99, "")])
def test_rows_of_steps_to_be_repeated_are_cut_off(tmp_path, step, cut):
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": k // 2, "learning_rate": 0.1} for k in range(2, 20)]  # a step has two rows
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + cut)
    path.chmod(0o644)
    rewind_jsonl(path, step, mode=0o600)
    left = [json.loads(line) for line in path.read_text().splitlines()]
    assert left == [row for row in rows if row["step"] <= step]
    assert path.stat().st_mode & 0o777 == 0o600
    rewind_jsonl(path, 0, mode=0o600)
    rewind_jsonl(path, 0, mode=0o600)  # of an empty file, too
    assert path.read_text() == ""
    rewind_jsonl(tmp_path / "absent", 0, mode=0o600)
    assert not (tmp_path / "absent").exists()


def test_a_pipe_in_the_place_of_rows_is_refused(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(RunFolderError, match="no regular file"):
        rewind_jsonl(tmp_path / "metrics.jsonl", 3, mode=0o600)
