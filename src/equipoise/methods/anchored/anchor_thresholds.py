"""Thresholds of DP-C4 and DP-C4+: for the coupled term and for the anchor gradient.

At step k with iterate x, anchor w, cap C and the released coupled mean h (noise deviation z_1 C_1 / B a
coordinate, d coordinates), the coupled threshold is always

    C_1 = min(C, c_1 L ||x - w||),       never below 1e-30,

and the rules differ in the learned factor L:

==============  =======================================================================================
`dist`          L = 1: of DP-C4+; a function of public points
`curvature`     L <- clip(0.9 L + 0.1 R / ||x - w||, L/4, 4 L),  R = sqrt(max(0, ||h||^2 - d (z_1 C_1 / B)^2))
`tracked`       L <- L exp(-0.2 (b / B + 1/2 - 0.8)),  b a noised count of the rows inside C_1
`raw`           C_1 = min(C, c_1 ||mean of the rows||), DP-C4 as published: a raw private number
==============  =======================================================================================

The anchor threshold starts at C; after anchor gradient g (noise deviation s = z_2 C_2 / n_A) it becomes

==============  =======================================================================================
`quantile`      clip(C_2 exp(-eta (b / n_A + 1/2 - q)), floor, C),  b a noised count of the rows inside C_2
`released`      clip(max(c_2 R, gamma C_2), floor, C),  R = sqrt(max(0, ||g||^2 - d s^2))
`fixed`         C
`raw_current`   min(C, c_2 ||unclipped mean at w||) for this anchor, DP-C4 as published
`raw_prev`      the same of the anchor before, DP-C4+ as published
==============  =======================================================================================

`R` is the norm of a released vector without the part that its noise adds on average; without it the
threshold could never fall below its own noise. Every rule but the raw ones is a function of released values
and public constants.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.methods.thresholds import ReleasedQuantile

__all__ = [
    "ANCHOR_RULES",
    "COUPLED_RULES",
    "FLOOR",
    "RAW_RULES",
    "Released",
    "debiased_norm",
    "distance_between",
    "next_anchor_threshold",
    "next_factor",
    "norm_of",
]


COUPLED_RULES = ("dist", "curvature", "tracked", "raw")


ANCHOR_RULES = ("quantile", "released", "fixed", "raw_current", "raw_prev")


RAW_RULES = frozenset({"raw", "raw_current", "raw_prev"})


FLOOR = 1e-30
"""No threshold falls below it: a bound of zero could not be noised."""


TRACKED_SHARE, TRACKED_RATE = 0.8, 0.2


@dataclass(frozen=True)
class Released:
    """What left with a release and the public constants that made its noise.

    Attributes:
        norm: of the released mean.
        num_parameters: d.
        noise_std: standard deviation of its noise, a coordinate.
        count: released centred count of the rows inside the threshold, or None.
        expected_size: public divisor of the count.
    """

    norm: float
    num_parameters: int
    noise_std: float
    count: float | None
    expected_size: float

    @property
    def debiased(self) -> float:
        """R, the norm without its noise."""
        return debiased_norm(self.norm, self.num_parameters, self.noise_std)


def debiased_norm(norm: float, num_parameters: int, noise_std: float) -> float:
    """sqrt(max(0, norm^2 - d std^2)).

    Example:
        >>> round(debiased_norm(0.5, num_parameters=100, noise_std=0.02), 6)
        0.458258
    """
    return math.sqrt(max(0.0, norm**2 - num_parameters * noise_std**2))


def next_factor(rule: str, factor: float, distance: float, released: Released) -> float:
    """The factor L of the coupled threshold after a release.

    Args:
        rule: of `COUPLED_RULES`.
        factor: L so far.
        distance: ||x - w|| at the release.
        released: the coupled release.

    Example:
        >>> inside = Released(norm=1.0, num_parameters=4, noise_std=0.1, count=50.0, expected_size=100.0)
        >>> round(next_factor("tracked", 1.0, 0.1, inside), 4)  # all rows inside: the factor falls
        0.9608
    """
    if rule == "curvature" and distance > 0:
        # Released noise may throw the ratio anywhere; one step moves the factor by at most 4 either way.
        value = min(max(0.9 * factor + 0.1 * released.debiased / distance, factor / 4), 4 * factor)
    elif rule == "tracked":
        assert released.count is not None
        share = released.count / released.expected_size + 0.5
        value = factor * math.exp(-TRACKED_RATE * (share - TRACKED_SHARE))
    else:
        return factor
    return min(max(value, FLOOR), 1 / FLOOR)


def next_anchor_threshold(
    rule: str,
    clip_norm: float,
    released: Released,
    *,
    cap: float,
    floor: float,
    scale: float,
    shrink_limit: float,
    quantile: ReleasedQuantile,
) -> float:
    """C_2 of the next anchor, from what was released at this one.

    Args:
        rule: "quantile", "released" or "fixed".
        clip_norm: C_2 of this anchor.
        released: the anchor release.
        cap: C.
        floor: the smallest value, >= 0.
        scale: c_2 of `released`.
        shrink_limit: gamma of `released`, in (0, 1].
        quantile: target, rate and limits of `quantile`.

    Example:
        >>> given = dict(cap=1.0, floor=0.0, scale=1.0, quantile=ReleasedQuantile())
        >>> anchor = Released(norm=0.5, num_parameters=100, noise_std=0.02, count=None, expected_size=100.0)
        >>> next_anchor_threshold("released", 1.0, anchor, shrink_limit=0.5, **given)
        0.5
        >>> round(next_anchor_threshold("released", 1.0, anchor, shrink_limit=0.25, **given), 6)
        0.458258
    """
    if rule == "quantile":
        assert released.count is not None
        value = quantile.update(clip_norm, released.count, released.expected_size)
    elif rule == "released":
        value = max(scale * released.debiased, shrink_limit * clip_norm)
    else:
        return cap
    return max(min(max(value, floor), cap), FLOOR)


def norm_of(tensors: Mapping[str, Tensor]) -> float:
    """The Euclidean norm of named public tensors, in float64."""
    squares = [value.detach().double().square().sum() for value in tensors.values()]
    return float(torch.stack([s.cpu() for s in squares]).sum().sqrt()) if squares else 0.0


def distance_between(x: Mapping[str, Tensor], w: Mapping[str, Tensor]) -> float:
    """||x - w|| over the named tensors, the differences taken in the tensors' own type.

    Close floats subtract exactly, so nothing is lost when x nears w.
    """
    return norm_of({name: value - w[name] for name, value in x.items()})
