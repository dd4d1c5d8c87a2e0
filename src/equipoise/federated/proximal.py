"""FedProx: local steps are pulled back to the point where the server put the client.

    estimate = method's estimate + mu (y - x)

x is the global model of the round, y the local iterate. The pull is added to the noised estimate: both
points are public, so that it costs nothing.

Source: Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith 2020, "Federated Optimization in Heterogeneous
Networks".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from equipoise.methods import Context, Method, State
from equipoise.methods.base import Parameters
from equipoise.methods.card import Card

if TYPE_CHECKING:
    from equipoise.privacy import Budget, PrivacyPlan, Sampling

__all__ = ["Proximal"]


class Proximal(Method):
    """Any method with FedProx' pull; its releases, its plan and its cost are the inner method's.

    Args:
        method: what estimates the gradient.
        strength: mu >= 0; 0 is the inner method.

    Example:
        >>> from equipoise.methods import DPSGD
        >>> Proximal(DPSGD(0.1), strength=0.01).config()["strength"]
        0.01
    """

    name: ClassVar[str] = "proximal"
    card: ClassVar[Card] = Card(
        summary="Any method, with a pull towards the global model of the round.",
        claim="Keeps clients with different data from drifting apart in long rounds.",
        source="Li et al. 2020, Federated Optimization in Heterogeneous Networks",
        guarantee="proven",
        published_guarantee=None,
        cost="that of the inner method, and a copy of the parameters",
        use_when="Clients differ and a round has many local steps.",
        avoid_when="A round is a step: the pull is then zero.",
    )

    def __init__(self, method: Method, strength: float) -> None:
        if not (math.isfinite(strength) and strength >= 0):
            raise ValueError(f"strength={strength!r}: mu is a finite number of at least 0")
        self.inner, self.strength, self.recipe = method, float(strength), method.recipe

    def plan(
        self, sampling: Sampling, budget: Budget | None, relation: str, public_rng: torch.Generator
    ) -> PrivacyPlan:
        """The inner method's."""
        return self.inner.plan(sampling, budget, relation, public_rng)

    def init(self, context: Context) -> State:
        """The inner state and the point to be pulled to."""
        return {"inner": self.inner.init(context), "anchor": _copied(context.params)}

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        """The inner estimate, pulled."""
        estimate, inner = self.inner.step(context, state["inner"])
        pulled = {
            name: value + self.strength * (context.params[name] - state["anchor"][name])
            for name, value in estimate.items()
        }
        return pulled, {**state, "inner": inner}

    def rebase(self, state: State, params: Parameters) -> State:
        """The anchor is where the server put the parameters."""
        return {"inner": self.inner.rebase(state["inner"], params), "anchor": _copied(params)}

    def claimed_epsilon(self, sampling: Sampling, relation: str, delta: float) -> float | None:
        """The inner method's."""
        return self.inner.claimed_epsilon(sampling, relation, delta)

    def assumptions(self) -> Sequence[str]:
        """The inner method's."""
        return self.inner.assumptions()

    def metrics(self, state: State) -> Mapping[str, float]:
        """The inner method's."""
        return self.inner.metrics(state["inner"])

    def config(self) -> dict[str, Any]:
        """The settings, as plain values."""
        return {"name": self.name, "method": self.inner.config(), "strength": self.strength}


def _copied(params: Parameters) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in params.items()}
