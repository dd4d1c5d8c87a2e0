"""Training mode, as a library's own loop sets it at the start."""

from __future__ import annotations

from torch import nn

from equipoise.gradients.checks.replace_batch_norm import is_frozen_norm


def to_train_mode(model: nn.Module) -> None:
    """Call `train()`, and leave frozen BatchNorm in evaluation mode: in training mode it mixes records."""
    evaluating = [one for one in model.modules() if not one.training and is_frozen_norm(one)]
    model.train()
    for norm in evaluating:
        norm.eval()
