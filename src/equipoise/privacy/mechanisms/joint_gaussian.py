"""Joint releases with correlated noise for sums of the same directions.

Several sums of one draw whose summands are collinear, record by record:

    S_j = sum_i (w_j(n_i) / n_i) g_i,   n_i = |g_i|,   j = 1..m

get noise sigma * (L z)_j with z_1..z_m independent standard normal vectors and L the lower Cholesky factor.
After whitening by L, a record of norm n contributes a vector of length

    h(n) = |L^-1 (w_1(n), ..., w_m(n))|,

so that sup_n h(n) <= 1 makes the joint release one Gaussian of multiplier sigma (DiceSGD's joint form; Zhang
et al. 2024 for the method). `radial_sensitivity` looks for the supremum on a grid of norms, which tells
whether the noise fits the weights. The proof does not rest on the grid: `clip_jointly` computes h of every
record from the lengths that it is about to use, and makes a record shorter, in all sums alike, where h or one
of the sums' bounds is exceeded. By how much that may happen between the points of the grid is of no
consequence.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from equipoise.privacy.bounds.bounded import Bounded
from equipoise.privacy.bounds.requirements import public_threshold
from equipoise.privacy.draw import Draw
from equipoise.privacy.mechanisms.gaussian import Streams, Sums, _normals
from equipoise.privacy.noise.secrets import Secrets
from equipoise.privacy.private import unwrap

RadialWeights = Callable[[torch.Tensor], torch.Tensor]


TOLERANCE = 1e-6  # of whitened lengths and of bounds, the rounding of float32


@dataclass(frozen=True)
class CorrelatedNoise:
    """Noise shared between the sums `names` of a draw.

    Args:
        names: release names, in the order of the factor's rows; the first one carries the multiplier.
        cholesky: lower triangular [m, m] in units of the gradient, with a diagonal above 0; the noise is
            `noise_multiplier * cholesky @ z`.
        radial_weights: from norms [B] to lengths [B, m] of a record's contribution to each sum, non-negative.
        breakpoints: norms where the weights bend (thresholds); beyond the largest the weights must be
            constant.

    Raises:
        ValueError: if the whitened length of some record exceeds 1, or a sum has no noise of its own.

    Example:
        >>> flat = lambda n: n.clamp(max=2.0)[:, None]
        >>> noise = CorrelatedNoise(("gradient",), [[2.0]], flat, breakpoints=(2.0,))
        >>> round(noise.sensitivity, 6)
        1.0
    """

    names: tuple[str, ...]
    cholesky: Sequence[Sequence[float]]
    radial_weights: RadialWeights
    breakpoints: tuple[float, ...]
    sensitivity: float = field(init=False)
    bounds: tuple[float, ...] = field(init=False)
    identity: str = field(init=False)

    def __post_init__(self) -> None:
        factor = np.asarray(self.cholesky, dtype=np.float64)
        size = len(self.names)
        if factor.shape != (size, size) or not np.allclose(factor, np.tril(factor)):
            raise ValueError(
                f"cholesky must be lower triangular of shape {(size, size)} for names {self.names}"
            )
        if not (np.diag(factor) > 0).all():
            raise ValueError(
                f"cholesky has the diagonal {np.diag(factor).tolist()}, which must be above 0: a sum whose "
                "noise follows from the others' is a function of theirs up to rounding, which would show; "
                "release such sums once"
            )
        grid = radial_grid(self.breakpoints)
        lengths = self._lengths(grid)
        sensitivity = radial_sensitivity(self.radial_weights, factor, self.breakpoints)
        if not sensitivity <= 1 + TOLERANCE:
            raise ValueError(
                f"the whitened length of a record reaches {sensitivity:.6g}, above 1: the noise would not "
                "cover it; multiply "
                f"cholesky by {sensitivity:.6g}"
            )
        object.__setattr__(self, "cholesky", tuple(map(tuple, factor.tolist())))
        object.__setattr__(self, "sensitivity", sensitivity)
        object.__setattr__(self, "bounds", tuple(float(b) for b in lengths.max(dim=0).values))
        text = repr((self.names, self.cholesky, self.breakpoints, lengths.numpy().tobytes().hex()))
        object.__setattr__(self, "identity", hashlib.sha256(text.encode()).hexdigest()[:16])

    @property
    def standard_deviations(self) -> tuple[float, ...]:
        """Standard deviation of each sum's noise, to be multiplied by the noise multiplier."""
        return tuple(math.hypot(*row) for row in self.cholesky)

    def _lengths(self, norms: torch.Tensor) -> torch.Tensor:
        lengths = self.radial_weights(norms)
        if lengths.shape != (norms.shape[0], len(self.names)):
            raise ValueError(
                f"radial_weights returned shape {tuple(lengths.shape)}, expected "
                f"{(norms.shape[0], len(self.names))}"
            )
        return lengths

    def shrinkage(self, lengths: torch.Tensor) -> torch.Tensor:
        """The factors [B], at most 1, by which records with these lengths [B, m] keep to noise and bounds.

        h and the lengths over their bounds come down to 1 where one of them is above; what is within the
        rounding of float32 stays as it is.
        """
        excess = _whitened_norms(lengths, self.cholesky)
        for length, bound in zip(lengths.abs().unbind(dim=1), self.bounds, strict=True):
            if bound > 0:  # the ledger releases no sum without a bound
                excess = torch.maximum(excess, length / bound)
        return torch.where(excess > 1 + TOLERANCE, 1 / excess, torch.ones_like(excess))


