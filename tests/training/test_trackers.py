"""What a run tells writers, and what a step costs: limits of benchmarks/step_path.py and host_waits.py."""

import importlib.util
import json
import sys
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from small_problems import network, parameters, resumed, training
from torch import nn

import equipoise as eq
from equipoise.statements.assumptions import Assumption
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


def benchmark(name, monkeypatch):
    script = Path(__file__).parents[2] / f"benchmarks/{name}.py"
    spec = importlib.util.spec_from_file_location(name, script)
    found = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, found)
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec.loader.exec_module(found)
    return found


def test_a_step_on_a_device_waits_and_launches_no_more_than_it_did(monkeypatch, tmp_path):
    host_waits = benchmark("host_waits", monkeypatch)
    waits, _, launches = host_waits.of_a_step(host_waits.REGIMES["mlp"](), tmp_path / "run")
    assert waits.total() == host_waits.WAITS
    assert launches <= host_waits.LAUNCHES


def test_a_step_passes_no_more_files_and_calls_than_it_did(monkeypatch):
    step_path = benchmark("step_path", monkeypatch)
    calls = step_path.third_step([]).without_accounting()
    assert len({file for file, _ in calls}) <= step_path.FILES
    assert 100 < sum(calls.values()) <= step_path.CALLS


#: Of a loss that holds something unseen, so that it is compared: with random numbers under 64 seeds.
FORWARDS, RECORDS = 480, 4700


class Shifted(nn.Module):
    def forward(self, x):
        return x + torch.rand(len(x), 1)


def test_a_start_runs_the_model_no_more_often_than_it_did():
    model = nn.Sequential(nn.Linear(4, 8), Shifted(), nn.Linear(8, 2))
    runs: SimpleQueue[int] = SimpleQueue()  # a list would be put back

    def loss(model, batch):
        runs.put(len(batch["y"]))
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")

    data = {"x": torch.randn(64, 4), "y": torch.randint(0, 2, (64,))}
    training(model, loss=loss, data=data, microbatch_size=14, sampling=eq.FullBatch(64, 10))
    found = [runs.get() for _ in range(runs.qsize())]
    assert len(found) <= FORWARDS, (len(found), sum(found))
    assert sum(found) <= RECORDS, sum(found)


@pytest.mark.slow  # a compiler runs
def test_a_compiled_step_is_a_step(tmp_path):
    plain, compiled = network(), network()
    training(plain, steps=3).run(progress=False)
    run = training(compiled, steps=3, compile=True, folder=tmp_path / "run")
    assert run.describe().compile_seconds > 0
    result = run.run(progress=False)
    assert torch.allclose(parameters(compiled), parameters(plain), atol=1e-5)
    assert Assumption.COMPILED in result.statement.assumptions
    assert result.statement.independence["model"].startswith("proved")
