"""MOON: a record's loss pulls its representation to the global model's and away from the last local one's.

    loss_i = f_i(y) + mu log(1 + exp((sim(z_i, z_i^last) - sim(z_i, z_i^global)) / T))

z are representations of the record by the local iterate y, by the global model x of the round, and by the
local model that the client sent last; sim is the cosine. The term is part of every record's loss, before its
gradient is clipped; x and the last local model are public. In a client's first round the last local model is
the global one, and the term has no gradient.

Source: Li, He and Song 2021, "Model-Contrastive Federated Learning".
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise import _validate
from equipoise.federated import RoundWrapper
from equipoise.federated.registry import FederatedMethod, FederationSetup, average, dp_sgd
from equipoise.gradients.engine_inputs import Loss
from equipoise.methods import Context, State
from equipoise.methods.base import Parameters
from equipoise.methods.card import Card
from equipoise.methods.named_tensors import copied

__all__ = ["MOON", "Moon", "MoonLoss"]


class MoonLoss:
    """A loss with the contrastive term; give it to the client as `loss` and to `Moon` as `term`.

    Args:
        loss: loss(model, batch) -> [B].
        features: features(model, batch) -> [B, D], the representation.
        model: of the client; two frozen copies of it are kept.
        strength: mu >= 0.
        temperature: T > 0.

    Example:
        >>> model = nn.Linear(2, 3)
        >>> term = MoonLoss(lambda m, x: m(x).square().sum(1), lambda m, x: m(x), model, strength=1.0)
        >>> x = torch.randn(4, 2)
        >>> more = term(model, x) - model(x).square().sum(1)  # log 2, as long as all three models are one
        >>> bool(torch.allclose(more, torch.tensor(2.0).log().expand(4)))
        True
    """

    def __init__(
        self,
        loss: Callable[[nn.Module, Any], Tensor],
        features: Callable[[nn.Module, Any], Tensor],
        model: nn.Module,
        *,
        strength: float = 1.0,
        temperature: float = 0.5,
    ) -> None:
        _validate.non_negative(strength=strength)
        _validate.positive(temperature=temperature)
        self.loss, self.features = loss, features
        self.strength, self.temperature = float(strength), float(temperature)
        self._global, self._last = (copy.deepcopy(model).requires_grad_(False) for _ in range(2))

    def config(self) -> dict[str, Any]:
        """The term's settings as plain values."""
        return {"strength": self.strength, "temperature": self.temperature}

    def compare_with(self, start: Parameters, last: Parameters) -> None:
        """Set the global model of the round and the last local one."""
        with torch.no_grad():
            for frozen, values in ((self._global, start), (self._last, last)):
                for name, parameter in frozen.named_parameters():
                    if name in values:
                        parameter.copy_(values[name])

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        z = self.features(model, batch)
        with torch.no_grad():
            near, far = self.features(self._global, batch), self.features(self._last, batch)
        apart = F.cosine_similarity(z, far, dim=1) - F.cosine_similarity(z, near, dim=1)
        return self.loss(model, batch) + self.strength * F.softplus(apart / self.temperature)


@dataclass(frozen=True)
class Moon(RoundWrapper):
    """Any method on a `MoonLoss`, which it keeps supplied with the two models to compare with.

    Args:
        inner: estimates the gradient.
        term: the client's loss.
    """

    name: ClassVar[str] = "moon"
    card: ClassVar[Card] = Card(
        summary="Any method, with MOON's contrastive term in every record's loss.",
        claim="Keeps the representations of clients with different data together.",
        source="Li, He and Song 2021, Model-Contrastive Federated Learning",
        guarantee="proven",
        cost="that of the inner method, and two more forward passes",
        use_when="Clients differ, and the model has a representation worth keeping.",
        avoid_when="Noise or clipping, not drift, limits the training.",
    )

    term: MoonLoss

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.instance(MoonLoss, "the MoonLoss that is the client's loss", term=self.term)

    @property
    def client_loss(self) -> Loss:
        return self.term

    def init(self, context: Context) -> State:
        return {**super().init(context), "last": copied(context.params)}

    def query(self, context: Context, state: State) -> dict[str, float]:
        self.term.compare_with(state["start"], state["last"])
        return super().query(context, state)

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        # The loss belongs to the client, not to the state: a resumed or repeated step sets its models again.
        self.term.compare_with(state["start"], state["last"])
        return super().step(context, state)

    def end_round(self, state: State, end: Parameters) -> State:
        return {**super().end_round(state, end), "last": copied(end)}


def features(model: nn.Module, batch: Any) -> Tensor:
    """The input of a network's last layer."""
    if not isinstance(model, nn.Sequential) or len(model) < 2:
        raise ValueError(
            "method=MOON compares what goes into the last layer, and takes it from an nn.Sequential; this "
            f"model is a {type(model).__name__}. Use MoonLoss with a features function of your own."
        )
    return model[:-1](batch["input"]).flatten(1)


def _client(setup: FederationSetup) -> Moon:
    return Moon(dp_sgd(setup), MoonLoss(setup.loss, features, setup.model, **setup.options))


MOON = FederatedMethod(
    "DP-SGD whose loss holds representations near the global model's",
    _client,
    average,
    {"strength": 1.0, "temperature": 0.5},
)
