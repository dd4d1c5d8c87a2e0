"""Gradients in units of their own size per entry: before they are clipped, or after they are released.

`RandomSparsification`, `ScaleThenPrivatise`, `AdaClip` and `JointWhitening` clip a public linear view of each
record's gradient and undo it after the release; `DPAdamBC` divides by second moments after the release. What
each follows is made of earlier releases and public numbers, never of the draw that it scales.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from equipoise import _validate
from equipoise.methods.base import Context, Parameters, Plan, Setting, State
from equipoise.methods.configuration import BelowOne, Count, FromZero, Noise, Option, Positive, Share, UpToOne
from equipoise.methods.dp_sgd import DPSGD
from equipoise.methods.estimator import Estimator, Sums, View
from equipoise.methods.named_tensors import zeros_like
from equipoise.privacy import Gaussian, PrivateRows, Release, input_moments

LEAST_DAMPING = 1e-4
"""Of joint whitening: the least that is added to an eigenvalue before its root, whatever the noise.

A choice: with less, directions in which inputs hardly vary are stretched more; with more, whitening does
less.
"""


@dataclass(frozen=True, kw_only=True)
class RandomSparsification(Estimator):
    """RSDP: DP-SGD on a fresh random part of the coordinates at every step.

        estimate = m * (sum_i min(1, C / ||m * g_i||) (m * g_i) + N(0, (z C)^2 I)) / B,   m in {0, 1}^P public

    The norms of masked rows need the rows, which are formed parameter by parameter: dearer than DP-SGD.

    Guarantee: that of DP-SGD at the same noise. The mask is public randomness of the step, and a masked row
    is clipped after it was masked. Noise on the dropped coordinates is drawn and thrown away, which is
    post-processing.

    Source: Zhu and Blaschko 2021, "Improving Differentially Private SGD via Randomly Sparsified Gradients",
    arXiv 2112.00845.

    Args:
        clip_norm: C > 0.
        clip_rule: weighs the rows.
        drop_rate: share of the coordinates that is dropped, in [0, 1).
        noise_multiplier: z; calibrated to the budget when None.

    Example:
        >>> RandomSparsification(clip_norm=0.1, drop_rate=0.5).config()["drop_rate"]
        0.5
    """

    clip_norm: Positive = 1.0
    noise_multiplier: Noise = None
    drop_rate: BelowOne = 0.3

    def view(self, context: Context, state: State) -> View:
        # Public chance: a mask that followed the gradients would say where they are large.
        rng = context.public_rng(context.step)
        masks = {
            name: (torch.rand(value.shape, generator=rng) >= self.drop_rate).to(value)
            for name, value in context.params.items()
        }
        return View(
            lambda rows: rows.scaled(masks),
            back=lambda mean: {name: value * masks[name] for name, value in mean.items()},
        )


# ---- scale, then privatise

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
    value: Positive = 1.0

    def parts(self, params: Parameters, memory: State) -> ScaleParts:
        return {name: (scale.fill_(self.value),) for name, scale in _ones(params).items()}


@dataclass(frozen=True)
class SecondMoment(Scale):
    """One over the root of the mean square of earlier estimates.

        s = (1 + floor) m / (sqrt(v^) + floor m),       m^2 = mean of v^ over all entries

    where v^ is the average of squared estimates over about 1 / (1 - decay) steps, with Adam's correction for
    the start. It is 1 at the first step and wherever all entries are alike, and at most 1 + 1 / floor. A row
    as large in every entry as sqrt(v^) keeps its norm, up to the floor: C stays a norm of gradients.

    Args:
        decay: of the average, in [0, 1).
        floor: > 0, what is added to the root, as a share of its size over all entries.
        by_sides: one number per row and per column of a matrix, or per channel, whose product is the scale,
            in place of one per entry. Norms then come from products in every layer.
    """

    kind: ClassVar[str] = "second_moment"
    decay: BelowOne = 0.99
    # A smaller floor would let scales be huge.
    floor: Annotated[float, partial(_validate.within, "[1e-6, inf)")] = 0.1
    by_sides: bool = False

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


@dataclass(frozen=True, kw_only=True)
class ScaleThenPrivatise(DPSGD):
    """DP-SGD on gradients that are scaled before they are clipped; the estimate suits any optimiser.

        u_t = (sum_i clip(s_t * g_i, C) + N(0, (z C)^2 I)) / B
        estimate_t = u_t / s_t                                          entry by entry

    so that the noise has the shape of 1 / s_t. With s_t from the second moments of earlier estimates, entries
    that were small get small noise and large entries large noise, as an adaptive optimiser weighs them. In
    the paper s is 1 / (sqrt(v) + eps) and the clip norm one of scaled gradients. A constant scale s is DP-SGD
    with clip norm C / s: ``clip(s g, C) / s = clip(g, C / s)``, noise included; 1 is DP-SGD, bit for bit.

    Guarantee: that of DP-SGD at the same noise. s_t is made of released values and public numbers, so it is
    the same with a record and without it. The scaled row of a record is made of nothing but that record and
    is clipped after it was scaled: a record moves the sum by at most C. The division is post-processing.

    Source: Ganesh, McMahan and Thakurta 2025, "On Design Principles for Private Adaptive Optimizers", arXiv
    2507.01129.

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

    scale: Scale = SecondMoment()

    def start(self, params: Parameters) -> State:
        return {"scale": self.scale.start(params)}

    def view(self, context: Context, state: State) -> View:
        parts = self.scale.parts(context.params, state["scale"])

        def unscaled(mean: dict[str, Tensor]) -> dict[str, Tensor]:
            for name, scales in parts.items():
                for scale in scales:
                    mean[name] = mean[name] / scale.to(mean[name].dtype)
            return mean

        return View(lambda rows: rows.scaled(parts), back=unscaled)

    def update(
        self, context: Context, state: State, mean: dict[str, Tensor], released: Sums
    ) -> tuple[dict[str, Tensor], State]:
        return mean, {"scale": self.scale.learn(state["scale"], mean)}


