"""The owner's screen says when clipping biases the coefficients of a model that is read for them."""

import io
import json
from types import SimpleNamespace

import pytest
from rich.console import Console

from equipoise.app.train import _say_if_clipped
from equipoise.training.folder.run_folder import RunFolder


@pytest.mark.parametrize(
    ("share", "model", "terminal", "speaks"),
    [
        (0.96, "logistic", True, True),
        (0.05, "logistic", True, False),
        (0.96, "mlp-tanh", True, False),
        (0.96, "logistic", False, False),  # what is private goes to a terminal alone
    ],
)
def test_it_is_said_on_a_screen_and_of_models_with_coefficients(tmp_path, share, model, terminal, speaks):
    folder = RunFolder(tmp_path)
    folder.diagnostics.parent.mkdir()
    rows = [{"step": step, "batch.gradient.clip_fraction": share} for step in range(30)] + [{"step": 30}]
    folder.diagnostics.write_text("\n".join(map(json.dumps, rows)))
    console = Console(file=io.StringIO(), force_terminal=terminal, width=300)
    _say_if_clipped(SimpleNamespace(settings=SimpleNamespace(model=model)), folder, console)
    assert ("clipped" in console.file.getvalue()) is speaks
