"""Scripts of the bench run to their end, in small."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import source_sizes

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_runs_that_are_killed_at_random_moments_end_alike_in_every_place():
    command = [sys.executable, BENCHMARKS / "kills.py", "--runs", "2", "1", "1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("kills") == 3


def test_each_part_of_the_script_for_a_device_leaves_its_result(tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(
        [BENCHMARKS / "on_device.sh", tmp_path], check=True, env=environment, stdout=subprocess.DEVNULL
    )
    ended = [line.split()[:4] for line in (tmp_path / "parts.txt").read_text().splitlines()]
    names = ("tests", "graphs", "step", "compared", "training")
    assert [part for part in ended if part[0] in names] == [[name, "ended", "with", "0"] for name in names]
    assert (tmp_path / "jax.txt").read_text()  # its row, or that it is not installed
    assert "mlp-16" in (tmp_path / "step.txt").read_text()
    assert "ours-training" in (tmp_path / "compared.txt").read_text()


def test_each_number_of_the_core_says_where_it_comes_from():
    assert source_sizes.unexplained() == []
