"""The fit of `ContrastiveNet` on drawn pictures, whose weights come with the package.

    python -m benchmarks.contrastive --channels 1 --output grey.safetensors
    python -m benchmarks.contrastive --channels 3 --output colour.safetensors

take 17 and 28 minutes of one core. Other machines round otherwise and end at slightly other weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from equipoise.data.features.contrastive import ContrastiveNet
from equipoise.data.features.drawings import draw_pictures, random_views

_SIZES = {1: 28, 3: 32}
_BATCH, _TEMPERATURE, _RATE = 256, 0.2, 2e-3


def fit_contrastive(
    channels: int,
    *,
    steps: int = 1500,
    seed: int = 0,
    pictures: int = 40_000,
    progress: Callable[[int, float], None] = lambda step, loss: None,
) -> ContrastiveNet:
    """Train it on drawings.

    A step takes 256 of them and two views of each. The loss is the cross-entropy of finding a view's partner
    among the 511 other views, by the cosine of their outputs over 0.2.

    Args:
        channels: 1, of drawings of 28 x 28, or 3, of 32 x 32.
        steps: of Adam with decoupled weight decay; the rate rises and falls once over them.
        seed: public; of weights, views and order. torch's global generator is as before afterwards.
        pictures: how many are drawn.
        progress: called with (step, loss) after each step.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net, size = ContrastiveNet(channels), _SIZES[channels]
        head = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64))
        optimizer = torch.optim.AdamW([*net.parameters(), *head.parameters()], lr=_RATE, weight_decay=1e-4)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=steps, pct_start=0.1)
        drawings = draw_pictures(pictures, (channels, size, size), seed=7)
        partners = torch.cat([torch.arange(_BATCH, 2 * _BATCH), torch.arange(_BATCH)])
        for step in range(1, steps + 1):
            drawn = drawings[torch.randint(len(drawings), (_BATCH,))]
            both = torch.cat([random_views(drawn), random_views(drawn)])
            outputs = F.normalize(head(net.maps(both)[-1].mean((2, 3))), dim=1)
            alike = outputs @ outputs.T / _TEMPERATURE
            loss = F.cross_entropy(alike.fill_diagonal_(-1e9), partners)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            progress(step, loss.item())
    return net


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--channels", type=int, choices=_SIZES, required=True)
    parser.add_argument("--output", type=Path, required=True, help="file for the weights, as float16")
    parser.add_argument("--steps", type=int, default=1500)
    given = parser.parse_args()

    def show(step: int, loss: float) -> None:
        if step % 50 == 0:
            print(f"step {step}: loss {loss:.3f}", flush=True)

    net = fit_contrastive(given.channels, steps=given.steps, progress=show)
    save_file({key: value.half().contiguous() for key, value in net.state_dict().items()}, given.output)


if __name__ == "__main__":
    main()
