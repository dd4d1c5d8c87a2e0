"""The problems of the experiment on RMS-adaptive clipping: regressions with a known least loss."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from reproduction.harness import Problem

__all__ = ["DIRECTIONS", "POPULATION", "least_squares", "separable"]

DIRECTIONS, POPULATION = 20, 2000


class Line(nn.Module):
    """A linear map to one number, from zero, in float64."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, dtype=torch.float64))


def _squares(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return 0.5 * (batch["x"] @ model.weight - batch["y"]).square()


def _drawn(seed: int, population: int) -> tuple[torch.Generator, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    z = torch.randn(population, DIRECTIONS, generator=rng, dtype=torch.float64) / math.sqrt(DIRECTIONS)
    w = torch.randn(DIRECTIONS, generator=rng, dtype=torch.float64)
    return rng, z, w * math.sqrt(DIRECTIONS) / w.norm()


def least_squares(
    seed: int,
    population: int = POPULATION,
    noise: float = 0.0,
    active: float = 1.0,
    slow: int = 0,
) -> Problem:
    """The regression of the module docstring.

    Args:
        seed: of records and solution.
        population: N.
        noise: deviation of the labels.
        active: share of the records that are not zero.
        slow: further directions, which share a thousandth of the energy.
    """
    rng, z, w = _drawn(seed, population)
    y = z @ w + noise * torch.randn(population, generator=rng, dtype=torch.float64)
    if active < 1:
        kept = (torch.arange(population) < active * population).double()
        z, y = z * kept[:, None], y * kept
    if slow:
        small = torch.randn(population, slow, generator=rng, dtype=torch.float64) * math.sqrt(1e-3 / slow)
        z, y = torch.cat([math.sqrt(1 - 1e-3) * z, small], dim=1), math.sqrt(1 - 1e-3) * y
    least = 0.0
    if noise:
        best = torch.linalg.lstsq(z, y[:, None]).solution[:, 0]
        least = float(0.5 * (z @ best - y).square().mean())

    def error(model: Any) -> float:
        return float(0.5 * (z @ model.weight.detach() - y).square().mean()) - least

    return Problem("least squares", lambda: Line(z.shape[1]), _squares, {"x": z, "y": y}, population, error)


def separable(seed: int) -> Problem:
    """Logistic regression whose labels are the signs of a linear map."""
    _, z, w = _drawn(seed, POPULATION)
    y = torch.sign(z @ w)

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        return F.softplus(-batch["y"] * (batch["x"] @ model.weight))

    def error(model: Any) -> float:
        return float(F.softplus(-y * (z @ model.weight.detach())).mean())

    return Problem("separable", lambda: Line(DIRECTIONS), loss, {"x": z, "y": y}, POPULATION, error)
