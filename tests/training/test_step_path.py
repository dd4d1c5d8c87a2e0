"""A step gets no longer unnoticed; the limits are those of benchmarks/step_path.py and host_waits.py."""

import importlib.util
import sys
from pathlib import Path


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
