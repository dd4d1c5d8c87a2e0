"""FedLRS: a pull back once the local update grows too long, and only its largest entries are sent.

    estimate = method's estimate + lambda (y - x)   where |y - x| > S
    sent: the share s of the entries of y - x with the largest absolute values, as positions and values

Both act on noised iterates and cost nothing. The source bounds updates for guarantees that cover a whole
client; here the unit is a record, and each step is noised, so that S only sets the pull.

Source: Cheng, Wang, Zhang and Cheng 2022, "Differentially Private Federated Learning with Local
Regularization and Sparsification": its two parts, with steps that are private by themselves.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from equipoise.federated import FedAvg, Reply, RoundWrapper
from equipoise.federated.registry import FederatedMethod, dp_sgd
from equipoise.methods import Context, State
from equipoise.methods.base import Parameters
from equipoise.methods.card import Card
from equipoise.methods.configuration import FromZero, Positive, UpToOne

__all__ = ["FEDLRS", "FedLRS", "SparseAverage"]


@dataclass(frozen=True)
class FedLRS(RoundWrapper):
    """The client's half.

    Args:
        inner: estimates the gradient.
        bound: S > 0, the length of the update from which on it is pulled back.
        strength: lambda >= 0.
        share: in (0, 1], of the update's entries that are sent.

    Example:
        >>> from equipoise.methods import DPSGD
        >>> FedLRS(DPSGD(clip_norm=0.1), bound=1.0, share=0.3).config()["share"]
        0.3
    """

    name: ClassVar[str] = "fedlrs"
    card: ClassVar[Card] = Card(
        summary="Any method, pulled back beyond a bound; the largest entries of the update are sent.",
        claim="Shorter and sparser updates suffer less from clipping and noise that cover a client; with "
        "noise in every step the largest entries are in part the noisiest.",
        source="Cheng et al. 2022, Differentially Private Federated Learning with Local Regularization and "
        "Sparsification",
        guarantee="proven",
        cost="that of the inner method, and a copy of the parameters",
        use_when="As a comparison, or where sending is dear.",
        avoid_when="Every step is noised and sending is cheap.",
    )

    _: KW_ONLY
    bound: Positive = 1.0
    strength: FromZero = 0.1
    share: UpToOne = 0.3

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        estimate, state = super().step(context, state)
        away = {name: value - state["start"][name] for name, value in context.params.items()}
        length = math.sqrt(math.fsum(float(value.double().square().sum()) for value in away.values()))
        if length > self.bound:
            estimate = {name: value + self.strength * away[name] for name, value in estimate.items()}
        return estimate, state

    def reply(self, state: State, start: Parameters, end: Parameters) -> Reply:
        """Positions [n] and values [n] of the kept entries, over all parameters in their order.

        The inner method's reports are sent with them.
        """
        update = torch.cat([(end[name] - value).flatten() for name, value in start.items()])
        kept = max(1, round(self.share * len(update)))
        positions = update.abs().topk(kept).indices.sort().values
        sent = {"positions": positions.to(torch.int32), "values": update[positions]}
        return Reply(sent, super().reply(state, start, end).reports)


class SparseAverage(FedAvg):
    """The server's half: the mean of sparse updates.

    Example:
        >>> sent = {"positions": torch.tensor([1], dtype=torch.int32), "values": torch.tensor([0.5])}
        >>> SparseAverage().aggregate({"w": torch.zeros(2)}, [Reply(sent)])["w"]
        tensor([0.0000, 0.5000])
    """

    def received(self, params: Parameters, sent: Parameters) -> Parameters:
        """The client's parameters: the global ones, moved at the kept positions."""
        sizes = [value.numel() for value in params.values()]
        positions, values = sent["positions"].long(), sent["values"]
        if positions.shape != values.shape or not bool(((positions >= 0) & (positions < sum(sizes))).all()):
            raise ValueError(
                f"a client sent {len(values)} values at {len(positions)} positions of {sum(sizes)}; one "
                "value per position, all of them inside, is expected"
            )
        update = values.new_zeros(sum(sizes))
        update[positions] = values
        parts = torch.split(update, sizes)
        return {
            name: value + part.view_as(value)
            for (name, value), part in zip(params.items(), parts, strict=True)
        }


FEDLRS = FederatedMethod(
    "DP-SGD pulled back beyond a bound; the update's largest entries are sent",
    lambda setup: FedLRS(dp_sgd(setup), **setup.options),
    lambda setup: SparseAverage(),
    {"bound": 1.0, "strength": 0.1, "share": 0.3},
)
