"""DiceSGD: what clipping removes is remembered and fed back, so that training rests where it should.

With C1 the clip norm, C2 the feedback radius (on the mean scale), B the expected batch size and
clip(v, C) = v min(1, C / |v|), every step takes

    (total, body) = (sum_i clip(g_i, Ce), sum_i clip(g_i, C1)) / B, noised together
    feedback = clip(rho e, C2)
    estimate = body + feedback
    e = e - feedback + (total - body),     then e = clip(e, limit) if a limit is set

At rest the estimate is zero and so is the mean of the gradients clipped at Ce: the bias of clipping at C1 is
gone, the radius Ce >> C1 takes its place. Both sums are one Gaussian release that costs what DP-SGD's does
(`joint_noise`); the memory e is computed only from released values.

Source: Zhang, Bu, Wu and Hong, ICLR 2024, whose memory takes raw gradients: `equipoise.published.DiceSGD`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar

from torch import Tensor

from equipoise import _validate
from equipoise.methods.base import Context, Method, Plan, Setting, State
from equipoise.methods.card import Card, card_of
from equipoise.methods.clip_rules import Abadi, check_shares, layer_shares
from equipoise.methods.configuration import Option
from equipoise.methods.feedback.joint_noise import Joint, SumNoise
from equipoise.methods.named_tensors import clipped, mean_of, norm_of, zeros_like
from equipoise.privacy.bounds.bounded import Bounded
from equipoise.privacy.bounds.clipping import clip
from equipoise.privacy.bounds.joint import clip_jointly
from equipoise.privacy.mechanisms import Gaussian, JointGaussian
from equipoise.privacy.plan import PrivacyPlan, Release
from equipoise.privacy.rows import PrivateRows

__all__ = ["DiceSGD", "ErrorFeedback"]


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
    clip_norm: float | None = None
    rate: float = 1.0
    per_layer: bool = False
    memory_clip_norm: float | None = None

    def __post_init__(self) -> None:
        if self.clip_norm is not None and not self.clip_norm >= 0:
            raise ValueError(f"clip_norm={self.clip_norm!r}: the radius C2 is at least 0")
        if not 0 < self.rate <= 1:
            raise ValueError(f"rate={self.rate!r}: a rate lies in (0, 1]; 1 feeds all back")
        _validate.positive_if_given(memory_clip_norm=self.memory_clip_norm)

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

    name: ClassVar[str] = "dice-sgd"
    split_models: ClassVar[frozenset[str]] = frozenset({"fully_shard", "tensor parallel"})
    card: ClassVar[Card] = card_of("dice-sgd")

    clip_norm: float = 1.0
    variant: SumNoise = Joint()
    residual_clip_norm: float | None = None
    feedback: ErrorFeedback = ErrorFeedback()
    per_layer: bool | Mapping[str, float] = False
    noise_multiplier: float | None = None

    def __post_init__(self) -> None:
        _validate.positive(clip_norm=self.clip_norm)
        _validate.instance(SumNoise, "Joint()", variant=self.variant)
        if not (math.isfinite(self.residual_radius) and self.residual_radius >= self.clip_norm):
            raise ValueError(
                f"residual_clip_norm={self.residual_clip_norm!r}: it must be finite and at least "
                f"clip_norm={self.clip_norm!r}; at equality the method is DP-SGD"
            )
        _validate.instance(ErrorFeedback, "ErrorFeedback(rate=0.5)", feedback=self.feedback)
        self.feedback.check(self.feedback_radius)
        check_shares(self.per_layer)
        _validate.positive_if_given(noise_multiplier=self.noise_multiplier)

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
            "not keep up. Raise feedback.clip_norm (at least clip_norm; in high dimension at least "
            "equipoise.methods.feedback.joint_noise.reach(...)), or set feedback.memory_clip_norm",
            RuntimeWarning,
            stacklevel=2,
        )
