"""Clip rules: from the norm of a record's gradient to the weight that it gets in the sum.

A rule is a small frozen object with one function, `weights(norms, threshold)`, and one promise:
``weight * norm <= threshold`` for every norm, so that adding or removing a record moves the weighted
sum by at most the threshold C. With n = ||g_i||:

==========  ==========================  ===============================================================
rule        weight                      source
==========  ==========================  ===============================================================
`Abadi`     min(1, C / n)               Abadi et al. 2016, "Deep Learning with Differential Privacy"
`AutoS`     C / (n + gamma)             Bu et al. 2022, "Automatic Clipping" (AUTO-S)
`NSGD`      C / (n + r)                 Yang et al. 2022, "Normalized/Clipped SGD with Perturbation"
`PSAC`      C / (n + r / (n + r))       Xia et al. 2023, "DP Learning with Per-Sample Adaptive Clipping"
==========  ==========================  ===============================================================

The last three weigh small gradients up: their weights may exceed 1, the weighted norm stays below C. A norm
of zero gets a finite weight, a norm that is not finite (a record with NaN or infinity) gets weight zero.

The norm that a rule divides by is raised by four units in the last place, so that rounding in ``weight *
norm`` never carries a record above the threshold.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from equipoise import _validate
from equipoise.methods.configuration import Option, Positive


class ClipRule(Option, ABC):
    """A function from row norms to row weights with ``weight * norm <= threshold``."""

    def weights(self, norms: Tensor, threshold: float | Tensor) -> Tensor:
        """The weights of the rows.

        Args:
            norms: row norms, [B] or [B, m] (one column per group of parameters), floating point, >= 0.
            threshold: C > 0; a number, or a tensor that broadcasts against `norms` ([m] for groups).

        Returns:
            A tensor of the shape of `norms`. Rows whose norm is not finite get exactly zero.

        Example:
            >>> Abadi().weights(torch.tensor([0.0, 0.5, 4.0, torch.nan]), 1.0)
            tensor([1.0000, 1.0000, 0.2500, 0.0000])
        """
        weights = self._weights(norms * (1 + 4 * torch.finfo(norms.dtype).eps), threshold)
        # An infinite norm has weight C / inf = 0 by every rule's formula; a NaN is left to set to zero.
        return torch.nan_to_num(weights, nan=0.0)

    @abstractmethod
    def _weights(self, norms: Tensor, threshold: float | Tensor) -> Tensor:
        """The weights for norms in [0, inf]; zero at infinity."""


@dataclass(frozen=True)
class Abadi(ClipRule):
    """Plain clipping, min(1, C / n): rows inside the ball of radius C stay as they are."""

    kind: ClassVar[str] = "abadi"

    def _weights(self, norms: Tensor, threshold: float | Tensor) -> Tensor:
        # C / max(n, C) is min(1, C / n) without a division by zero.
        return threshold / torch.clamp(norms, min=threshold)


@dataclass(frozen=True)
class AutoS(ClipRule):
    """Automatic clipping with stability constant gamma: C / (n + gamma).

    Args:
        gamma: > 0; 0.01 in the paper.
    """

    gamma: Positive = 0.01
    kind: ClassVar[str] = "auto_s"

    def _weights(self, norms: Tensor, threshold: float | Tensor) -> Tensor:
        return threshold / (norms + self.gamma)


@dataclass(frozen=True)
class NSGD(ClipRule):
    """Normalised gradients with a regulariser r: C / (n + r).

    The formula is AUTO-S's; the paper reads r as a trade of bias for noise and lets it grow to the size of
    the gradients, where AUTO-S keeps gamma tiny.

    Args:
        regulariser: r > 0.
    """

    regulariser: Positive = 0.01
    kind: ClassVar[str] = "nsgd"

    def _weights(self, norms: Tensor, threshold: float | Tensor) -> Tensor:
        return threshold / (norms + self.regulariser)


@dataclass(frozen=True)
class PSAC(ClipRule):
    """Per-sample adaptive clipping: C / (n + r / (n + r)); small gradients are not blown up to the threshold.

    The weight is at most C / (2 sqrt(r) - r) for r < 1; at n = 0 it is C.

    Args:
        regulariser: r > 0.
    """

    regulariser: Positive = 0.01
    kind: ClassVar[str] = "psac"

    def _weights(self, norms: Tensor, threshold: float | Tensor) -> Tensor:
        return threshold / (norms + self.regulariser / (norms + self.regulariser))


def layers(names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Group parameter names by the module that owns them: the groups of per-layer clipping.

    Example:
        >>> layers(["0.weight", "0.bias", "scale", "2.weight"])
        (('0.weight', '0.bias'), ('scale',), ('2.weight',))
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        owner, _, leaf = name.rpartition(".")
        # A parameter of the root module is a layer of its own: the root is the whole model, not a layer.
        groups.setdefault(owner or f".{leaf}", []).append(name)
    return tuple(tuple(group) for group in groups.values())


def check_shares(per_layer: bool | Mapping[str, float]) -> None:
    """Raise a ValueError where a layer's share of C^2 is not above zero."""
    if isinstance(per_layer, Mapping):
        _validate.positive(**{f"per_layer[{layer!r}]": share for layer, share in per_layer.items()})


def layer_shares(
    names: Sequence[str], per_layer: bool | Mapping[str, float]
) -> tuple[tuple[tuple[str, ...], ...], tuple[float, ...]]:
    """The layers of per-layer clipping, and the factors of their thresholds, with squares that sum to one.

    Args:
        names: parameter names.
        per_layer: True for equal factors, or a mapping from module paths to shares of C^2.

    Raises:
        ValueError: a layer without a share.

    Example:
        >>> layer_shares(["0.weight", "0.bias", "2.weight"], {"0": 16.0, "2": 9.0})
        ((('0.weight', '0.bias'), ('2.weight',)), (0.8, 0.6))
    """
    groups = layers(tuple(names))
    if not isinstance(per_layer, Mapping):
        return groups, (len(groups) ** -0.5,) * len(groups)
    shares = []
    for group in groups:
        owner = group[0].rpartition(".")[0] or group[0]
        if owner not in per_layer:
            raise ValueError(
                f"per_layer has no share for {owner!r}; it has {sorted(per_layer)}. Give every layer that "
                "holds trainable parameters its share of C^2, or per_layer=True for equal shares."
            )
        shares.append(float(per_layer[owner]))
    return groups, tuple(math.sqrt(share / sum(shares)) for share in shares)
