"""A loss per record in bfloat16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from equipoise.gradients.engine_inputs import Loss


def in_bfloat16(loss: Loss, device: torch.device) -> Loss:
    """The loss under autocast: a function, since what a function holds can be copied and looked at."""

    def loss_in_bfloat16(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return loss(model, batch)

    return loss_in_bfloat16
