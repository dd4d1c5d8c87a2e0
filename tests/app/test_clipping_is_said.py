"""The owner's screen says when clipping biases the coefficients of a model that is read for them."""

import io
import json
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from equipoise.app.train import _say_if_clipped
from equipoise.training.folder.run_folder import RunFolder


def said(tmp_path, share, model="logistic", terminal=True, class_weights=(), user_rows=None):
    folder = RunFolder(tmp_path)
    folder.diagnostics.parent.mkdir()
    rows = [{"step": step, "batch.gradient.clip_fraction": share} for step in range(30)] + [{"step": 30}]
    folder.diagnostics.write_text("\n".join(map(json.dumps, rows)))
    schema = {"columns": {"age": {"type": "number"}, "job": {"type": "category"}, "id": {"type": "skip"}}}
    experiment = SimpleNamespace(
        settings=SimpleNamespace(model=model, class_weights=dict(class_weights), user_rows=user_rows),
        dataset=SimpleNamespace(schema=schema, task="classification"),
    )
    console = Console(file=io.StringIO(), force_terminal=terminal, width=300, highlight=False)
    _say_if_clipped(experiment, folder, console)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("given", "speaks"),
    [
        ({"share": 0.96}, True),
        ({"share": 0.05}, False),
        ({"share": 0.96, "model": "mlp-tanh"}, False),
        ({"share": 0.96, "terminal": False}, False),
    ],
)
def test_it_is_said_on_a_screen_and_of_models_with_coefficients(tmp_path, given, speaks):
    assert bool(said(tmp_path, **given)) is speaks


def test_the_clip_norm_that_is_offered_clips_nothing(tmp_path):
    bound = (2 * 3) ** 0.5
    assert "--clip-norm 2.45 " in said(tmp_path, 0.96)
    # the longest gradients there are: both columns at their ends, and probabilities that are all wrong
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        inputs = torch.cat(
            [torch.rand(1, generator=generator) * 2 - 1, torch.eye(3)[torch.randint(3, (1,))][0]]
        )
        weight = (50 * torch.randn(2, 4, generator=generator)).requires_grad_()
        bias = torch.zeros(2, requires_grad=True)
        loss = torch.nn.functional.cross_entropy((weight @ inputs + bias)[None], torch.tensor([0]))
        found = torch.autograd.grad(loss, [weight, bias])
        assert sum(part.square().sum() for part in found).sqrt() <= bound


@pytest.mark.parametrize(
    ("weights", "offered"), [({"yes": 5.0}, "12.3"), ({"yes": 0.5}, "2.45"), ({"yes": 900.0}, "2210")]
)
def test_class_weights_lengthen_the_gradients(tmp_path, weights, offered):
    """sqrt(6) times the largest weight, rounded up; the class that is not named has weight 1."""
    assert f"--clip-norm {offered} " in said(tmp_path, 0.96, class_weights=weights)


def test_no_bound_is_offered_for_the_sum_of_a_users_rows(tmp_path):
    assert "clips nothing" not in said(tmp_path, 0.96, user_rows="sum")
