"""The script for a GPU runs to its end where there is none, in small."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "on_device.sh"


@pytest.mark.wide
def test_each_part_leaves_its_result(tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([SCRIPT, tmp_path], check=True, env=environment, stdout=subprocess.DEVNULL)
    assert "passed" in (tmp_path / "tests.txt").read_text()
    assert "mlp-16" in (tmp_path / "step.txt").read_text()
    assert "ours-training" in (tmp_path / "compared.txt").read_text()
    assert (tmp_path / "jax.txt").read_text()
    assert (tmp_path / "run" / "statement.json").is_file()
