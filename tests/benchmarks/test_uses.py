"""The scripts of the eight uses can be read, and one of them trains on made-up files."""

import gzip
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

USES = Path(__file__).parents[2] / "benchmarks" / "uses"
OPTIONAL = {"lightning", "opacus", "pandas", "transformers"}
SIDE, RECORDS = 28, 300


def load(path):
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        if str(error.name).split(".")[0] not in OPTIONAL:
            raise
        pytest.skip(f"needs {error.name}")
    return module


@pytest.mark.parametrize(
    "path", sorted(USES.glob("*/*.py")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_a_script_can_be_read(path):
    assert callable(load(path).main)


def write_images(folder, part, rng):
    """Files of MNIST's form: the upper half is bright in one class, the lower half in the other."""
    labels = rng.integers(0, 2, RECORDS).astype(np.uint8)
    pixels = rng.integers(0, 60, (RECORDS, SIDE, SIDE)).astype(np.uint8)
    pixels[labels == 0, : SIDE // 2] += 150
    pixels[labels == 1, SIDE // 2 :] += 150
    for name, head, content in (("images-idx3", 16, pixels), ("labels-idx1", 8, labels)):
        data = gzip.compress(bytes(head) + content.tobytes())
        (folder / f"{part}-{name}-ubyte.gz").write_bytes(data)


@pytest.mark.filterwarnings("ignore:population=60000 is more than")  # as many as MNIST has
@pytest.mark.parametrize("kind", ["plain", "with_equipoise"])
def test_a_method_of_ones_own_trains(kind, tmp_path, monkeypatch, capsys):
    rng = np.random.default_rng(0)
    for part in ("train", "t10k"):
        write_images(tmp_path, part, rng)
    module = load(USES / "own_method" / f"{kind}.py")
    monkeypatch.setattr(module, "BATCH", {"plain": 30, "with_equipoise": 6000}[kind])
    monkeypatch.setattr(module, "RATE", 0.01)
    module.main(tmp_path)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["accuracy"] > 0.8
    if kind == "with_equipoise":
        assert 2.9 < found["epsilon"] <= 3
