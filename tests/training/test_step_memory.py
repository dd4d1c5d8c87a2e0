"""The sums of micro-batches are added as they come: a step's memory does not grow with their number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.wide
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux' /proc")
def test_a_step_of_64_micro_batches_takes_five_copies_of_the_parameters(tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment["MALLOC_MMAP_THRESHOLD_"] = "65536"  # freed blocks go back at once: what it keeps varies
    script = Path(__file__).with_name("step_memory.py")
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert found["size"] == 2  # 64 micro-batches
    assert found["peak"] <= 5 * found["parameters"], found["peak"] / found["parameters"]
