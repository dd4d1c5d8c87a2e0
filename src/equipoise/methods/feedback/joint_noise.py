"""The noise of DiceSGD's two sums: what a record contributes to body and total, and how they are noised.

A record with gradient norm n contributes min(n, C1) to the body and min(n, Ce) to the total, in the same
direction. `Joint` gives the two sums the noise, with W, V ~ N(0, I) and multiplier sigma,

    total: sigma kappa Ce W        body: sigma (beta kappa Ce W + b V)

After whitening, the record contributes a vector of squared length

    h(n) = (min(n, Ce) / (kappa Ce))^2 + ((min(n, C1) - beta min(n, Ce)) / b)^2,

quadratic on [0, C1], convex on [C1, Ce] and constant after, so that sup h = max(h(C1), h(Ce)).
`joint_params` makes both equal to 1: the pair is one Gaussian release of multiplier sigma.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from equipoise.methods.configuration import Option
from equipoise.privacy.mechanisms.joint_gaussian import JointGaussian, radial_sensitivity

__all__ = [
    "Automatic",
    "Independent",
    "Joint",
    "SumNoise",
    "independent_noise",
    "joint_noise",
    "joint_params",
    "normalising_noise",
    "reach",
]


class SumNoise(Option, ABC):
    """How DiceSGD's two sums are bounded and noised together."""

    normalises: ClassVar[bool] = False
    """Whether gradients and feedback are brought to their radii, and not only shortened to them."""

    @abstractmethod
    def of(self, clip_norm: float, residual_clip_norm: float) -> JointGaussian | None:
        """The noise at the radii C1 and Ce; None where the two sums are one, at Ce = C1."""


@dataclass(frozen=True, kw_only=True)
class Joint(SumNoise):
    """Body and total, with correlated noise: the least noise on the body.

    Args:
        noise_inflation: kappa >= 1; the total's noise grows by it, the body's falls from up to 1.41 C1 at 1
            to up to 1.08 C1 at 1.41.
    """

    kind: ClassVar[str] = "joint"
    noise_inflation: float = 1.0

    def __post_init__(self) -> None:
        _require_inflation(self.noise_inflation)

    def of(self, clip_norm: float, residual_clip_norm: float) -> JointGaussian | None:
        if residual_clip_norm == clip_norm:
            return None
        return joint_noise(clip_norm, residual_clip_norm, self.noise_inflation)


@dataclass(frozen=True, kw_only=True)
class Independent(SumNoise):
    """Body and residual, each with noise of its own: the form to compare with."""

    kind: ClassVar[str] = "independent"

    def of(self, clip_norm: float, residual_clip_norm: float) -> JointGaussian | None:
        if residual_clip_norm == clip_norm:
            return None
        return independent_noise(clip_norm, residual_clip_norm)


@dataclass(frozen=True, kw_only=True)
class Automatic(SumNoise):
    """Normalised gradients in the body, normalised feedback, and correlated noise.

    Args:
        noise_inflation: kappa >= 1, as in `Joint`.
        regulariser: gamma >= 0 of the normalised gradients g / (|g| + gamma).
    """

    kind: ClassVar[str] = "automatic"
    normalises: ClassVar[bool] = True
    noise_inflation: float = 1.0
    regulariser: float = 0.0

    def __post_init__(self) -> None:
        _require_inflation(self.noise_inflation)
        if not 0 <= self.regulariser < math.inf:
            raise ValueError(f"regulariser={self.regulariser!r}: it is a finite number of at least 0")

    def of(self, clip_norm: float, residual_clip_norm: float) -> JointGaussian:
        return normalising_noise(clip_norm, residual_clip_norm, self.noise_inflation, self.regulariser)


def _require_inflation(value: float) -> None:
    if not 1 <= value < math.inf:
        raise ValueError(f"noise_inflation={value!r}: it is a finite factor of at least 1")


def joint_params(
    clip_norm: float, residual_clip_norm: float, noise_inflation: float = 1.0
) -> tuple[float, float]:
    """(beta, b) of the joint release, for which sup h = h(C1) = h(Ce) = 1.

    With r = C1 / Ce, q = (1 - kappa^-2)^(1/2) and s = (1 - (r / kappa)^2)^(1/2):

        b = C1 (1 - r) / (s - r q),        beta = r (1 - q b / C1)

    Args:
        clip_norm: C1 > 0.
        residual_clip_norm: Ce >= C1; at Ce = C1 the two sums are one, beta = 1 and b = 0.
        noise_inflation: kappa >= 1; more noise on the total, less on the body.

    Example:
        >>> beta, b = joint_params(1.0, 10.0)
        >>> round(beta, 6), round(b, 6)
        (0.1, 0.904534)
    """
    if residual_clip_norm == clip_norm:
        return 1.0, 0.0
    r = clip_norm / residual_clip_norm
    q = math.sqrt(1 - noise_inflation**-2)
    s = math.sqrt(1 - (r / noise_inflation) ** 2)
    b = clip_norm * (1 - r) / (s - r * q)
    return r * (1 - q * b / clip_norm), b


