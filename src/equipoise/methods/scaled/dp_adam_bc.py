"""DP-AdamBC: Adam whose second moments are those of the gradient, without those of the noise.

    u_t = (sum_i clip(g_i, C) + N(0, (z C)^2 I)) / B                            DP-SGD's estimate
    m_t = beta1 m_{t-1} + (1 - beta1) u_t,     v_t = beta2 v_{t-1} + (1 - beta2) u_t^2
    estimate_t = m^_t / (sqrt(max(v^_t - Phi_t, floor Phi_t)) + eps),   Phi = (z C / B)^2

with the hats for division by 1 - beta^t. The noise adds Phi to every entry of v^, far more than the gradient
does, so that Adam on DP-SGD's estimates divides all entries by nearly the same number and is SGD with
momentum. Phi is known, and is subtracted. Where C_t changes, Phi_t is the same average of (z C_t / B)^2.

The estimate is the whole step of Adam: `torch.optim.SGD` takes it, and its weight decay is AdamW's. Without
noise it is Adam's, bit for bit where the learning rate is a power of two, and to rounding elsewhere.

The paper's floor is a number in units of squared gradients. Here it is a share of Phi, which needs no
tuning to the model's scale and is zero without noise.

**Private as DP-SGD is**: all of it is made of released values and public numbers, which is post-processing.

Source: Tang, Shpilevskiy and Lécuyer 2024, "DP-AdamBC", arXiv 2312.14334.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from equipoise.methods.base import Context, State
from equipoise.methods.card import Card
from equipoise.methods.dp_sgd import DPSGD
from equipoise.methods.named_tensors import zeros_like

__all__ = ["DPAdamBC"]


@dataclass(frozen=True, kw_only=True)
class DPAdamBC(DPSGD):
    """Adam on DP-SGD's estimates, corrected for the noise that it knows; give it `torch.optim.SGD`.

    Args:
        clip_norm: as for DP-SGD.
        clip_rule: as for DP-SGD.
        per_layer: as for DP-SGD.
        noise_multiplier: as for DP-SGD.
        beta1: of the first moment, in [0, 1).
        beta2: of the second moment, in [0, 1).
        eps: >= 0, added to the root, as in Adam.
        floor: > 0, the least second moment, as a share of the noise's.

    Example:
        >>> DPAdamBC(clip_norm=0.1).config()["beta2"]
        0.999
    """

    name: ClassVar[str] = "dp-adam-bc"
    card: ClassVar[Card] = Card(
        summary="Adam on DP-SGD's gradients, with the noise taken out of its second moments.",
        claim="Adam's steps rather than SGD's with momentum; private at DP-SGD's noise, and proved so.",
        source="Tang, Shpilevskiy and Lécuyer 2024, DP-AdamBC, arXiv 2312.14334",
        guarantee="proven",
        cost="as DP-SGD; two copies of the parameters, as Adam",
        use_when="Entries of the gradient differ much in size, as in language models, and noise is moderate.",
        avoid_when="The noise hides most entries: what is left of the second moments is the floor.",
    )

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    floor: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: it lies in [0, 1)")
        if not (math.isfinite(self.eps) and self.eps >= 0):
            raise ValueError(f"eps={self.eps!r}: it is finite and at least 0")
        if not 0 < self.floor <= 1:
            raise ValueError(f"floor={self.floor!r}: it is a share of the noise's second moment, in (0, 1]")

    def init(self, context: Context) -> State:
        return {**super().init(context), **self.moments(context.params)}

    def moments(self, params: Mapping[str, Tensor]) -> dict[str, Any]:
        """Those before the first step."""
        return {"first": zeros_like(params), "second": zeros_like(params), "noise": 0.0, "steps": 0}

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        learned = state["threshold"]
        fresh, rest = self.clipped_mean(context, {"threshold": learned})
        # The noise of this release: public, as its threshold follows from earlier ones.
        mechanism = context.plan.releases["gradient"].at(context.step)
        clip_norm = self.threshold.at(context.step, learned)
        std = mechanism.standard_deviation("gradient", clip_norm) / context.sampling.expected_size
        estimate, moments = self.direction(fresh, state, std)
        return estimate, {**rest, **moments}

    def direction(
        self, gradient: Mapping[str, Tensor], moments: Mapping[str, Any], std: float
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Adam's step along a gradient whose entries have noise of this standard deviation.

        Args:
            gradient: a released estimate.
            moments: as `moments` gave them, or as they were returned before.
            std: 0 for no noise.
        """
        steps = moments["steps"] + 1
        noise = self.beta2 * moments["noise"] + (1 - self.beta2) * std**2
        first_size, second_size = 1 - self.beta1**steps, 1 - self.beta2**steps
        expected = noise / second_size
        first, second, estimate = {}, {}, {}
        # The operations of torch.optim.Adam, one by one: without noise the bits are its.
        for name, value in gradient.items():
            value = value.to(moments["first"][name].dtype)
            first[name] = moments["first"][name].lerp(value, 1 - self.beta1)
            second[name] = (
                moments["second"][name].mul(self.beta2).addcmul_(value, value, value=1 - self.beta2)
            )
            if noise > 0:
                corrected = (second[name] / second_size).sub_(expected).clamp_(min=self.floor * expected)
                root = corrected.sqrt_().add_(self.eps)
            else:
                root = (second[name].sqrt() / second_size**0.5).add_(self.eps)
            estimate[name] = torch.zeros_like(value).addcdiv_(first[name], root, value=1 / first_size)
        return estimate, {"first": first, "second": second, "noise": noise, "steps": steps}
