"""Writers for experiment trackers get publishable numbers, and no times of steps."""

import json

import pytest
from small_problems import resumed, training

from equipoise.training import Events, TensorBoardWriter
from equipoise.training.metrics import rewind_jsonl

PUBLIC = {"learning_rate", "clip_norm", "noise_std", "noise_norm", "released_norm", "epsilon"}


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


@pytest.mark.parametrize(("step", "cut"), [(3, '{"step": 10, "eps'), (9, "\n")])
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


def test_an_operator_is_told_what_happens_and_why(tmp_path):
    """Each event once and in order, with what decides."""
    told = []
    run = training(folder=tmp_path / "run", steps=4, writers=[Events(told.append)])
    for _ in range(2):
        run.take_step()
    run.save_checkpoint()
    run.close()
    again = resumed(tmp_path / "run", writers=[Events(told.append)])
    again.run(lambda model: 0.5, progress=False, evaluate_every=4, checkpoint_every=4, patience=3)
    kinds = [(event["event"], event["step"]) for event in told if event["event"] != "progress"]
    assert kinds == [("start", 0), ("checkpoint", 2), ("resume", 2), ("checkpoint", 4), ("finish", 4)]
    assert all(event["steps"] == 4 and event["time"].endswith("+00:00") for event in told if "steps" in event)
    progress = [event for event in told if event["event"] == "progress"]
    assert [event["step"] for event in progress] == [1, 2, 3, 4, 4, 4]
    assert progress[-2]["evaluation.score"] == 0.5
    assert told[-1]["reason"] == "all steps"
    assert told[-1]["epsilon"] == again.statement().epsilon