@dataclass(frozen=True, kw_only=True)
class AdaClip(DPSGD):
    """DP-SGD on centred and scaled gradients; the estimate suits any optimiser.

        w_i = (g_i - a_t) / b_t,      u_t = (sum_i clip(w_i, C) + N(0, (z C)^2 I)) / B
        estimate_t = a_t + b_t u_t                                      entry by entry

    a is the mean of earlier estimates and b follows their spread s. For a given clip norm of w the sum of the
    noise's variances, C^2 sum_j b_j^2, is least where b_j is proportional to sqrt(s_j): the root of a
    standard deviation, where scaling by second moments takes s_j itself. As used here

        b_j = sqrt(s_j sum(s) / sum(s^2))

    a row that differs from a by s_j in every entry keeps its length, so that C stays a norm of gradients; the
    paper's constants are those for which such a row has length 1. Only ratios of s count: releases tell the
    spread of a mean of records, and not that of the records.

    With E_t the average over about 1 / (1 - decay) steps, with Adam's correction for the start,

        a = E[estimate],   v = E[(estimate - a)^2 - (z C b / B)^2],   s = sqrt(max(v, (floor m)^2))

    with m^2 the mean of the positive part of v over all entries: the noise is known and is subtracted. Where
    the noise leaves nothing of v, s is the same for all entries. At the first step a is 0 and b is 1. With
    `centred` off and all s alike it is DP-SGD.

    Guarantee: that of DP-SGD at the same noise. a_t and b_t are made of released values and public numbers.
    The row of a record is made of that record alone and clipped after it was moved and scaled: a record moves
    the sum by at most C. A record that is not drawn adds nothing, so a is added once, whoever was drawn.

    Source: Pichapati, Suresh, Yu, Reddi and Kumar 2019, "AdaCliP: Adaptive Clipping for Private SGD", arXiv
    1908.07643.

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

    decay: BelowOne = 0.99
    floor: Annotated[float, partial(_validate.within, "[1e-6, 1]")] = 0.1
    centred: bool = True

    def start(self, params: Parameters) -> State:
        return {"mean": zeros_like(params), "spread": zeros_like(params), "steps": 0}

    def view(self, context: Context, state: State) -> View:
        centre, divisor = self.geometry(state)

        def moved(rows: PrivateRows) -> PrivateRows:
            if self.centred:
                rows = rows.shifted({name: -value for name, value in centre.items()})
            return rows.scaled({name: 1 / value for name, value in divisor.items()})

        def back(mean: dict[str, Tensor]) -> dict[str, Tensor]:
            out = {name: value * divisor[name].to(value.dtype) for name, value in mean.items()}
            if not self.centred:
                return out
            return {name: value + centre[name].to(value.dtype) for name, value in out.items()}

        return View(moved, back=back)

    def update(
        self, context: Context, state: State, mean: dict[str, Tensor], released: Sums
    ) -> tuple[dict[str, Tensor], State]:
        centre, divisor = self.geometry(state)
        std = self.noise_std(context, state)
        averages, spread = {}, {}
        for name, kept in state["mean"].items():
            value = mean[name].to(kept.dtype)
            averages[name] = kept.lerp(value, 1 - self.decay)
            apart = (value - centre[name]).square() - (std * divisor[name]).square()
            spread[name] = state["spread"][name].lerp(apart, 1 - self.decay)
        return mean, {"mean": averages, "spread": spread, "steps": state["steps"] + 1}

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


@dataclass(frozen=True, kw_only=True)
class DPAdamBC(DPSGD):
    """Adam on DP-SGD's estimates, corrected for the noise that it knows; give it `torch.optim.SGD`.

        u_t = (sum_i clip(g_i, C) + N(0, (z C)^2 I)) / B                            DP-SGD's estimate
        m_t = beta1 m_{t-1} + (1 - beta1) u_t,     v_t = beta2 v_{t-1} + (1 - beta2) u_t^2
        estimate_t = m^_t / (sqrt(max(v^_t - Phi_t, floor Phi_t)) + eps),   Phi = (z C / B)^2

    with the hats for division by 1 - beta^t. The noise adds Phi to every entry of v^, far more than the
    gradient does, so that Adam on DP-SGD's estimates divides all entries by nearly the same number and is SGD
    with momentum. Phi is known, and is subtracted. Where C_t changes, Phi_t is the same average of
    (z C_t / B)^2.

    The estimate is the whole step of Adam: `torch.optim.SGD` takes it, and its weight decay is AdamW's.
    Without noise it is Adam's, bit for bit where the learning rate is a power of two, and to rounding
    elsewhere. The paper's floor is a number in units of squared gradients. Here it is a share of Phi, which
    needs no tuning to the model's scale and is zero without noise.

    Guarantee: that of DP-SGD. All of it is made of released values and public numbers, post-processing.

    Source: Tang, Shpilevskiy and Lécuyer 2024, "DP-AdamBC", arXiv 2312.14334.

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

    is_whole_step = True

    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.999
    eps: FromZero = 1e-8
    floor: UpToOne = 0.01

    def start(self, params: Parameters) -> State:
        return {"first": zeros_like(params), "second": zeros_like(params), "noise": 0.0, "steps": 0}

    def update(
        self, context: Context, state: State, mean: dict[str, Tensor], released: Sums
    ) -> tuple[dict[str, Tensor], State]:
        return self.direction(mean, state, self.noise_std(context, state))

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


