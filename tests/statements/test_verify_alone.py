"""A privacy officer verifies a run with numpy, scipy and dp-accounting alone, and never waits for torch."""

import json
import subprocess
import sys

import pytest
import torch

import equipoise as eq

ONLY = """
import importlib.util
import sys
from importlib.abc import MetaPathFinder

GONE = {gone!r}


class Gone(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in GONE:
            raise ImportError(name)


found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in GONE else found(name, package)
sys.meta_path.insert(0, Gone())
sys.argv[1:] = {words!r}
from {module} import main

sys.exit(main())
"""
OTHERS = ["torch", "typer", "rich", "matplotlib", "jinja2", "safetensors", "cryptography", "sklearn"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = torch.nn.Linear(2, 1)
    path = tmp_path_factory.mktemp("verified") / "run"
    eq.PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda model, x: model(x).square().mean(1),
        data=torch.randn(40, 2),
        sampling=eq.Poisson(8, 40, 2),
        method=eq.DPSGD(clip_norm=1.0),
        budget=eq.Budget(4.0, 1e-5),
        run=path,
    ).run(progress=False)
    return path


def verified(module, gone, *words):
    code = ONLY.format(gone=gone, module=module, words=[str(word) for word in words])
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("module", "gone", "before"),
    [
        ("equipoise.statements.verify", OTHERS, ()),
        ("equipoise.__main__", OTHERS, ("verify",)),
        ("equipoise.cli", ["torch"], ("verify",)),
    ],
)
def test_a_run_is_verified_without_torch(module, gone, before, folder, tmp_path):
    found = verified(module, gone, *before, folder, "--json")
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["consistent"]
    assert json.loads(found.stdout)["epsilon"] == eq.verify_run(folder).epsilon
    if gone is OTHERS and before:  # the way in that owners take
        edited = json.loads((folder / "statement.json").read_text()) | {"epsilon": 0.1}
        (tmp_path / "statement.json").write_text(json.dumps(edited))
        assert verified(module, gone, *before, tmp_path, "--json").returncode == 1
