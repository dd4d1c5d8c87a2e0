"""DP-FedAvg with a clip norm that follows one quantile of all clients' gradient norms.

    at a client, every step, jointly with the gradient:   b = sum_i (1[n_i <= C] - 1/2) + N(0, sigma_b^2)
    reported:                                              s_p = mean over the round's steps of b / B + 1/2
    server:                                                C <- C exp(-eta (mean_p s_p - gamma))

Every client clips at the same C in a round, and the noise of the shares averages over steps and clients. The
count is one more coordinate of the same Gaussian release, as in `ReleasedQuantile`.

Source: Andrew, Thakkar, McMahan and Ramaswamy 2021, "Differentially Private Learning with Adaptive Clipping",
with records in the place of clients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from equipoise.federated.messages import Reply, Request, check_number
from equipoise.federated.round_protocol import Extra, RoundProtocol
from equipoise.federated.server import FedAvg
from equipoise.methods import DPSGD, Context, ReleasedQuantile, State
from equipoise.methods.base import Parameters

#: The report: the noised share of rows below the clip norm.
SHARE = "share"


@dataclass(frozen=True)
class ServerQuantile(RoundProtocol, DPSGD):
    """The client's half: DP-SGD at the server's clip norm, with the noised count of rows below it.

    Args:
        clip_norm: first clip norm, limits and the counts' noise; the server's `QuantileFedAvg` has the same.
        clip_rule, noise_multiplier: as for `DPSGD`.

    Example:
        >>> list(ServerQuantile(ReleasedQuantile(0.1)).takes("train"))
        ['clip_norm']
    """

    name: ClassVar[str] = "quantile-client"

    clip_norm: ReleasedQuantile

    def takes(self, kind: str) -> Mapping[str, Extra] | None:
        low, high = self.clip_norm.limits
        clip_norm = Extra(lambda value, mine: check_number("clip_norm", value, high, low))
        return {"clip_norm": clip_norm} if kind == "train" else None

    def init(self, context: Context) -> State:
        return {**super().init(context), "shares": 0.0, "steps": 0}

    def learn(self, state: State, count: float, expected_size: float) -> State:
        # The clip norm is the server's: it stays for the round, and the share waits for the reply.
        share = count / expected_size + 0.5
        return {**state, "shares": state["shares"] + share, "steps": state["steps"] + 1}

    def rebase(self, state: State, params: Parameters) -> State:
        return {**super().rebase(state, params), "shares": 0.0, "steps": 0}

    def follow(self, state: State, extras: Mapping[str, Any]) -> State:
        return {**state, "threshold": extras["clip_norm"]}

    def reply(self, state: State, start: Parameters, end: Parameters) -> Reply:
        share = float(state["shares"] / max(1, state["steps"]))
        return Reply(super().reply(state, start, end).params, {SHARE: share})


class QuantileFedAvg(FedAvg):
    """The server's half.

    Args:
        rule: first clip norm, wanted quantile, learning rate and limits.
        server_rate: see `FedAvg`.

    Example:
        >>> import torch
        >>> server = QuantileFedAvg(ReleasedQuantile(0.1, quantile=0.5, learning_rate=0.2))
        >>> reply = Reply({"w": torch.ones(1)}, {SHARE: 1.0})  # all below: the clip norm goes down
        >>> server.aggregate({"w": torch.zeros(1)}, [reply])["w"].item()
        1.0
        >>> round(server.extras()["clip_norm"], 6)  # 0.1 exp(-0.2 * 0.5)
        0.090484
    """

    def __init__(self, rule: ReleasedQuantile, server_rate: float = 1.0) -> None:
        super().__init__(server_rate)
        self.rule, self.carried = rule, {"clip_norm": rule.start()}

    def extras(self) -> dict[str, Any]:
        return {"clip_norm": self.carried["clip_norm"]}

    def refusal(self, request: Request, reply: Reply) -> str | None:
        found = super().refusal(request, reply)
        if found is None and SHARE not in reply.reports:
            return f"it sent no report {SHARE!r}"
        return found

    def aggregate(self, params: Parameters, replies: Sequence[Reply]) -> dict[str, Tensor]:
        shares = [float(reply.reports[SHARE]) for reply in replies]
        # One client's share, whatever number it is, moves the clip norm by one step at most.
        mean = min(max(math.fsum(shares) / len(shares), 0.0), 1.0)
        self.carried = {"clip_norm": self.rule.update(self.carried["clip_norm"], mean - 0.5, 1.0)}
        return super().aggregate(params, replies)

    def metrics(self) -> Mapping[str, float]:
        return {"radius": self.carried["clip_norm"]}
