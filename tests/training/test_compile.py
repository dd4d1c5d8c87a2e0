"""Kernels of `torch.compile` in a step: the same steps but for rounding, stated, resumed to the bit."""

import pytest
import torch
from small_problems import network, parameters, training

from equipoise.statements.assumptions import Assumption

pytestmark = pytest.mark.slow  # a compiler runs


def test_a_compiled_step_is_a_step(tmp_path):
    plain, compiled = network(), network()
    training(plain, steps=3).run(progress=False)
    run = training(compiled, steps=3, compile=True, folder=tmp_path / "run")
    assert run.describe().compile_seconds > 0
    result = run.run(progress=False)
    assert torch.allclose(parameters(compiled), parameters(plain), atol=1e-5)
    assert Assumption.COMPILED in result.statement.assumptions
    assert result.statement.independence["model"].startswith("proved")


def test_a_compiler_that_is_missing_is_named(monkeypatch):
    def fails(*args, **options):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", fails)
    with pytest.raises(ValueError, match=r"compile=True.* C\+\+ compiler"):
        training(network(), compile=True)


def test_a_model_that_runs_eagerly_is_not_compiled(monkeypatch):
    monkeypatch.setenv("EQUIPOISE_EAGER", "1")
    assert training(network(), compile=True).describe().compile_seconds == 0
