"""The price of choosing the best of several private runs.

A search trains K times with settings drawn at random from a fixed list and keeps only the best run. If K is
itself drawn at random beforehand, and nothing of the other runs is used, the choice costs far less than K
runs. For K from a truncated negative binomial law of shape eta > -1 and parameter gamma,

    P[K = k]  ~  (1 - gamma)^k * prod_{l < k} (l + eta) / (l + 1),      k = 1, 2, ...

(eta = 1 geometric, eta = 0 logarithmic), and a run of Renyi divergence eps at order a and eps' at order a',
the search has

    eps + (1 + eta) (1 - 1/a') eps' + (1 + eta) log(1/gamma) / a' + log(E[K]) / (a - 1)

at order a; for a Poisson law of mean m (shape infinite, the search may come out empty) a bound of the kind
eps + m delta' + log(m) / (a - 1) holds. Source: N. Papernot and T. Steinke 2022, "Hyperparameter Tuning with
Renyi Differential Privacy", theorems 2 and 6; computed by dp-accounting.

Both eps and eps' are the largest among the candidates, at each order apart. Charging the chosen run alone is
therefore right only if its own Renyi divergence is the largest at every order. Candidates of the same epsilon
at one delta may have curves that cross; the same sampling, counts and noise for all, or the choice of
learning rates alone, have the same curve.

With K fixed instead of random nothing of the kind holds: K runs cost their composition.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import dp_accounting

from equipoise._roots import crossing

# Runs: no law of use draws more. Without an end, a sum of probabilities that rounding keeps below the number
# drawn would never reach it.
_MOST = 10_000_000


@dataclass(frozen=True)
class PrivateSearch:
    """A search that keeps the best of a random number of runs.

    Args:
        mean: the expected number of runs; above 1, for a Poisson law above 0.
        shape: eta of the negative binomial law: 1 (geometric) is the usual choice, 0 logarithmic, infinity
            Poisson. Smaller shapes cost less and vary more.

    Example:
        >>> search = PrivateSearch(mean=10)
        >>> 1 <= search.draw()
        True
        >>> run = dp_accounting.GaussianDpEvent(10.0)
        >>> from equipoise.privacy import epsilon
        >>> alone, chosen = epsilon(run, 1e-5).value, epsilon(search.event(run), 1e-5).value
        >>> alone < chosen < 4 * alone
        True
    """

    mean: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        for name in ("mean", "shape"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
                raise TypeError(f"{name} must be a number, got {value!r}")
        if not self.shape > -1:
            raise ValueError(f"shape={self.shape:g} must be above -1; 1 is the usual choice")
        least = 0 if math.isinf(self.shape) else 1
        if not least < self.mean <= 1e6:
            raise ValueError(
                f"mean={self.mean:g} must be above {least} and at most a million: it is the expected number "
                "of runs"
            )

    def event(self, run: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
        """The event of the search whose single runs have the event `run`."""
        return dp_accounting.dp_event.RepeatAndSelectDpEvent(run, float(self.mean), float(self.shape))

    def draw(self) -> int:
        """The number of runs, from the operating system's random bits. Draw it once, before the first run."""
        uniform = (secrets.randbits(53) + 0.5) * 2.0**-53
        return self.quantile(uniform)

    def quantile(self, uniform: float) -> int:
        """The smallest k with P[K <= k] >= uniform.

        >>> PrivateSearch(mean=4).quantile(0.5)  # geometric: 1 - 0.75^3 = 0.58
        3
        """
        if math.isinf(self.shape):
            probability, k = math.exp(-self.mean), 0
        else:
            gamma, k = self.gamma, 1
            if self.shape == 0:
                probability = (1 - gamma) / math.log(1 / gamma)
            else:
                probability = (1 - gamma) * self.shape / math.expm1(-self.shape * math.log(gamma))
        below = probability
        while below < uniform and k < _MOST:
            if math.isinf(self.shape):
                probability *= self.mean / (k + 1)
            else:
                probability *= (1 - gamma) * (k + self.shape) / (k + 1)
            k += 1
            below += probability
            if probability < 1e-18 * below and k > self.mean:
                break
        return k

    @property
    def gamma(self) -> float:
        """The law's parameter for its mean; a small gamma means many runs."""
        if math.isinf(self.shape):
            raise ValueError("a Poisson law has no gamma; its mean is its only parameter")

        def log_mean(log_gamma: float) -> float:
            gamma = math.exp(log_gamma)
            if self.shape == 0:
                return math.log(math.expm1(-log_gamma) / -log_gamma)
            share = self.shape / -math.expm1(self.shape * log_gamma)
            return math.log(share * -math.expm1(log_gamma) / gamma)

        target = math.log(self.mean)
        found, _ = crossing(lambda x: log_mean(x) - target, -80.0, 80.0, most=-1e-12, tolerance=1e-13)
        return math.exp(found)

    def describe(self) -> dict[str, Any]:
        """Plain values, for the journal and the statement; the shape of a Poisson law is null."""
        return {"mean": float(self.mean), "shape": None if math.isinf(self.shape) else float(self.shape)}

    @staticmethod
    def from_description(description: Mapping[str, Any]) -> PrivateSearch:
        """The search that `describe` wrote."""
        shape = description["shape"]
        return PrivateSearch(description["mean"], math.inf if shape is None else shape)
