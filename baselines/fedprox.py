"""FedProx: local steps are pulled back to the point where the server put the client.

    estimate = method's estimate + mu (y - x)

x is the global model of the round, y the local iterate. The pull is added to the noised estimate: both
points are public, so that it costs nothing.

Source: Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith 2020, "Federated Optimization in Heterogeneous
Networks".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from equipoise.federated import RoundWrapper
from equipoise.federated.registry import FederatedMethod, average, dp_sgd
from equipoise.methods import Context, State
from equipoise.methods.card import Card
from equipoise.methods.configuration import FromZero

__all__ = ["FEDPROX", "Proximal"]


@dataclass(frozen=True)
class Proximal(RoundWrapper):
    """Any method with FedProx' pull; its releases, its plan and its cost are the inner method's.

    Args:
        inner: estimates the gradient.
        strength: mu >= 0; 0 is the inner method.

    Example:
        >>> from equipoise.methods import DPSGD
        >>> Proximal(DPSGD(clip_norm=0.1), strength=0.01).config()["strength"]
        0.01
    """

    name: ClassVar[str] = "proximal"
    card: ClassVar[Card] = Card(
        summary="Any method, with a pull towards the global model of the round.",
        claim="Keeps clients with different data from drifting apart in long rounds.",
        source="Li et al. 2020, Federated Optimization in Heterogeneous Networks",
        guarantee="proven",
        cost="that of the inner method, and a copy of the parameters",
        use_when="Clients differ and a round has many local steps.",
        avoid_when="A round is a step: the pull is then zero.",
    )

    strength: FromZero

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        estimate, state = super().step(context, state)
        pulled = {
            name: value + self.strength * (context.params[name] - state["start"][name])
            for name, value in estimate.items()
        }
        return pulled, state


FEDPROX = FederatedMethod(
    "DP-SGD with a pull to the global model, after the noise",
    lambda setup: Proximal(dp_sgd(setup), setup.options["strength"]),
    average,
    {"strength": 0.1},
)
