"""Several sums of the same directions with correlated noise, as one Gaussian mechanism.

Several sums of one draw whose summands are collinear, record by record:

    S_j = sum_i (w_j(n_i) / n_i) g_i,   n_i = |g_i|,   j = 1..m

get noise sigma * (L z)_j with z_1..z_m independent standard normal vectors and L the lower Cholesky factor.
After whitening by L, a record of norm n contributes a vector of length

    h(n) = |L^-1 (w_1(n), ..., w_m(n))|,

so that sup_n h(n) <= 1 makes the joint release one Gaussian of multiplier sigma.

`radial_sensitivity` looks for the supremum on a grid of norms, which tells whether the noise fits the
weights. The proof does not rest on the grid: `clip_jointly` computes h of every record from the lengths that
it is about to use. Where h or one of the sums' bounds is exceeded, it makes the record shorter in all sums
alike. So it does not matter by how much h exceeds 1 between the points of the grid.

Source: this library, for DiceSGD (`methods/dice_sgd.py`; Zhang et al. 2024 for the method).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import numpy as np

from equipoise.privacy._torch_side import Bounded, ReleaseStreams, keyed, private, requirements, torch
from equipoise.privacy.mechanisms.base import Mechanism, Past, Sums, require_carried

RadialWeights = Callable[["torch.Tensor"], "torch.Tensor"]
"""From norms [B] to lengths [B, m] of a record's contribution to each sum, non-negative."""

# Of whitened lengths and of bounds: the rounding of float32 (8 eps). A larger one lets records pass their
# bound by as much, a smaller one refuses matrices for their rounding.
WHITENED_TOLERANCE = 1e-6


