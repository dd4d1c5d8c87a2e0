"""The container's smoke test where a container would run it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import equipoise

ROOT = Path(__file__).parents[2]
SMOKE = ROOT / "examples" / "container" / "smoke.sh"

# Everything becomes read-only but for the run folder and 8 MB of temporary files; no network, no variables.
SEALED = """
set -e
mount --bind "$1" "$1"
mount -t tmpfs -o size=8m tmpfs "$2"
mount -o remount,bind,ro /
if touch "$4" 2>/dev/null; then exit 99; fi
cd /
exec env -i PATH="$3:/usr/bin:/bin" PYTHONPATH="$5" TMPDIR="$2" OMP_NUM_THREADS=1 sh "$4" "$1/run"
"""


def test_it_trains_verifies_and_predicts_in_a_sealed_place(tmp_path):
    out, small = tmp_path / "out", tmp_path / "small"
    out.mkdir()
    small.mkdir()
    programs = Path(sys.executable).parent
    seal = ["unshare", "-rnm", "sh", "-c", SEALED, "sh"]
    if not shutil.which("unshare") or subprocess.run(["unshare", "-rnm", "true"], check=False).returncode:
        pytest.skip("this machine gives no namespaces of one's own")
    if not (programs / "equipoise").exists():
        pytest.skip("the command is not installed beside this Python")
    sources = str(Path(equipoise.__file__).parents[1])
    given = [str(out), str(small), str(programs), str(SMOKE), sources]
    found = subprocess.run(seal + given, capture_output=True, text=True, timeout=300, env=dict(os.environ))
    assert found.returncode == 0, found.stdout + found.stderr
    events = [json.loads(line) for line in (out / "run" / "events.jsonl").read_text().splitlines()]
    assert [event.get("event") for event in events if event.get("event") != "progress"][-2:] == [
        "finish",
        None,
    ]
    assert "consistent" in found.stdout
    assert (out / "run" / "predicted.csv").stat().st_size
