"""DiceSGD: what clipping removes is remembered and fed back, so that training rests where it should.

With C1 the clip norm, C2 the feedback radius (on the mean scale), B the expected batch size and
clip(v, C) = v min(1, C / |v|), every step takes

    (total, body) = (sum_i clip(g_i, Ce), sum_i clip(g_i, C1)) / B, noised together
    feedback = clip(rho e, C2)
    estimate = body + feedback
    e = e - feedback + (total - body),     then e = clip(e, limit) if a limit is set

At rest the estimate is zero and so is the mean of the gradients clipped at Ce: the bias of clipping at C1 is
gone, the radius Ce >> C1 takes its place. Both sums are one Gaussian release that costs what DP-SGD's does
(`Joint`); the memory e is computed only from released values.

**The noise.** A record with gradient norm n contributes min(n, C1) to the body and min(n, Ce) to the total,
in the same direction. `Joint` gives the two sums the noise, with W, V ~ N(0, I) and multiplier sigma,

    total: sigma kappa Ce W        body: sigma (beta kappa Ce W + b V)

After whitening, the record contributes a vector of squared length

    h(n) = (min(n, Ce) / (kappa Ce))^2 + ((min(n, C1) - beta min(n, Ce)) / b)^2,

quadratic on [0, C1], convex on [C1, Ce] and constant after, so that sup h = max(h(C1), h(Ce)).
`joint_params` makes both equal to 1: the pair is one Gaussian release of multiplier sigma.

**The feedback radius.** Noise of standard deviation s per coordinate enters the memory at every step; the
clipped feedback forgets over about s^2 d / (2 C2^2) steps, for d parameters. C2 >= s (5 d / T)^(1/2) makes
that at most a tenth of T steps. For `Joint`, s = sigma ((kappa Ce (1 - beta))^2 + b^2)^(1/2) / B.

Source: Zhang, Bu, Wu and Hong, ICLR 2024, whose memory takes raw gradients: `equipoise.published.DiceSGD`.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from equipoise import _validate
from equipoise.methods.base import Context, Method, Plan, Setting, State
from equipoise.methods.clip_rules import Abadi, check_shares, layer_shares
from equipoise.methods.configuration import FromOne, FromZero, Option, Positive, UpToOne
from equipoise.methods.named_tensors import clipped, mean_of, norm_of, zeros_like
from equipoise.privacy.bounds.bounded import Bounded
from equipoise.privacy.bounds.clipping import clip
from equipoise.privacy.bounds.joint import clip_jointly
from equipoise.privacy.mechanisms import Gaussian, JointGaussian
from equipoise.privacy.mechanisms.joint_gaussian import radial_sensitivity
from equipoise.privacy.plan import PrivacyPlan, Release
from equipoise.privacy.rows import PrivateRows


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

    Example:
        >>> noise = Joint().of(1.0, 10.0)
        >>> [round(std, 4) for std in noise.standard_deviations]  # alone they would need 1 and 10
        [1.3484, 10.0]
    """

    kind: ClassVar[str] = "joint"
    noise_inflation: FromOne = 1.0

    def of(self, clip_norm: float, residual_clip_norm: float) -> JointGaussian | None:
        if residual_clip_norm == clip_norm:
            return None
        beta, b = joint_params(clip_norm, residual_clip_norm, self.noise_inflation)

        def lengths(norms: Tensor) -> Tensor:
            return torch.stack([norms.clamp(max=clip_norm), norms.clamp(max=residual_clip_norm)], dim=1)

        factor = _lower(beta, b, self.noise_inflation * residual_clip_norm)
        return JointGaussian(("body", "total"), factor, lengths, (clip_norm, residual_clip_norm))


@dataclass(frozen=True, kw_only=True)
class Independent(SumNoise):
    """Body and residual (total minus body), each with noise of its own: the form to compare with.

    Standard deviations (C1 Ce)^(1/2) and ((Ce - C1) Ce)^(1/2), also of sensitivity 1. The body's noise is 2.3
    times that of the joint form at Ce = 10 C1.

    Example:
        >>> [round(std, 4) for std in Independent().of(1.0, 10.0).standard_deviations]
        [3.1623, 9.4868]
    """

    kind: ClassVar[str] = "independent"

    def of(self, clip_norm: float, residual_clip_norm: float) -> JointGaussian | None:
        if residual_clip_norm == clip_norm:
            return None
        span = residual_clip_norm - clip_norm

        def lengths(norms: Tensor) -> Tensor:
            body = norms.clamp(max=clip_norm)
            return torch.stack([body, norms.clamp(max=residual_clip_norm) - body], dim=1)

        body, rest = math.sqrt(clip_norm * residual_clip_norm), math.sqrt(span * residual_clip_norm)
        marks = (clip_norm, residual_clip_norm)
        return JointGaussian(("body", "residual"), [[body, 0.0], [0.0, rest]], lengths, marks)


