"""The way of a step through the package gets no longer unnoticed; benchmarks/step_path.py has the limits."""

import importlib.util
import sys
from pathlib import Path


def test_a_step_passes_no_more_files_and_calls_than_it_did(monkeypatch):
    script = Path(__file__).parents[2] / "benchmarks/step_path.py"
    spec = importlib.util.spec_from_file_location("step_path", script)
    step_path = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "step_path", step_path)
    spec.loader.exec_module(step_path)
    calls = step_path.third_step([]).without_accounting()
    assert len({file for file, _ in calls}) <= step_path.FILES
    assert 100 < sum(calls.values()) <= step_path.CALLS
