"""Linear models by one release of noised sufficient statistics: no steps, no clipping.

With x the inputs of a row, a 1 before them, |x| <= R, its target t in [-1, 1] and its weight w in [0, 1],

    M = sum w x x^T,   c = sum w t x,   q = sum w t^2,   theta = M^(-1) c

is weighted least squares. M, c and q are the gradient of a loss that is linear in parameters (S, v, u):

    loss = -w (a x^T S x / R^2 + b t v.x / R + d t^2 u),      a^2 + b^2 + d^2 = 1

So one full batch of DP-SGD at clip norm 1 and learning rate 1 turns the parameters into the noised
statistics, with the ledger, statement and folder of any run. A row's gradient has the length

    w (a^2 |x|^4 / R^4 + b^2 t^2 |x|^2 / R^2 + d^2 t^4)^(1/2) <= 1

and nothing is clipped. All entries of M get noise, and symmetrising it is the symmetric Gaussian mechanism of
Dwork et al. 2014 ("Analyze Gauss"). With s and r the noise of an entry of M and of c, eigenvalues of M below
s k^(1/2), for k inputs, are raised to that: smaller ones cannot be told from noise.

**Two classes** are t = -1 and t = 1, and the logit is 2 theta.x: the minimum of the second-order expansion of
the logistic loss at 0. It ranks as least squares do. Probabilities near 0 and 1 and large coefficients are
drawn to the middle, at any epsilon.

**Intervals.** The noise E of M and e of c is independent of the rows and known, so by the delta method

    theta_hat - theta ~ N(0, M^(-1) V M^(-1))
    V = sigma^2 M + r^2 I + (s^2 / 2) (|theta|^2 I + theta theta^T)

where sigma^2 = (q - c.theta) / n takes all errors to be of one size, and the last part is the covariance of
E theta: symmetrised, E's entries have variance s^2 on the diagonal and s^2 / 2 beside it. There |theta_hat|^2
is taken less what noise adds to it.

`statistics-by-groups` puts each row into one of 10 disjoint groups, whose statistics leave in one release.
The scores g_j = M^(-1) (c_j - M_j theta) differ by errors and noise alone: 10/9 sum_j (g_j - g)(g_j - g)^T
estimates the covariance whatever the errors are, for a t distribution with 9 degrees of freedom. Noise of all
groups together is 10^(1/2) times as large.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.data.records import WEIGHT

GROUPS = 10
GROUP = "group"
"""The field of training records that says which group they are in."""
PARTS = (0.8**0.5, 0.18**0.5, 0.02**0.5)
"""a, b and d: what M, c and q have of a row's length."""


