"""What the command line trains and reports: the loss of a classifier, its classes and their accuracy."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.data import Records

__all__ = ["accuracy", "cross_entropy", "predictions"]


def cross_entropy(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy of every record, ``[B]``."""
    return F.cross_entropy(model(batch["input"]), batch["label"], reduction="none")


def accuracy(model: nn.Module, records: Records, chunk: int = 256) -> float:
    """The share of records whose label the model gives the highest score."""
    return float((predictions(model, records, chunk) == records.fields["label"]).double().mean())


@torch.no_grad()
def predictions(model: nn.Module, records: Records, chunk: int = 256) -> Tensor:
    """The class with the highest score for every record, int64 ``[n]``."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    inputs = records.fields["input"]
    parts = [
        model(inputs[start : start + chunk].to(device)).argmax(1).cpu()
        for start in range(0, len(records), chunk)
    ]
    model.train(was_training)
    return torch.cat(parts)
