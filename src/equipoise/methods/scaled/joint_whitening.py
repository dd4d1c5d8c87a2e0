"""Joint whitening: inputs are whitened by their second moment, which leaves with the gradients.

With G_i the gradient of record i for a weight W [d_out, d_in], P the root in use and L weights to whiten,

    u = sum_i clip(G_i P, C) + C z_1 N                     the other parameters clipped along with it
    M = sum_i G_i^T G_i / |G_i|^2 + L^(1/2) z_2 N'         symmetrised; for one input x: x x^T / |x|^2
    z_1 = z / (1 - s)^(1/2),     z_2 = z / s^(1/2)         s: the share of the second moments
    estimate = u P / B

where z is what DP-SGD needs at the same budget. After 1, 2, 4, 8, ... steps t, P becomes

    R = (M_1 + ... + M_t) / (B t),     d = max(1e-4, (L^(1/2) z_2 / (B t^(1/2))) (2 d_in)^(1/2))
    P = c (R_+ + d I)^(-1/2)

R_+ has no negative eigenvalues, and c is such that tr(P R_+ P) = tr R_+: an average input keeps its length. d
is about the norm of the noise in R: directions below it cannot be told from noise.

**Private as DP-SGD is at multiplier z.** P is made of earlier releases and public numbers, so it is the same
with a record and without it, and a record moves u by at most C. It moves the second moments of all weights
together by at most L^(1/2) (`privacy/bounds/second_moments.py`). Divided by their noise, the two sums move by
at most ((1 - s) / z^2 + s / z^2)^(1/2) = 1 / z: one Gaussian of multiplier z per draw. Symmetrising, P and
u P are post-processing.

Source: this library. `docs/methods/joint-whitening.md` has the derivation,
`docs/measurements/methods-compared.md` the results.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from equipoise import _validate
from equipoise.methods.base import Context, Parameters, Plan, Setting, State
from equipoise.methods.card import Card
from equipoise.methods.dp_sgd import DPSGD
from equipoise.methods.named_tensors import mean_of
from equipoise.privacy.bounds.bounded import Bounded
from equipoise.privacy.bounds.second_moments import input_moments
from equipoise.privacy.mechanisms import Gaussian
from equipoise.privacy.plan import Release
from equipoise.privacy.rows import PrivateRows

__all__ = ["JointWhitening", "whitening_root"]

LEAST_DAMPING = 1e-4


@dataclass(frozen=True, kw_only=True)
class JointWhitening(DPSGD):
    """DP-SGD on whitened inputs; the estimate suits any optimiser.

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

    name: ClassVar[str] = "joint-whitening"
    card: ClassVar[Card] = Card(
        summary="DP-SGD on inputs whitened by their second moment, which is released with the gradients.",
        claim="Moves where DP-SGD barely does; private at DP-SGD's epsilon, and proved so.",
        source="this library, docs/methods/joint-whitening.md",
        guarantee="proven",
        cost="as DP-SGD, and three matrices of inputs by inputs per weight, whose root is taken a few times; "
        "layers over sequences form their rows in pieces",
        use_when="A linear model on image features.",
        avoid_when="Layers have some thousand inputs, or nearly all inputs are rare.",
    )

    share: float = 0.2
    most_inputs: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.share(share=self.share)
        _validate.count("the most inputs of a weight that is whitened", most_inputs=self.most_inputs)

    def plan(self, setting: Setting) -> Plan:
        def gradient(noise_multiplier: float) -> Gaussian:
            return Gaussian(noise_multiplier / math.sqrt(1 - self.share))

        def moments(noise_multiplier: float) -> list[Release]:
            return [Release("input_moments", 1.0, Gaussian(noise_multiplier / math.sqrt(self.share)))]

        return Plan(self.calibrated(setting, gradient, others=moments))

    def init(self, context: Context) -> State:
        widths = self.widths(context.params)
        if not widths:
            raise ValueError(
                f"most_inputs={self.most_inputs}: the model has no weight matrix with so few inputs, so that "
                "there is nothing to whiten. Raise it, or take DPSGD"
            )
        sums = {
            name: torch.zeros(width, width, dtype=torch.float64, device=context.params[name].device)
            for name, width in widths.items()
        }
        return {**super().init(context), "moments": sums, "roots": {}, "steps": 0}

    def widths(self, params: Parameters) -> dict[str, int]:
        """The inputs of the weights that are whitened, by name: matrices, outputs by inputs."""
        return {
            name: value.shape[1]
            for name, value in params.items()
            if value.ndim == 2 and value.shape[1] <= self.most_inputs
        }

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        names, size = list(state["moments"]), context.sampling.expected_size
        # From earlier releases: one from this draw would be an un-noised statistic of it.
        roots: Mapping[str, Tensor] = state["roots"]

        def whitened(rows: PrivateRows) -> PrivateRows:
            return rows.multiplied(roots)

        def moments(rows: PrivateRows) -> dict[str, Bounded]:
            return {"input_moments": input_moments(rows, names)}

        learned = {"threshold": state["threshold"]}
        released, rest = self.released(context, learned, view=whitened, others=moments)
        estimate = mean_of(released["gradient"], size)
        for name, root in roots.items():
            estimate[name] = estimate[name] @ root.to(estimate[name].dtype)

        steps, unit = state["steps"] + 1, math.sqrt(len(names))
        sums = {}
        for name, kept in state["moments"].items():
            # The moment is symmetric and its noise is not: the noise's other half only disturbs.
            value = released["input_moments"][name].to(kept.dtype) * unit
            sums[name] = kept + (value + value.t()) / 2
        if steps & (steps - 1) == 0:  # 1, 2, 4, ...
            mechanism = context.plan.releases["input_moments"].mechanism
            std = mechanism.standard_deviation("input_moments", 1.0) * unit / (size * math.sqrt(steps))
            roots = {name: whitening_root(total / (size * steps), std) for name, total in sums.items()}
        return estimate, {**rest, "moments": sums, "roots": dict(roots), "steps": steps}


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