@dataclass(frozen=True, kw_only=True)
class Automatic(SumNoise):
    """Normalised gradients in the body, C1 g / (|g| + gamma), normalised feedback, and correlated noise.

    Constants beta = C1 / Ce and b = C1: with t = min(n, Ce) / Ce the whitened length is
    (t / kappa)^2 + (1 - t)^2 <= 1 for gamma = 0. With gamma > 0 the supremum lies slightly above 1, is found
    numerically, and scales the noise.

    Args:
        noise_inflation: kappa >= 1, as in `Joint`.
        regulariser: gamma >= 0 of the normalised gradients g / (|g| + gamma).

    Example:
        >>> [round(std, 4) for std in Automatic().of(1.0, 10.0).standard_deviations]
        [1.4142, 10.0]
    """

    kind: ClassVar[str] = "automatic"
    normalises: ClassVar[bool] = True
    noise_inflation: FromOne = 1.0
    regulariser: FromZero = 0.0

    def of(self, clip_norm: float, residual_clip_norm: float) -> JointGaussian:
        tail = self.noise_inflation * residual_clip_norm
        factor = _lower(clip_norm / residual_clip_norm, clip_norm, tail)

        def lengths(norms: Tensor) -> Tensor:
            body = clip_norm * norms / (norms + self.regulariser)
            body = torch.where(norms > 0, body, torch.zeros_like(body))
            # A row of infinite norm never comes here; a huge one is clip_norm / (1 + 0).
            return torch.stack([body, norms.clamp(max=residual_clip_norm)], dim=1)

        marks = (clip_norm, residual_clip_norm)
        above = max(1.0, radial_sensitivity(lengths, factor, marks))
        if above > 1:
            above *= 1 + 1e-6  # the grid on which the supremum is taken is fine, not infinite
        scaled = [[above * entry for entry in row] for row in factor]
        return JointGaussian(("body", "total"), scaled, lengths, marks)


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


@dataclass(frozen=True, kw_only=True)
class ErrorFeedback(Option):
    """What clipping removed comes back from the memory, itself clipped.

    Args:
        clip_norm: C2 >= 0 on the mean scale; C1 when None. Below C1 a resting point need not exist;
            0 switches the feedback off; infinity is allowed.
        rate: rho in (0, 1]; below 1 the noise of the total is averaged over about 1 / rho steps.
        per_layer: clip the memory layer by layer, at radii whose squares sum to C2^2, equal or with
            the shares of the method's `per_layer`; else all of it together.
        memory_clip_norm: limit of |e|, against wind-up from far starts; none when None.
    """

    kind: ClassVar[str] = "error_feedback"
    clip_norm: Annotated[float, partial(_validate.within, "[0, inf]")] | None = None
    rate: UpToOne = 1.0
    per_layer: bool = False
    memory_clip_norm: Positive | None = None

    def check(self, radius: float) -> None:
        """Raise a ValueError where the limit of the memory keeps the feedback below its radius."""
        if self.memory_clip_norm is not None and self.memory_clip_norm < radius / self.rate:
            raise ValueError(
                f"feedback.memory_clip_norm={self.memory_clip_norm!r} is below feedback.clip_norm / "
                f"feedback.rate = {radius / self.rate:g}: the feedback could never reach its radius; "
                "10 times that is a good value"
            )

    def of(
        self,
        memory: Mapping[str, Tensor],
        radius: float,
        per_layer: bool | Mapping[str, float] = False,
        normalised: bool = False,
    ) -> dict[str, Tensor]:
        """The memory times rho, clipped at `radius`: whole, or every layer at its share of it.

        Args:
            memory: e.
            radius: C2.
            per_layer: the method's shares, where the memory is clipped layer by layer.
            normalised: bring shorter memories to the radius too.
        """
        cut = partial(clipped, rate=self.rate, normalised=normalised)
        if not self.per_layer:
            return cut(memory, radius)
        groups, shares = layer_shares(tuple(memory), per_layer)
        feedback: dict[str, Tensor] = {}
        for group, share in zip(groups, shares, strict=True):
            feedback |= cut({name: memory[name] for name in group}, share * radius)
        return feedback


