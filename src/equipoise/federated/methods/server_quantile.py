"""DP-FedAvg with a clip norm that follows one quantile of all clients' gradient norms.

    at a client, every step, jointly with the gradient:   b = sum_i (1[n_i <= C] - 1/2) + N(0, sigma_b^2)
    sent with the answer:                                  s_p = mean over the round's steps of b / B + 1/2
    server:                                                C <- C exp(-eta (mean_p s_p - gamma))

Every client clips at the same C in a round, and the noise of the shares averages over steps and clients. The
count is one more coordinate of the same Gaussian release, as in `ReleasedQuantile`.

Source: Andrew, Thakkar, McMahan and Ramaswamy 2021, "Differentially Private Learning with Adaptive Clipping",
with records in the place of clients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from equipoise.federated.methods.server_radius import agreed
from equipoise.federated.round_protocol import REPORT, RoundProtocol
from equipoise.federated.strategies import Asker, FedAvg
from equipoise.methods import DPSGD, Context, ReleasedQuantile, State
from equipoise.methods.base import Parameters

__all__ = ["QuantileFedAvg", "ServerQuantile"]


SHARE = REPORT + "share"


class ServerQuantile(RoundProtocol, DPSGD):
    """The client's half: DP-SGD at the server's clip norm, with the noised count of rows below it.

    Args:
        threshold: first clip norm, limits and the counts' noise; the server's `QuantileFedAvg` has the same.
        clip_rule, noise_multiplier: as for `DPSGD`.

    Example:
        >>> ServerQuantile(ReleasedQuantile(0.1)).follows_clip_norm
        True
    """

    name: ClassVar[str] = "quantile-client"

    def __init__(
        self, threshold: ReleasedQuantile, clip_rule: Any = "abadi", *, noise_multiplier: float | None = None
    ) -> None:
        if not isinstance(threshold, ReleasedQuantile):
            raise TypeError(f"threshold={threshold!r}: give a ReleasedQuantile, whose counts are sent")
        super().__init__(threshold, clip_rule, noise_multiplier=noise_multiplier)
        self._quantile = threshold

    @property
    def follows_clip_norm(self) -> bool:
        """The server's clip norm."""
        return True

    def init(self, context: Context) -> State:
        """The first clip norm, and no counts."""
        return {**super().init(context), "shares": 0.0, "steps": 0}

    def learn(self, state: State, count: float, expected_size: float) -> State:
        """The clip norm stays for the round; the share is kept for the answer."""
        share = count / expected_size + 0.5
        return {**state, "shares": state["shares"] + share, "steps": state["steps"] + 1}

    def rebase(self, state: State, params: Parameters) -> State:
        """A new round: no counts."""
        return {**super().rebase(state, params), "shares": 0.0, "steps": 0}

    def with_radius(self, state: State, clip_norm: float) -> State:
        """The state with the server's clip norm.

        Raises:
            Refused: it is no finite number, or lies outside of the agreed limits.
        """
        low, high = self._quantile.limits
        return {**state, "threshold": agreed("clip_norm", clip_norm, high, low)}

    def answer(self, state: State, start: Parameters, end: Parameters) -> dict[str, Tensor]:
        """The parameters, and the released share of rows below the clip norm."""
        share = torch.tensor(state["shares"] / max(1, state["steps"]), dtype=torch.float64)
        return {**super().answer(state, start, end), SHARE: share}


class QuantileFedAvg(FedAvg):
    """The server's half.

    Args:
        rule: first clip norm, wanted quantile, learning rate and limits.
        server_rate: see `FedAvg`.

    Example:
        >>> server = QuantileFedAvg(ReleasedQuantile(0.1, quantile=0.5, learning_rate=0.2))
        >>> answer = {"w": torch.ones(1), SHARE: torch.tensor(1.0)}  # all below: the clip norm goes down
        >>> server.aggregate({"w": torch.zeros(1)}, [answer])["w"].item()
        1.0
        >>> round(server.instructions(lambda limit: [])["clip_norm"], 6)  # 0.1 exp(-0.2 * 0.5)
        0.090484
    """

    def __init__(self, rule: ReleasedQuantile, server_rate: float = 1.0) -> None:
        super().__init__(server_rate)
        self.rule, self._clip_norm = rule, rule.start()

    def instructions(self, ask: Asker) -> dict[str, Any]:
        """The clip norm of the round."""
        return {"clip_norm": self._clip_norm}

    def refusal(self, params: Parameters, answer: Any) -> str | None:
        """Also where the share beside the parameters is not one number."""
        found = super().refusal(params, answer)
        if found is None and (SHARE not in answer or answer[SHARE].numel() != 1):
            return f"it sent no single number for {SHARE!r}"
        return found

    def aggregate(self, params: Parameters, answers: Sequence[Parameters]) -> dict[str, Tensor]:
        """The mean of the parameters; the clip norm follows the mean share."""
        shares = [float(answer[SHARE]) for answer in answers if SHARE in answer]
        shares = [share for share in shares if math.isfinite(share)]
        if shares:
            # One client's answer, whatever number it is, moves the clip norm by one step at most.
            mean = min(max(math.fsum(shares) / len(shares), 0.0), 1.0)
            self._clip_norm = self.rule.update(self._clip_norm, mean - 0.5, 1.0)
        return super().aggregate(params, answers)

    def metrics(self) -> Mapping[str, float]:
        """The clip norm of the next round."""
        return {"radius": self._clip_norm}

    def state_dict(self) -> dict[str, Any]:
        """The clip norm of the next round."""
        return {"clip_norm": self._clip_norm}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        if set(state) != {"clip_norm"}:
            raise ValueError(f"state has {sorted(state)}, a quantile has a clip norm")
        self._clip_norm = float(state["clip_norm"])
