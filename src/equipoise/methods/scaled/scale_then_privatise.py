"""Scale, then privatise: gradients are scaled entry by entry before they are clipped, and back afterwards.

    u_t = (sum_i clip(s_t * g_i, C) + N(0, (z C)^2 I)) / B
    estimate_t = u_t / s_t                                          entry by entry

so that the noise has the shape of 1 / s_t. With s_t from the second moments v of earlier estimates, entries
that were small get small noise and large entries large noise, as an adaptive optimiser weighs them. The
scale of `SecondMoment` is

    s = (1 + floor) m / (sqrt(v^) + floor m),       m^2 = mean of v^ over all entries

where v^ is the average of squared estimates over about 1 / (1 - decay) steps, with Adam's correction for
the start. It is 1 at the first step and wherever all entries are alike, and at most 1 + 1 / floor. A row as
large in every entry as sqrt(v^) keeps its norm, up to the floor: C stays a norm of gradients. In the paper s
is 1 / (sqrt(v) + eps) and the clip norm one of scaled gradients.

**Private as DP-SGD is, at the same noise.** s_t is made of released values and public numbers, so it is the
same with a record and without it. The scaled row of a record is made of nothing but that record and is
clipped after it was scaled: a record moves the sum by at most C. The division by s_t is post-processing.

A constant scale s is DP-SGD with clip norm C / s: ``clip(s g, C) / s = clip(g, C / s)``, noise included.
A scale of 1 is DP-SGD, bit for bit.

Source: Ganesh, McMahan and Thakurta 2025, "On Design Principles for Private Adaptive Optimizers", arXiv
2507.01129.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from equipoise import _validate
from equipoise.methods.base import Context, Parameters, State
from equipoise.methods.card import Card
from equipoise.methods.configuration import Option
from equipoise.methods.dp_sgd import DPSGD
from equipoise.methods.named_tensors import zeros_like
from equipoise.privacy.rows import PrivateRows

__all__ = ["FixedScale", "Scale", "ScaleThenPrivatise", "SecondMoment"]

ScaleParts = dict[str, tuple[Tensor, ...]]
"""By parameter name tensors whose product is the scale, each broadcasting to the parameter's shape."""


class Scale(Option, ABC):
    """Where the scale of the rows comes from: from released estimates and public numbers only."""

    def start(self, params: Parameters) -> State:
        """What it remembers before the first step."""
        return {}

    @abstractmethod
    def parts(self, params: Parameters, memory: State) -> ScaleParts:
        """s, for the next draw."""

    def learn(self, memory: State, estimate: Mapping[str, Tensor]) -> State:
        """What it remembers after a released estimate."""
        return memory


@dataclass(frozen=True)
class FixedScale(Scale):
    """One number for all entries; 1 is DP-SGD.

    Args:
        value: s > 0.
    """

    kind: ClassVar[str] = "fixed"
    value: float = 1.0

    def __post_init__(self) -> None:
        _validate.positive(value=self.value)

    def parts(self, params: Parameters, memory: State) -> ScaleParts:
        return {name: (scale.fill_(self.value),) for name, scale in _ones(params).items()}


