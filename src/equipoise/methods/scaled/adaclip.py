"""AdaClip: gradients are centred and scaled entry by entry before they are clipped, and back afterwards.

    w_i = (g_i - a_t) / b_t,      u_t = (sum_i clip(w_i, C) + N(0, (z C)^2 I)) / B
    estimate_t = a_t + b_t u_t                                      entry by entry

a is the mean of earlier estimates and b follows their spread s. For a given clip norm of w the sum of the
noise's variances, C^2 sum_j b_j^2, is least where b_j is proportional to sqrt(s_j): the root of a standard
deviation, where scaling by second moments takes s_j itself. As used here

    b_j = sqrt(s_j sum(s) / sum(s^2))

a row that differs from a by s_j in every entry keeps its length, so that C stays a norm of gradients; the
paper's constants are those for which such a row has length 1. Only ratios of s count: releases tell the
spread of a mean of records, and not that of the records.

With E_t the average over about 1 / (1 - decay) steps, with Adam's correction for the start,

    a = E[estimate],   v = E[(estimate - a)^2 - (z C b / B)^2],   s = sqrt(max(v, (floor m)^2))

with m^2 the mean of the positive part of v over all entries: the noise is known and is subtracted. Where the
noise leaves nothing of v, s is the same for all entries. At the first step a is 0 and b is 1.

**Private as DP-SGD is, at the same noise.** a_t and b_t are made of released values and public numbers. The
row of a record is made of that record alone and clipped after it was moved and scaled: a record moves the
sum by at most C. A record that is not drawn adds nothing, so a is added once, whoever was drawn.

With `centred` off and all s alike it is DP-SGD.

Source: Pichapati, Suresh, Yu, Reddi and Kumar 2019, "AdaCliP: Adaptive Clipping for Private SGD", arXiv
1908.07643.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from equipoise.methods.base import Context, State
from equipoise.methods.card import Card
from equipoise.methods.dp_sgd import DPSGD
from equipoise.methods.named_tensors import zeros_like
from equipoise.privacy.rows import PrivateRows

__all__ = ["AdaClip"]


@dataclass(frozen=True, kw_only=True)
class AdaClip(DPSGD):
    """DP-SGD on centred and scaled gradients; the estimate suits any optimiser.

    Args:
        clip_norm: as for DP-SGD; of the centred and scaled row.
        clip_rule: as for DP-SGD.
        per_layer: as for DP-SGD.
        noise_multiplier: as for DP-SGD.
        decay: of the averages, in [0, 1).
        floor: the least spread of an entry, as a share of its size over all entries; in [1e-6, 1].
        centred: subtract the mean of earlier estimates before clipping.

    Example:
        >>> AdaClip(clip_norm=0.5, centred=False).config()["decay"]
        0.99
    """

    name: ClassVar[str] = "adaclip"
    card: ClassVar[Card] = Card(
        summary="DP-SGD on gradients that are centred and scaled by what earlier ones looked like.",
        claim="The least noise for clipped entries of different spread; private as DP-SGD, and proved so.",
        source="Pichapati et al. 2019, AdaCliP: Adaptive Clipping for Private SGD, arXiv 1908.07643",
        guarantee="proven",
        cost="as DP-SGD, and two copies of the parameters; convolutions and layers over sequences form "
        "their rows for norms",
        use_when="Entries of the gradient differ much in spread, and noise is moderate.",
        avoid_when="The noise is far above the gradients, so that their spread cannot be seen.",
    )

    decay: float = 0.99
    floor: float = 0.1
    centred: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay={self.decay!r}: it lies in [0, 1)")
        if not 1e-6 <= self.floor <= 1:
            raise ValueError(f"floor={self.floor!r}: it lies in [1e-6, 1]; 1 makes all entries alike")

    def init(self, context: Context) -> State:
        params = context.params
        return {**super().init(context), "mean": zeros_like(params), "spread": zeros_like(params), "steps": 0}

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        learned = state["threshold"]
        # From earlier releases: what followed from this draw would be an un-noised statistic of it.
        centre, divisor = self.geometry(state)

        def moved(rows: PrivateRows) -> PrivateRows:
            if self.centred:
                rows = rows.shifted({name: -value for name, value in centre.items()})
            return rows.scaled({name: 1 / value for name, value in divisor.items()})

        mean, rest = self.clipped_mean(context, {"threshold": learned}, view=moved)
        estimate = {}
        for name, value in mean.items():
            value = value * divisor[name].to(value.dtype)
            estimate[name] = value + centre[name].to(value.dtype) if self.centred else value
        mechanism = context.plan.releases["gradient"].at(context.step)
        clip_norm = self.threshold.at(context.step, learned)
        std = mechanism.standard_deviation("gradient", clip_norm) / context.sampling.expected_size
        return estimate, {**rest, **self.updated(state, estimate, divisor, std)}

    def geometry(self, state: State) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """a and b of the next draw."""
        if state["steps"] == 0:
            ones = {name: torch.ones_like(value) for name, value in state["spread"].items()}
            return dict(state["mean"]), ones
        started = 1 - self.decay ** state["steps"]
        centre = {name: value / started for name, value in state["mean"].items()}
        squares = {name: value / started for name, value in state["spread"].items()}
        count = sum(value.numel() for value in squares.values())
        size = sum(float(value.clamp(min=0).sum(dtype=torch.float64)) for value in squares.values()) / count
        if not size < math.inf:
            raise ValueError(
                "the spread of the released estimates is not finite, so that it gives no scale; lower the "
                "learning rate or clip_norm"
            )
        least = self.floor**2 * size
        spread = {name: value.clamp(min=least).sqrt() for name, value in squares.items()}
        total = sum(float(value.sum(dtype=torch.float64)) for value in spread.values())
        square = sum(float(value.square().sum(dtype=torch.float64)) for value in spread.values())
        if not square > 0:  # nothing is left of the spread: all entries are alike
            return centre, {name: torch.ones_like(value) for name, value in spread.items()}
        return centre, {name: (value * (total / square)).sqrt() for name, value in spread.items()}

    def updated(
        self, state: State, estimate: Mapping[str, Tensor], divisor: Mapping[str, Tensor], std: float
    ) -> State:
        """The averages after a released estimate, whose noise is `std` times b."""
        centre, _ = self.geometry(state)
        mean, spread = {}, {}
        for name, kept in state["mean"].items():
            value = estimate[name].to(kept.dtype)
            mean[name] = kept.lerp(value, 1 - self.decay)
            apart = (value - centre[name]).square() - (std * divisor[name]).square()
            spread[name] = state["spread"][name].lerp(apart, 1 - self.decay)
        return {"mean": mean, "spread": spread, "steps": state["steps"] + 1}
