"""Four small regressions on which clipping bias shows: with a perfect fit, and with three kinds of misfit.

N = 2000 records of d = 20 standard normal features, a solution of norm 2, start at zero, everything from
seed 0, in float64:

=========  ==================================================================================================
`interp`   least squares with exact labels: every record's gradient vanishes at the solution
`sym`      least squares, labels with normal noise of deviation 0.5
`skew`     least squares, labels with centred exponential noise of mean 1, last feature 1 (an intercept)
`log`      logistic regression with lambda = 0.1 inside every record's loss
=========  ==================================================================================================

The error is ||x - x*||, x* the minimiser of the mean loss over the records. Where gradients are clipped far
below their size, training comes to rest at x_u instead, a zero of the mean of the *directions* of the
gradients: `directions_rest` finds it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from reproduction.harness import Problem

__all__ = ["NAMES", "POPULATION", "directions_rest", "regression"]

NAMES = ("interp", "sym", "skew", "log")
POPULATION, FEATURES, RIDGE = 2000, 20, 0.1


class Regression(nn.Module):
    """A linear map to one number, from zero, in float64."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, features, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """[B, d] to [B]."""
        return F.linear(x, self.weight).squeeze(1)


def _least_squares(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return 0.5 * (model(batch["x"]) - batch["y"]) ** 2


def _logistic(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores = model(batch["x"])
    assert isinstance(model.weight, Tensor)
    # The penalty belongs to every record's loss, and so to the gradient that is clipped.
    return F.softplus(-batch["y"] * scores) + RIDGE / 2 * model.weight.square().sum()


def regression(name: str) -> Problem:
    """The problem of this name.

    Args:
        name: of `NAMES`.

    Raises:
        ValueError: another name.

    Example:
        >>> problem = regression("interp")
        >>> problem.population, round(problem.error(problem.make_model()), 6)
        (2000, 2.0)
    """
    if name not in NAMES:
        raise ValueError(f"name={name!r}: the regressions are {', '.join(NAMES)}")
    rng = np.random.default_rng(0)
    features = rng.standard_normal((POPULATION, FEATURES))
    if name == "skew":
        features[:, -1] = 1.0
    truth = rng.standard_normal(FEATURES)
    truth *= 2 / np.linalg.norm(truth)
    x, y = torch.from_numpy(features), torch.from_numpy(features @ truth)
    loss: Callable[[nn.Module, dict[str, Tensor]], Tensor] = _least_squares
    if name == "sym":
        y = y + 0.5 * torch.from_numpy(rng.standard_normal(POPULATION))
    elif name == "skew":
        y = y + torch.from_numpy(rng.exponential(1.0, POPULATION) - 1.0)
    elif name == "log":
        chance = 1 / (1 + torch.exp(-y))
        y = torch.where(torch.from_numpy(rng.random(POPULATION)) < chance, 1.0, -1.0).double()
        loss = _logistic
    data = {"x": x, "y": y}
    solution = torch.from_numpy(truth) if name == "interp" else _root(lambda w: _rows(name, data, w).mean(0))

    def error(model: nn.Module) -> float:
        assert isinstance(model.weight, Tensor)
        return float((model.weight.detach()[0] - solution).norm())

    return Problem(name, lambda: Regression(FEATURES), loss, data, POPULATION, error)


def directions_rest(name: str) -> float:
    """||x_u - x*||, x_u a zero of the mean of g_i(x) / ||g_i(x)||: where very small clip norms come to rest.

    Example:
        >>> directions_rest("skew") > 0.2
        True
    """
    problem = regression(name)
    data = dict(problem.data)

    w = torch.zeros(FEATURES, dtype=torch.float64)
    for k in range(4000):  # steps that shrink: the field jumps wherever a record's gradient vanishes
        rows = _rows(name, data, w)
        w -= 0.5 * 0.998**k * (rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-12)).mean(0)
    model = Regression(FEATURES)
    with torch.no_grad():
        model.weight.copy_(w[None])
    return problem.error(model)


def _rows(name: str, data: dict[str, Tensor], w: Tensor) -> Tensor:
    """The gradients of all records, [N, d]."""
    x, y = data["x"], data["y"]
    if name == "log":
        return -(torch.sigmoid(-y * (x @ w)) * y)[:, None] * x + RIDGE * w
    return (x @ w - y)[:, None] * x


def _root(function: Callable[[Tensor], Tensor]) -> Tensor:
    """The zero of the gradient of a convex loss, by Newton steps from zero."""
    w = torch.zeros(FEATURES, dtype=torch.float64)
    for _ in range(50):
        step = torch.linalg.solve(torch.func.jacfwd(function)(w), function(w))
        w = w - step
        if float(step.norm()) < 1e-13:
            break
    return w