@dataclass(frozen=True)
class SecondMoment(Scale):
    """One over the root of the mean square of earlier estimates.

    Args:
        decay: of the average, in [0, 1).
        floor: > 0, what is added to the root, as a share of its size over all entries.
        by_sides: one number per row and per column of a matrix, or per channel, whose product is the scale,
            in place of one per entry. Norms then come from products in every layer.
    """

    kind: ClassVar[str] = "second_moment"
    decay: float = 0.99
    floor: float = 0.1
    by_sides: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay={self.decay!r}: it lies in [0, 1)")
        if not (math.isfinite(self.floor) and self.floor >= 1e-6):
            raise ValueError(
                f"floor={self.floor!r}: it is finite and at least 1e-6, so that no scale is huge"
            )

    def start(self, params: Parameters) -> State:
        return {"second": zeros_like(params), "steps": 0}

    def learn(self, memory: State, estimate: Mapping[str, Tensor]) -> State:
        kept = memory["second"]
        second = {
            name: kept[name].mul(self.decay).addcmul_(value, value, value=1 - self.decay)
            for name, value in ((name, value.to(kept[name].dtype)) for name, value in estimate.items())
        }
        return {"second": second, "steps": memory["steps"] + 1}

    def parts(self, params: Parameters, memory: State) -> ScaleParts:
        if memory["steps"] == 0:
            return {name: (scale,) for name, scale in _ones(params).items()}
        squares = {
            name: value / (1 - self.decay ** memory["steps"]) for name, value in memory["second"].items()
        }
        total = sum(float(value.sum(dtype=torch.float64)) for value in squares.values())
        size = total / sum(value.numel() for value in squares.values())
        if not 0 < size < math.inf:
            raise ValueError(
                "the mean square of the released estimates is not a positive finite number, so that it gives "
                "no scale; lower the learning rate or clip_norm"
            )
        return {name: self._of(value, math.sqrt(size)) for name, value in squares.items()}

    def _of(self, squares: Tensor, size: float) -> tuple[Tensor, ...]:
        """s of one parameter."""
        if not self.by_sides or squares.ndim < 2:
            return (self._inverse(squares, size),)
        # v_oi is about row_o column_i / mean: the root of each side's share.
        rows = squares.mean(dim=tuple(range(1, squares.ndim)), keepdim=True)
        columns = squares.mean(dim=(0, *range(2, squares.ndim)), keepdim=True)
        own = math.sqrt(float(squares.mean(dtype=torch.float64)))
        return self._inverse(rows, size), self._inverse(columns, own)

    def _inverse(self, squares: Tensor, size: float) -> Tensor:
        if size == 0:
            return torch.ones_like(squares)
        return (1 + self.floor) * size / (squares.sqrt() + self.floor * size)


def _ones(params: Parameters) -> dict[str, Tensor]:
    """A number 1 per parameter, as exact as its estimate."""
    return {
        name: torch.ones((), dtype=torch.promote_types(value.dtype, torch.float32), device=value.device)
        for name, value in params.items()
    }


def divided(values: Mapping[str, Tensor], parts: ScaleParts) -> dict[str, Tensor]:
    """Named tensors over a scale."""
    out = {}
    for name, value in values.items():
        for part in parts[name]:
            value = value / part.to(value.dtype)
        out[name] = value
    return out


@dataclass(frozen=True, kw_only=True)
class ScaleThenPrivatise(DPSGD):
    """DP-SGD on gradients that are scaled before they are clipped; the estimate suits any optimiser.

    Args:
        clip_norm: as for DP-SGD; of the scaled row.
        clip_rule: as for DP-SGD.
        per_layer: as for DP-SGD.
        noise_multiplier: as for DP-SGD.
        scale: s: `SecondMoment`, or `FixedScale`.

    Example:
        >>> ScaleThenPrivatise(scale=SecondMoment(by_sides=True)).config()["scale"]["kind"]
        'second_moment'
    """

    name: ClassVar[str] = "scale-then-privatise"
    card: ClassVar[Card] = Card(
        summary="DP-SGD on gradients scaled by earlier ones, so that small entries get small noise.",
        claim="Noise in the geometry of an adaptive optimiser; private at DP-SGD's noise, and proved so.",
        source="Ganesh, McMahan and Thakurta 2025, Private Adaptive Optimizers, arXiv 2507.01129",
        guarantee="proven",
        cost="as DP-SGD, and one copy of the parameters; without by_sides, convolutions and layers over "
        "sequences form their rows for norms",
        use_when="Entries of the gradient differ much in size, and the optimiser is adaptive.",
        avoid_when="The noise is far above the gradients, so that their sizes cannot be seen.",
    )

    scale: Scale = SecondMoment()

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.instance(Scale, "SecondMoment(decay=0.99)", scale=self.scale)

    def init(self, context: Context) -> State:
        return {**super().init(context), "scale": self.scale.start(context.params)}

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        # From earlier releases: one from this draw would be an un-noised statistic of it.
        parts = self.scale.parts(context.params, state["scale"])

        def scaled(rows: PrivateRows) -> PrivateRows:
            return rows.scaled(parts)

        mean, rest = self.clipped_mean(context, {"threshold": state["threshold"]}, view=scaled)
        estimate = divided(mean, parts)
        return estimate, {**rest, "scale": self.scale.learn(state["scale"], estimate)}
