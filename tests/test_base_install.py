"""What needs no extra, what a missing one says, and what is declared."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from equipoise._extras import _EXTRAS

ROOT = Path(__file__).parents[1]
GONE = """
import importlib.util
import sys
from importlib.abc import MetaPathFinder

GONE = {gone!r}


class Gone(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in GONE:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: (
    None if name.split(".")[0] in GONE else found(name, package)
)
sys.meta_path.insert(0, Gone())
"""
ALL = {module for modules in _EXTRAS.values() for module in modules}


def without(gone, code, *words, cwd):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    code = GONE.format(gone=set(gone)) + code
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=300)


def test_the_python_of_readme_trains_without_any_extra(tmp_path):
    code = (ROOT / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    found = without(ALL, code, cwd=tmp_path)
    assert found.returncode == 0, found.stderr[-2000:]
    assert "accuracy 9" in found.stdout


@pytest.mark.parametrize("gone", [ALL, ["sklearn"]])
def test_a_command_without_its_extra_says_the_one_line_to_install_before_it_begins(gone, tmp_path):
    code = "from equipoise.__main__ import main; sys.exit(main())"
    found = without(gone, code, "train", "--data", "digits", "--epochs", "1", cwd=tmp_path)
    assert found.returncode == 2, found.stdout + found.stderr
    assert "pip install 'PATH[cli]'" in found.stderr
    assert len(found.stderr.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.wide
@pytest.mark.parametrize(
    ("gone", "code", "extra"),
    [
        ("flwr", "import equipoise.federated.flower", "federated"),
        ("lightning", "import equipoise.integrations.lightning", "lightning"),
        ("transformers", "import equipoise.integrations.transformers", "hf"),
        (
            "tensorboard",
            "from equipoise.training import TensorBoardWriter; TensorBoardWriter('log')",
            "tensorboard",
        ),
    ],
)
def test_an_import_without_its_extra_says_which(gone, code, extra, tmp_path):
    found = without([gone], code, cwd=tmp_path)
    assert f"pip install 'PATH[{extra}]'" in found.stderr.splitlines()[-1]