class SufficientStatistics(nn.Module):
    """Noised statistics, and the linear model that follows from them.

    Args:
        design: [1 + inputs, k], public; a row times it, with a 1 before it, is x.
        bound: R, public: no x is longer.
        population: the public number of rows.
        classes: of a classification, 2; 1 of a regression.
        groups: of rows.

    Example:
        >>> rows = torch.tensor([[-1.0], [0.0], [1.0]])
        >>> model = SufficientStatistics(torch.eye(2), bound=2.0**0.5, population=3)
        >>> statistics_loss(model, {"input": rows, "target": 0.5 * rows[:, 0] - 0.1}).sum().backward()
        >>> for one in model.parameters():
        ...     one.data = -one.grad / 3
        >>> [round(float(number), 3) for number in model.coefficients()]
        [-0.1, 0.5]
    """

    design: Tensor
    bound: Tensor
    noise: Tensor
    population: Tensor

    def __init__(
        self, design: Tensor, bound: float, population: int, classes: int = 1, groups: int = 1
    ) -> None:
        super().__init__()
        size = design.shape[1]
        self.classes, self.groups = classes, groups
        self.second = nn.Parameter(torch.zeros(groups * size, size))
        self.cross = nn.Parameter(torch.zeros(groups, size))
        self.square = nn.Parameter(torch.zeros(groups, 1))
        self.register_buffer("design", design)
        # public numbers: with them the file is enough for intervals
        self.register_buffer("bound", torch.tensor(bound, dtype=torch.double))
        self.register_buffer("population", torch.tensor(population))
        self.register_buffer("noise", torch.zeros((), dtype=torch.double))

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], classes: int) -> SufficientStatistics:
        """The model that was saved with these tensors."""
        population, groups = int(weights["population"]), len(weights["cross"])
        model = cls(weights["design"], float(weights["bound"]), population, classes, groups)
        model.load_state_dict(dict(weights))
        return model

    def inputs(self, rows: Tensor) -> Tensor:
        """x, [B, k]."""
        return F.linear(F.pad(rows.flatten(1), (1, 0), value=1.0), self.design.t())

    def forward(self, rows: Tensor) -> Tensor:
        """``[B, inputs]`` -> ``[B, 1]``, or logits ``[B, 2]``."""
        found = (self.inputs(rows).double() @ self.coefficients()).to(rows.dtype).unsqueeze(1)
        return torch.cat([-found, found], 1) if self.classes == 2 else found

    def sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """M [groups, k, k], c [groups, k] and q [groups], with their noise."""
        size, rows = self.design.shape[1], self.population.double()
        second = self.second.detach().double().view(self.groups, size, size)
        second = (second + second.mT) / 2 * (rows * self.bound**2 / PARTS[0])
        cross = self.cross.detach().double() * (rows * self.bound / PARTS[1])
        return second, cross, self.square.detach().double()[:, 0] * rows / PARTS[2]

    def inverse(self) -> Tensor:
        """M^(-1), [k, k], of all groups together, its eigenvalues raised to the size of the noise."""
        values, vectors = torch.linalg.eigh(self.sums()[0].sum(0))
        least = self.noise_of_sums()[0] * math.sqrt(len(values))
        rounding = 1e-6 * float(values[-1])  # of parameters in 32 bits
        return (vectors / values.clamp(min=max(least, rounding, 1e-30))) @ vectors.t()

    def noise_of_sums(self) -> tuple[float, float]:
        """s and r, the standard deviations of the noise in M and c of all groups together."""
        of_one = float(self.noise) * float(self.population) * math.sqrt(self.groups)
        return of_one * float(self.bound) ** 2 / PARTS[0], of_one * float(self.bound) / PARTS[1]

    def coefficients(self) -> Tensor:
        """theta, [k]."""
        return self.inverse() @ self.sums()[1].sum(0)

    def covariance(self) -> tuple[Tensor, float]:
        """The covariance of theta, [k, k], and the degrees of freedom: infinite for one group."""
        (second, cross, square), inverse, theta = self.sums(), self.inverse(), self.coefficients()
        if self.groups > 1:
            scores = (cross - second @ theta) @ inverse
            scores = scores - scores.mean(0)
            return scores.t() @ scores * (self.groups / (self.groups - 1)), self.groups - 1.0
        (s, r), size = self.noise_of_sums(), len(theta)
        rows = second[0, 0, 0].clamp(min=size + 1.0)
        error = ((square[0] - cross[0] @ theta) / rows).clamp(min=0.0)
        middle = error * torch.linalg.inv(inverse) + r**2 * torch.eye(size, dtype=theta.dtype)
        length = theta @ theta
        # noise alone makes theta_hat longer than theta
        kept = (1 - (inverse @ middle @ inverse).trace() / length).clamp(min=0.0)
        middle += kept * s**2 / 2 * (length * torch.eye(size, dtype=theta.dtype) + torch.outer(theta, theta))
        return inverse @ middle @ inverse, math.inf


def statistics_loss(model: SufficientStatistics, batch: dict[str, Tensor]) -> Tensor:
    """The loss whose gradient is the row's part of the statistics, ``[B]``."""
    x = model.inputs(batch["input"]) / model.bound.to(batch["input"].dtype)
    t = batch["target"].unsqueeze(1) if model.classes == 1 else 2.0 * batch["label"].unsqueeze(1) - 1.0
    t = t.to(x.dtype)
    ones = torch.ones_like(t) if model.groups == 1 else F.one_hot(batch[GROUP], model.groups).to(x.dtype)
    seconds = (F.linear(x, model.second).view(len(x), model.groups, -1) * x.unsqueeze(1)).sum(2)
    a, b, d = PARTS
    parts = a * seconds + b * t * F.linear(x, model.cross) + d * F.linear(t.square(), model.square)
    losses = -(parts * ones).sum(1)
    return losses * batch[WEIGHT] if WEIGHT in batch else losses