@dataclass(frozen=True, kw_only=True)
class JointWhitening(DPSGD):
    """DP-SGD on inputs whitened by their second moment, which leaves with the gradients.

    With G_i the gradient of record i for a weight W [d_out, d_in], P the root in use and L weights to whiten,

        u = sum_i clip(G_i P, C) + C z_1 N                     the other parameters clipped along with it
        M = sum_i G_i^T G_i / |G_i|^2 + L^(1/2) z_2 N'         symmetrised; for one input x: x x^T / |x|^2
        z_1 = z / (1 - s)^(1/2),     z_2 = z / s^(1/2)         s: the share of the second moments
        estimate = u P / B

    where z is what DP-SGD needs at the same budget. After 1, 2, 4, 8, ... steps t, P becomes

        R = (M_1 + ... + M_t) / (B t),     d = max(1e-4, (L^(1/2) z_2 / (B t^(1/2))) (2 d_in)^(1/2))
        P = c (R_+ + d I)^(-1/2)

    R_+ has no negative eigenvalues, and c is such that tr(P R_+ P) = tr R_+: an average input keeps its
    length. d is about the norm of the noise in R: directions below it cannot be told from noise.

    Guarantee: that of DP-SGD at multiplier z. P is made of earlier releases and public numbers, so it is the
    same with a record and without it, and a record moves u by at most C. It moves the second moments of all
    weights together by at most L^(1/2) (`privacy/bounds/second_moments.py`). Divided by their noise, the two
    sums move by at most ((1 - s) / z^2 + s / z^2)^(1/2) = 1 / z: one Gaussian of multiplier z per draw.
    Symmetrising, P and u P are post-processing.

    Source: this library. `docs/methods/joint-whitening.md` has the derivation,
    `docs/measurements/methods-compared.md` the results.

    Args:
        clip_norm: as for DP-SGD; of the row after its inputs are whitened.
        clip_rule: as for DP-SGD.
        per_layer: as for DP-SGD.
        noise_multiplier: z, of gradients and second moments together; calibrated to the budget when None.
        share: s in (0, 1), what the second moments take of 1 / z^2.
        most_inputs: weights with more inputs stay as in DP-SGD, since time grows with their cube.

    Example:
        >>> JointWhitening(clip_norm=0.5).config()["share"]
        0.2
    """

    share: Share = 0.2
    most_inputs: Count = 2048

    def plan(self, setting: Setting) -> Plan:
        def moments(noise_multiplier: float) -> list[Release]:
            return [Release("input_moments", 1.0, Gaussian(noise_multiplier / math.sqrt(self.share)))]

        gradient = math.sqrt(1 - self.share)
        return Plan(self.calibrated(setting, lambda z: Gaussian(z / gradient), others=moments))

    def start(self, params: Parameters) -> State:
        widths = self.widths(params)
        if not widths:
            raise ValueError(
                f"most_inputs={self.most_inputs}: the model has no weight matrix with so few inputs, so that "
                "there is nothing to whiten. Raise it, or take DPSGD"
            )
        sums = {
            name: torch.zeros(width, width, dtype=torch.float64, device=params[name].device)
            for name, width in widths.items()
        }
        return {"moments": sums, "roots": {}, "steps": 0}

    def widths(self, params: Parameters) -> dict[str, int]:
        """The inputs of the weights that are whitened, by name: matrices, outputs by inputs."""
        return {
            name: value.shape[1]
            for name, value in params.items()
            if value.ndim == 2 and value.shape[1] <= self.most_inputs
        }

    def view(self, context: Context, state: State) -> View:
        names, roots = list(state["moments"]), state["roots"]

        def back(mean: dict[str, Tensor]) -> dict[str, Tensor]:
            return mean | {name: mean[name] @ root.to(mean[name].dtype) for name, root in roots.items()}

        return View(
            lambda rows: rows.multiplied(roots),
            back=back,
            sums=lambda rows: {"input_moments": input_moments(rows, names)},
        )

    def update(
        self, context: Context, state: State, mean: dict[str, Tensor], released: Sums
    ) -> tuple[dict[str, Tensor], State]:
        size, steps = context.sampling.expected_size, state["steps"] + 1
        roots, unit = dict(state["roots"]), math.sqrt(len(state["moments"]))
        sums = {}
        for name, kept in state["moments"].items():
            # The moment is symmetric and its noise is not: the noise's other half only disturbs.
            value = released["input_moments"][name].to(kept.dtype) * unit
            sums[name] = kept + (value + value.t()) / 2
        if steps & (steps - 1) == 0:  # 1, 2, 4, ...
            mechanism = context.plan.releases["input_moments"].mechanism
            std = mechanism.standard_deviation("input_moments", 1.0) * unit / (size * math.sqrt(steps))
            roots = {name: whitening_root(total / (size * steps), std) for name, total in sums.items()}
        return mean, {"moments": sums, "roots": roots, "steps": steps}


def whitening_root(moment: Tensor, std: float) -> Tensor:
    """c (R_+ + d I)^(-1/2), which leaves an average input as long as it was.

    Args:
        moment: R, symmetric, the mean of released sums.
        std: of the noise in each entry of R on the diagonal.

    Example:
        >>> whitening_root(torch.diag(torch.tensor([4.0, 1.0]).double()), 0.0)  # doctest: +ELLIPSIS
        tensor([[0.79..., 0.0000],
                [0.0000, 1.58...]], dtype=torch.float64)
    """
    values, vectors = torch.linalg.eigh(moment)
    values = values.clamp(min=0)
    total = values.sum()
    if total == 0:  # nothing but noise
        return torch.eye(len(values), dtype=moment.dtype, device=moment.device)
    # What lies below the norm of the noise cannot be told from it.
    damping = max(LEAST_DAMPING, std * math.sqrt(2 * len(values)))
    half = (values + damping).rsqrt()
    half = half * (total / (half.square() * values).sum()).sqrt()
    return (vectors * half) @ vectors.t()