def radial_grid(breakpoints: Sequence[float], points: int = 4001) -> torch.Tensor:
    """Norms from 0 to far beyond the last breakpoint, dense around every breakpoint, float64."""
    marks = sorted(public_threshold("breakpoints", b) for b in breakpoints)
    if not marks:
        raise ValueError("breakpoints is empty; give the norms where the weights bend (the thresholds)")
    inner = np.concatenate(
        [np.linspace(0, marks[-1], points), *(m * np.linspace(0.99, 1.01, 201) for m in marks)]
    )
    outer = marks[-1] * np.logspace(0, 8, 161)
    return torch.from_numpy(np.unique(np.concatenate([inner, outer, marks, [0.0]])))


def radial_sensitivity(
    weights: RadialWeights, cholesky: np.ndarray | Sequence, breakpoints: Sequence[float]
) -> float:
    """sup_n |L^-1 w(n)| on the grid of `radial_grid`; infinite for negative or non-finite weights.

    Args:
        weights: from norms [B] to lengths [B, m].
        cholesky: L, lower triangular [m, m] with a diagonal above 0.
        breakpoints: norms where the weights bend.
    """
    lengths = weights(radial_grid(breakpoints)).double()
    if not bool(torch.isfinite(lengths).all()) or bool((lengths < 0).any()):
        return float("inf")
    return float(_whitened_norms(lengths, cholesky).max())


def _whitened_norms(lengths: torch.Tensor, cholesky: np.ndarray | Sequence) -> torch.Tensor:
    """|L^-1 w| [B] of lengths w [B, m], by forward substitution in the lengths' own precision."""
    whitened: list[torch.Tensor] = []
    for j, row in enumerate(cholesky):
        rest = lengths[:, j]
        for k in range(j):
            rest = rest - whitened[k] * float(row[k])
        whitened.append(rest / float(row[j]))
    return torch.stack(whitened, dim=1).norm(dim=1)


def correlated(
    secrets: Secrets,
    draw: Draw,
    sums: Mapping[str, Bounded],
    noise: CorrelatedNoise,
    scale: float,
    purpose: str,
) -> Sums:
    """The sums of one draw with noise that they share: scale * (L z)_j for the j-th of them.

    `purpose` is the stream's.
    """
    streams: Streams = {}
    first = {name: unwrap(raw) for name, raw in sums[noise.names[0]].value.items()}
    normals = [_normals(secrets, draw, first, scale, purpose, streams) for _ in noise.names]
    out: Sums = {name: {} for name in sums}
    for j, name in enumerate(noise.names):
        for tensor in first:
            total = unwrap(sums[name].value[tensor]).to(normals[0][tensor].dtype).clone()
            for k in range(j + 1):
                total.add_(normals[k][tensor], alpha=noise.cholesky[j][k])
            out[name][tensor] = total
    return out