@final
@dataclass(frozen=True)
class JointGaussian(Mechanism):
    """Noise that the sums `names` of a draw share. All their releases carry it, and leave together.

    Args:
        names: release names, in the order of the factor's rows.
        cholesky: lower triangular [m, m] in units of the gradient, with a diagonal above 0; the noise is
            `noise_multiplier * cholesky @ z`.
        radial_weights: from norms [B] to lengths [B, m] of a record's contribution to each sum, non-negative.
            None in a mechanism that was read back: sums cannot be made for it, all else can be computed.
        breakpoints: norms where the weights bend (thresholds); beyond the largest the weights must be
            constant.
        noise_multiplier: sigma.
        bounds, identity: largest length of each sum, and a digest of all but sigma; computed where
            `radial_weights` is given.

    Raises:
        ValueError: if the whitened length of some record exceeds 1, or a sum has no noise of its own.

    Example:
        >>> flat = lambda n: n.clamp(max=2.0)[:, None]
        >>> noise = JointGaussian(("gradient",), [[2.0]], flat, breakpoints=(2.0,))
        >>> round(noise.sensitivity, 6)
        1.0
    """

    names: tuple[str, ...]
    cholesky: Sequence[Sequence[float]]
    radial_weights: RadialWeights | None = field(compare=False)
    breakpoints: tuple[float, ...]
    noise_multiplier: float = 1.0
    bounds: tuple[float, ...] = ()
    identity: str = ""
    kind: ClassVar[str] = "joint_gaussian"

    def __post_init__(self) -> None:
        super().__post_init__()
        factor = np.asarray(self.cholesky, dtype=np.float64)
        size = len(self.names)
        if factor.shape != (size, size) or not np.allclose(factor, np.tril(factor)):
            raise ValueError(
                f"cholesky must be lower triangular of shape {(size, size)} for names {self.names}"
            )
        if not (np.diag(factor) > 0).all():
            raise ValueError(
                f"cholesky has the diagonal {np.diag(factor).tolist()}, which must be above 0. Otherwise the "
                "noise of one sum follows from that of others, up to a rounding that would show. Release "
                "such sums once"
            )
        object.__setattr__(self, "names", tuple(self.names))
        object.__setattr__(self, "cholesky", tuple(map(tuple, factor.tolist())))
        object.__setattr__(self, "breakpoints", tuple(self.breakpoints))
        if self.radial_weights is None:
            self._check_read_back()
            return
        lengths = self.lengths(radial_grid(self.breakpoints))
        sensitivity = self.sensitivity
        if not sensitivity <= 1 + WHITENED_TOLERANCE:
            raise ValueError(
                f"the whitened length of a record reaches {sensitivity:.6g}, above 1: the noise would not "
                f"cover it; multiply cholesky by {sensitivity:.6g}"
            )
        object.__setattr__(self, "bounds", tuple(float(b) for b in lengths.max(dim=0).values))
        text = repr((self.names, self.cholesky, self.breakpoints, lengths.numpy().tobytes().hex()))
        object.__setattr__(self, "identity", hashlib.sha256(text.encode()).hexdigest()[:16])

    def _check_read_back(self) -> None:
        if len(self.bounds) != len(self.names) or not isinstance(self.identity, str) or not self.identity:
            raise ValueError(
                f"radial_weights=None needs the bounds and the identity of all of {self.names}: give the "
                "weights, or a whole description"
            )
        object.__setattr__(self, "bounds", tuple(map(float, self.bounds)))

    @property
    def sensitivity(self) -> float:
        """The largest whitened length on the grid of norms."""
        return radial_sensitivity(self.lengths, self.cholesky, self.breakpoints)

    @property
    def standard_deviations(self) -> tuple[float, ...]:
        """Standard deviation of each sum's noise at `noise_multiplier` 1."""
        return tuple(math.hypot(*row) for row in self.cholesky)

    def lengths(self, norms: torch.Tensor) -> torch.Tensor:
        """Lengths [B, m] of the contributions of records with these norms [B]."""
        if self.radial_weights is None:
            raise ValueError("this noise was read from a description, which holds no weights; make it anew")
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
        return torch.where(excess > 1 + WHITENED_TOLERANCE, 1 / excess, torch.ones_like(excess))

    # ---- the mechanism

    @property
    def shared_by(self) -> tuple[str, ...]:
        return self.names

    @property
    def made_for(self) -> str:
        return self.identity

    def standard_deviation(self, name: str, bound: float) -> float:
        return self.noise_multiplier * self.standard_deviations[self.names.index(name)]

    def check_sums(self, sums: Mapping[str, Bounded]) -> None:
        sigma = self.noise_multiplier
        for j, name in enumerate(self.names):
            # what is drawn, what of it is this sum's own, and all that this sum gets
            own = self.cholesky[j][j]
            stds = [sigma, own, sigma * own, self.standard_deviation(name, 0.0)]
            require_carried(f"sums[{name!r}]", sums[name].value, stds)

    def noised(
        self, sums: Mapping[str, Bounded], streams: ReleaseStreams, over_steps: Sums | None = None
    ) -> Sums:
        like = sums[self.names[0]].value
        drawn = [keyed.normals(streams, like, self.noise_multiplier) for _ in self.names]
        out: Sums = {}
        for j, name in enumerate(self.names):
            noise = {tensor: drawn[0][tensor] * self.cholesky[j][0] for tensor in like}
            for k in range(1, j + 1):
                for tensor, one in noise.items():
                    one.add_(drawn[k][tensor], alpha=self.cholesky[j][k])
            out[name] = private.add_exact(noise, sums[name].value)
        return out

    def whitened(self, values: Sums, bounds: Mapping[str, float], past: Sequence[Past] = ()) -> Sums:
        out: Sums = {}
        for j, (name, row) in enumerate(zip(self.names, self.cholesky, strict=True)):
            out[name] = {}
            for key, value in values[name].items():
                rest = value.double() / self.noise_multiplier
                for k in range(j):
                    rest = rest - row[k] * out[self.names[k]][key]
                out[name][key] = rest / row[j]
        return out

    def describe(self) -> dict[str, Any]:
        """All but the weights, which `bounds` and `identity` stand for."""
        description = super().describe()
        del description["radial_weights"]
        lists = {name: list(description[name]) for name in ("names", "breakpoints", "bounds")}
        return description | lists | {"cholesky": [list(row) for row in self.cholesky]}

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> JointGaussian:
        return super().from_description({**description, "radial_weights": None})


def radial_grid(breakpoints: Sequence[float], points: int = 4001) -> torch.Tensor:
    """Norms from 0 to far beyond the last breakpoint, dense around every breakpoint, float64."""
    marks = sorted(requirements.public_threshold("breakpoints", b) for b in breakpoints)
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
