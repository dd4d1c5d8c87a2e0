"""A step gets no longer unnoticed; the limits are those of benchmarks/step_path.py and host_waits.py."""

import importlib.util
import sys
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from small_problems import network, parameters, training
from torch import nn

import equipoise as eq
from equipoise.statements.assumptions import Assumption


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


def test_a_compiler_that_is_missing_is_named(monkeypatch):
    def fails(*args, **options):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", fails)
    with pytest.raises(ValueError, match=r"compile=True.* C\+\+ compiler"):
        training(network(), compile=True)


def test_a_model_that_runs_eagerly_is_not_compiled(monkeypatch):
    monkeypatch.setenv("EQUIPOISE_EAGER", "1")
    assert training(network(), compile=True).describe().compile_seconds == 0