def _lower(beta: float, b: float, tail: float) -> list[list[float]]:
    """Cholesky factor of the noise of (body, total) = (beta tail W + b V, tail W)."""
    body = math.hypot(beta * tail, b)
    return [[body, 0.0], [beta * tail * tail / body, tail * b / body]]


def joint_noise(clip_norm: float, residual_clip_norm: float, noise_inflation: float = 1.0) -> JointGaussian:
    """The correlated noise of body (clipped at C1) and total (clipped at Ce > C1).

    Example:
        >>> noise = joint_noise(1.0, 10.0)
        >>> [round(std, 4) for std in noise.standard_deviations]  # alone they would need 1 and 10
        [1.3484, 10.0]
    """
    beta, b = joint_params(clip_norm, residual_clip_norm, noise_inflation)

    def lengths(norms: Tensor) -> Tensor:
        return torch.stack([norms.clamp(max=clip_norm), norms.clamp(max=residual_clip_norm)], dim=1)

    factor = _lower(beta, b, noise_inflation * residual_clip_norm)
    return JointGaussian(("body", "total"), factor, lengths, (clip_norm, residual_clip_norm))


def independent_noise(clip_norm: float, residual_clip_norm: float) -> JointGaussian:
    """Independent noise for body and residual (total minus body): a naive split, also of sensitivity 1.

    Standard deviations (C1 Ce)^(1/2) and ((Ce - C1) Ce)^(1/2). The body's noise is 2.3 times that of the
    joint form at Ce = 10 C1; this is the form to compare with.

    Example:
        >>> [round(std, 4) for std in independent_noise(1.0, 10.0).standard_deviations]
        [3.1623, 9.4868]
    """
    span = residual_clip_norm - clip_norm

    def lengths(norms: Tensor) -> Tensor:
        body = norms.clamp(max=clip_norm)
        return torch.stack([body, norms.clamp(max=residual_clip_norm) - body], dim=1)

    factor = [[math.sqrt(clip_norm * residual_clip_norm), 0.0], [0.0, math.sqrt(span * residual_clip_norm)]]
    return JointGaussian(("body", "residual"), factor, lengths, (clip_norm, residual_clip_norm))


def normalising_noise(
    clip_norm: float, residual_clip_norm: float, noise_inflation: float = 1.0, regulariser: float = 0.0
) -> JointGaussian:
    """The joint noise where the body holds *normalised* gradients, C1 g / (|g| + gamma).

    Constants beta = C1 / Ce and b = C1: with t = min(n, Ce) / Ce the whitened length is
    (t / kappa)^2 + (1 - t)^2 <= 1 for gamma = 0. With gamma > 0 the supremum lies slightly above 1, is found
    numerically, and scales the noise.

    Example:
        >>> [round(std, 4) for std in normalising_noise(1.0, 10.0).standard_deviations]
        [1.4142, 10.0]
    """
    tail = noise_inflation * residual_clip_norm
    factor = _lower(clip_norm / residual_clip_norm, clip_norm, tail)

    def lengths(norms: Tensor) -> Tensor:
        body = clip_norm * norms / (norms + regulariser)
        body = torch.where(norms > 0, body, torch.zeros_like(body))
        # A row of infinite norm never comes here; a huge one is clip_norm / (1 + 0).
        return torch.stack([body, norms.clamp(max=residual_clip_norm)], dim=1)

    marks = (clip_norm, residual_clip_norm)
    above = max(1.0, radial_sensitivity(lengths, factor, marks))
    if above > 1:
        above *= 1 + 1e-6  # the grid on which the supremum is taken is fine, not infinite
    scaled = [[above * entry for entry in row] for row in factor]
    return JointGaussian(("body", "total"), scaled, lengths, marks)


def reach(
    noise_multiplier: float,
    clip_norm: float,
    residual_clip_norm: float,
    *,
    num_parameters: int,
    steps: int,
    expected_batch_size: float,
    noise_inflation: float = 1.0,
) -> float:
    """The feedback radius C2 below which noise keeps the feedback from arriving within the training.

    Noise of standard deviation s per coordinate enters the memory at every step; the clipped feedback forgets
    over about s^2 d / (2 C2^2) steps. C2 >= s (5 d / T)^(1/2) makes that at most a tenth of the training.

    Example:
        >>> round(reach(0.927, 1.0, 10.0, num_parameters=22_000_000, steps=150, expected_batch_size=1000), 2)
        7.18
    """
    beta, b = joint_params(clip_norm, residual_clip_norm, noise_inflation)
    spread = math.hypot(noise_inflation * residual_clip_norm * (1 - beta), b)
    return noise_multiplier * spread / expected_batch_size * math.sqrt(5 * num_parameters / steps)
