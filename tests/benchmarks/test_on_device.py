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
    ended = [line.split()[:4] for line in (tmp_path / "parts.txt").read_text().splitlines()]
    names = ("tests", "step", "compared", "training")
    assert [part for part in ended if part[0] in names] == [[name, "ended", "with", "0"] for name in names]
    assert (tmp_path / "jax.txt").read_text()  # its row, or that it is not installed
    assert "mlp-16" in (tmp_path / "step.txt").read_text()
    assert "ours-training" in (tmp_path / "compared.txt").read_text()
