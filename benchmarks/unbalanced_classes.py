"""Remedies for unbalanced classes under a clip norm: one digit against the nine others, at epsilon 1.

    OMP_NUM_THREADS=1 python benchmarks/unbalanced_classes.py   # three minutes, docs/how-to/unbalanced.md

Noise and draws follow the seed, so that a figure can be made again.
"""

from __future__ import annotations

import statistics
import warnings

import torch
from sklearn.datasets import load_digits
from sklearn.metrics import balanced_accuracy_score, roc_auc_score
from torch import Tensor, nn
from torch.nn import functional

import equipoise as eq

TRAIN, SEEDS = 1400, 7
SHARES = torch.tensor([0.9, 0.1])  # public
REMEDIES = {
    "nothing": {},
    "weights 1 and 9": {"weights": (1.0, 9.0)},
    "weights 1/9 and 1": {"weights": (1 / 9, 1.0)},
    "logits adjusted": {"adjusts": True},
    "1/9 and 1 after the clip": {"after": (1 / 9, 1.0)},
    "drawn at rates 1/9 and 1": {"rates": (1 / 9, 1.0)},
}
"""Weights of the classes in the loss, whether logits are adjusted, weights after the clip, and rates.

A record of the common class that is drawn is left out by a coin of its own: that is a Poisson draw at a ninth
of the rate, whose epsilon is that of the largest rate. Zeros are not changed by the clip.
"""


def scores(
    clip_norm: float,
    seed: int,
    *,
    weights: tuple[float, float] = (1.0, 1.0),
    adjusts: bool = False,
    after: tuple[float, float] | None = None,
    rates: tuple[float, float] | None = None,
) -> tuple[float, float]:
    """Balanced accuracy and AUC on the test records."""
    pixels, digits = (torch.from_numpy(one) for one in load_digits(return_X_y=True))
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    pixels, labels = pixels[order].float() / 16, (digits[order] == 8).long()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["x"]) + (SHARES.log() if adjusts else 0)
        losses = functional.cross_entropy(logits, batch["y"], reduction="none")
        if rates is not None:
            losses = losses * (torch.rand(len(losses)) < torch.tensor(rates)[batch["y"]])
        return losses * torch.tensor(weights)[batch["y"]]

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 2))
    training = eq.PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=1 / clip_norm),
        loss=loss,
        data=eq.Data(
            {"x": pixels[:TRAIN], "y": labels[:TRAIN]},
            weights=None if after is None else torch.tensor(after)[labels[:TRAIN]],
        ),
        sampling=eq.Poisson(expected_batch_size=200, population=TRAIN, steps=200),
        method=eq.DPSGD(clip_norm=clip_norm),
        budget=eq.Budget(1.0, 1e-5),
        run=eq.Run(seed=seed, reproducible=True),
    )
    training.run(progress=False, stop="return")
    with torch.no_grad():
        logits = model(pixels[TRAIN:])
    found, right = logits.argmax(1), labels[TRAIN:]
    return balanced_accuracy_score(right, found), roc_auc_score(right, logits[:, 1] - logits[:, 0])


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # the runs are reproducible, and not private
    for name, remedy in REMEDIES.items():
        for clip_norm in (0.3, 1.0):
            balanced, auc = zip(*(scores(clip_norm, seed, **remedy) for seed in range(SEEDS)), strict=True)
            print(
                f"{name:24} clip norm {clip_norm}: balanced accuracy {statistics.median(balanced):.1%} "
                f"({min(balanced):.1%} to {max(balanced):.1%}), AUC {statistics.median(auc):.1%}",
                flush=True,
            )
