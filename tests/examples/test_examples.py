"""The examples run as they stand."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str):
    specification = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_gpt2_with_adapters():
    pytest.importorskip("transformers", reason="needs the extra hf")
    pytest.importorskip("peft", reason="needs the extra hf")
    example = load("hf_gpt2_lora")
    statement = example.main(steps=4)
    assert statement.guarantee == "proven"
    assert 7.9 < statement.epsilon <= 8.0
    assert statement.releases[0]["used"] == 4