@dataclass(frozen=True, kw_only=True)
class DiceSGD(Method):
    """DP-SGD with clipped error feedback; the estimate suits any optimiser.

    Guarantee: a step is one Gaussian release of multiplier sigma, whatever the radii. A record adds to the
    two sums in one direction, and by its own norm alone; whitened by the noise, the pair moves by at most 1
    with a record (see above). The memory and the feedback are made of released values.

    Args:
        clip_norm: C1 > 0, the radius of the body; the result hardly depends on it.
        variant: how the two sums are bounded and noised: `Joint` (correlated noise; default), `Independent`
            (noise of their own), or `Automatic` (normalised gradients and feedback, correlated noise).
        residual_clip_norm: Ce >= C1, beyond which gradients stay biased: the radius to tune; 10 C1 when None.
            At Ce = C1 the method is DP-SGD.
        feedback: how the memory comes back, and how long it may grow: `ErrorFeedback(rate=0.5)`.
        per_layer: bound every layer (module) on its own, as in `DPSGD`.
        noise_multiplier: sigma of the joint release; calibrated to the budget when None.

    Raises:
        ValueError: a value out of range.

    Example:
        >>> DiceSGD(clip_norm=0.1).residual_radius
        1.0
    """

    clip_norm: Positive = 1.0
    variant: SumNoise = Joint()
    residual_clip_norm: float | None = None
    feedback: ErrorFeedback = ErrorFeedback()
    per_layer: bool | Mapping[str, float] = False
    noise_multiplier: Positive | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.residual_radius) and self.residual_radius >= self.clip_norm):
            raise ValueError(
                f"residual_clip_norm={self.residual_clip_norm!r}: it must be finite and at least "
                f"clip_norm={self.clip_norm!r}; at equality the method is DP-SGD"
            )
        self.feedback.check(self.feedback_radius)
        check_shares(self.per_layer)

    @property
    def residual_radius(self) -> float:
        """Ce."""
        return 10 * self.clip_norm if self.residual_clip_norm is None else self.residual_clip_norm

    @property
    def feedback_radius(self) -> float:
        """C2."""
        return self.clip_norm if self.feedback.clip_norm is None else self.feedback.clip_norm

    @cached_property
    def noise(self) -> JointGaussian | None:
        """The noise of the two sums; None where they are one, at Ce = C1."""
        return self.variant.of(self.clip_norm, self.residual_radius)

    def plan(self, setting: Setting) -> Plan:
        """One joint release per step, of DP-SGD's cost whatever the radii."""

        def with_noise(noise_multiplier: float) -> PrivacyPlan:
            if self.noise is None:
                releases = [Release("body", self.clip_norm, Gaussian(noise_multiplier))]
            else:
                noise = self.noise.scaled(noise_multiplier)
                releases = [
                    Release(name, bound, noise) for name, bound in zip(noise.names, noise.bounds, strict=True)
                ]
            return PrivacyPlan(releases, setting.sampling, setting.relation)

        return Plan(setting.calibrated(with_noise, self.noise_multiplier))

    def init(self, context: Context) -> State:
        if self.noise is None:
            return {}
        return {"memory": zeros_like(context.params), "memory_norm": 0.0, "far_steps": 0}

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        size = context.sampling.expected_size
        released = self._released(context)
        body = mean_of(released["body"], size)
        if self.noise is None:
            return body, state
        # In place where the tensors are our own: each is as large as the model.
        residual = mean_of(released["total" if "total" in released else "residual"], size)
        if "total" in released:
            residual = {name: value.sub_(body[name]) for name, value in residual.items()}
        del released
        # The memory holds only released values: whatever is computed from it costs nothing.
        normalised = self.variant.normalises
        feedback = self.feedback.of(state["memory"], self.feedback_radius, self.per_layer, normalised)
        memory = {
            name: (kept - feedback[name]).add_(residual[name]) for name, kept in state["memory"].items()
        }
        del residual
        if self.feedback.memory_clip_norm is not None:
            memory = clipped(memory, self.feedback.memory_clip_norm)
        norm = float(norm_of(memory))
        far = state["far_steps"] + (norm > 20 * self.feedback_radius > 0)
        # Once: at the step in which the count passes half of the training.
        if far > context.sampling.steps / 2 >= state["far_steps"]:
            self._warn(norm)
        estimate = {name: value.add_(feedback[name]) for name, value in body.items()}
        return estimate, {"memory": memory, "memory_norm": norm, "far_steps": far}

    def metrics(self, state: State) -> dict[str, float]:
        return {"memory_norm": state["memory_norm"]} if "memory_norm" in state else {}

    def _released(self, context: Context) -> dict[str, dict[str, Tensor]]:
        noise = self.noise
        groups, shares = None, None
        if self.per_layer is not False:
            groups, shares = layer_shares(tuple(context.params), self.per_layer)

        def sums(rows: PrivateRows, ids: Tensor) -> dict[str, Bounded]:
            if noise is not None:
                return clip_jointly(rows, noise, groups, shares)
            limits = self.clip_norm if shares is None else [self.clip_norm * share for share in shares]
            return {"body": clip(rows, Abadi(), limits, groups)}

        draw = context.draw("batch")
        return context.ledger.release(draw, draw.query(sums))

    def _warn(self, norm: float) -> None:
        warnings.warn(
            f"the memory of DiceSGD has norm {norm:.3g}, above 20 times "
            f"feedback.clip_norm={self.feedback_radius:g}, in more than half of the steps: the feedback does "
            "not keep up. Raise feedback.clip_norm (at least clip_norm; in high dimension more, see "
            "equipoise.methods.dice_sgd), or set feedback.memory_clip_norm",
            RuntimeWarning,
            stacklevel=2,
        )
