"""DiceSGD: what clipping removes is remembered and fed back, so that training rests where it should.

With C1 the clip norm, C2 the feedback radius (on the mean scale), B the expected batch size and
clip(v, C) = v min(1, C / |v|), the library's recipe takes, in every step,

    (total, body) = (sum_i clip(g_i, Ce), sum_i clip(g_i, C1)) / B, noised together
    feedback = clip(rho e, C2)
    estimate = body + feedback
    e = e - feedback + (total - body),     then e = clip(e, limit) if a limit is set

At rest the estimate is zero and so is the mean of the gradients clipped at Ce: the bias of clipping at C1 is
gone, the radius Ce >> C1 takes its place. Both sums are one Gaussian release that costs what DP-SGD's does
(`joint_noise`); the memory e is computed from released values alone.

As published (Zhang, Bu, Wu and Hong, ICLR 2024, Algorithms 2 and 4; Algorithm 3 is this with Adam as the
optimiser) the memory takes the *raw* gradients and only the update is noised:

    estimate = sum_i clip(g_i, C1) / B + clip(e, C2) + N(0, sigma1^2 I)
    e = e + sum_i g_i / B - (sum_i clip(g_i, C1) / B + clip(e, C2))

The proof of privacy of that form fails; what can be proved of it is the worst case in `dice_noise`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

from equipoise import _validate
from equipoise.methods.base import Context, Method, Plan, Setting, State
from equipoise.methods.card import Card
from equipoise.methods.clip_rules import Abadi, layer_shares
from equipoise.methods.feedback import joint_noise as dice_noise
from equipoise.methods.feedback.memory import clipped, norm_of, zeros_like
from equipoise.methods.named_tensors import mean_of
from equipoise.methods.published.dice_sgd_formulas import Published
from equipoise.privacy.bounds.bounded import Bounded
from equipoise.privacy.bounds.clipping import clip
from equipoise.privacy.bounds.joint import clip_jointly
from equipoise.privacy.mechanisms import Gaussian, JointGaussian
from equipoise.privacy.plan import PrivacyPlan, Release
from equipoise.privacy.private import Private
from equipoise.privacy.rows import PrivateRows

if TYPE_CHECKING:
    pass

__all__ = ["DiceSGD"]


VARIANTS = {"library": ("joint", "independent", "automatic"), "as_published": ("algorithm_2", "algorithm_4")}


PUBLISHED_NOISE = ("algorithm_4", "theorem", "worst_case")


class DiceSGD(Method):
    """DP-SGD with clipped error feedback; the estimate suits any optimiser.

    Args:
        clip_norm: C1 > 0, the radius of the body; the result hardly depends on it.
        recipe: "library" (proven, the cost of DP-SGD) or "as_published" (raw memory; worst case only).
        variant: of the library "joint" (one correlated release; default), "independent" (two releases with
            noise of their own), "automatic" (normalised gradients and feedback, joint release). As published
            "algorithm_2" (clipping; default) or "algorithm_4" (normalising).
        residual_clip_norm: Ce >= C1, beyond which gradients stay biased: the radius to tune; 10 C1 when None.
            At Ce = C1 the method is DP-SGD. Library only, like the next four.
        noise_inflation: kappa >= 1; the total's noise grows by it, the body's falls from up to 1.41 C1 at 1
            to up to 1.08 C1 at 1.41.
        feedback_rate: rho in (0, 1]; below 1 the noise of the total is averaged over about 1 / rho steps.
        memory_clip_norm: limit of |e|, against wind-up from far starts; none when None.
        per_layer: bound every layer (module) on its own, as in `DPSGD`.
        feedback_per_layer: clip the memory layer by layer, at radii whose squares sum to C2^2, equal or with
            the shares of `per_layer`; else all of it together.
        regulariser: gamma >= 0 of the normalised gradients g / (|g| + gamma), variant "automatic" alone.
        feedback_clip_norm: C2 >= 0 on the mean scale; C1 when None. Below C1 a resting point need not exist;
            0 switches the feedback off; infinity is allowed in the library's recipe.
        published_noise: noise as published: "algorithm_4", "theorem" (Theorem 3.8 with C = B C2), or
            "worst_case" (what would have to be added to meet the budget).
        noise_multiplier: sigma of the joint release, or B sigma1 / C1 as published; calibrated to the budget
            when None.

    Raises:
        ValueError: a value out of range, or an argument that the recipe does not have.

    Example:
        >>> DiceSGD(clip_norm=0.1).residual_clip_norm
        1.0
    """

    name: ClassVar[str] = "dice-sgd"
    card: ClassVar[Card] = Card(
        summary="DP-SGD that remembers what clipping removed and feeds it back, clipped.",
        claim=(
            "That the bias of clipping vanishes for any clip norm: true up to a second radius that some DP "
            "method must have. That the published form is private at the claimed epsilon: false."
        ),
        source="Zhang, Bu, Wu and Hong 2024, Differentially Private SGD Without Clipping Bias",
        guarantee="proven",
        published_guarantee="worst_case",
        cost="DP-SGD's passes, a second weighted sum and noise draw; a memory of the size of the parameters",
        use_when="Gradients are asymmetric, and no good clip norm is known: the result hardly depends on it.",
        avoid_when="DP-SGD's clip norm is well tuned, or training is short in high dimension.",
    )

    noise_arguments: ClassVar[Mapping[str, str]] = {"noise_multiplier": "body"}
    variants: ClassVar[Mapping[str, Sequence[str]]] = VARIANTS

    def __init__(
        self,
        clip_norm: float = 1.0,
        *,
        recipe: Literal["library", "as_published"] = "library",
        variant: str | None = None,
        residual_clip_norm: float | None = None,
        noise_inflation: float = 1.0,
        feedback_rate: float = 1.0,
        memory_clip_norm: float | None = None,
        per_layer: bool | Mapping[str, float] = False,
        feedback_per_layer: bool = False,
        regulariser: float = 0.0,
        feedback_clip_norm: float | None = None,
        published_noise: str = "algorithm_4",
        noise_multiplier: float | None = None,
    ) -> None:
        _validate.positive(clip_norm=clip_norm)
        _validate.one_of(VARIANTS, recipe=recipe)
        variant = VARIANTS[recipe][0] if variant is None else variant
        if variant not in VARIANTS[recipe]:
            raise ValueError(f"variant={variant!r}: the recipe {recipe!r} has {VARIANTS[recipe]}")
        if noise_multiplier is not None:
            _validate.positive(noise_multiplier=noise_multiplier)
        _validate.one_of(PUBLISHED_NOISE, published_noise=published_noise)
        self.clip_norm, self.recipe, self.variant = float(clip_norm), recipe, variant  # type: ignore[misc]
        self.residual_clip_norm = 10 * self.clip_norm if residual_clip_norm is None else residual_clip_norm
        self.feedback_clip_norm = self.clip_norm if feedback_clip_norm is None else feedback_clip_norm
        self.noise_inflation, self.feedback_rate = noise_inflation, feedback_rate
        self.memory_clip_norm, self.per_layer, self.regulariser = memory_clip_norm, per_layer, regulariser
        self.feedback_per_layer = feedback_per_layer
        self.published_noise, self.noise_multiplier = published_noise, noise_multiplier
        self._arguments = {"residual_clip_norm": residual_clip_norm, "feedback_clip_norm": feedback_clip_norm}
        self._check()
        self._noise = self._joint_noise() if recipe == "library" else None
        self._published: Published | None = None
        if recipe == "as_published":
            self._published = Published(
                self.clip_norm,
                self.feedback_clip_norm,
                variant == "algorithm_4",
                published_noise,  # type: ignore[arg-type]
            )

    def _check(self) -> None:
        if not self.feedback_clip_norm >= 0:
            raise ValueError(f"feedback_clip_norm={self.feedback_clip_norm!r}: the radius C2 is at least 0")
        if self.recipe == "as_published":
            self._check_as_published()
            return
        if not (math.isfinite(self.residual_clip_norm) and self.residual_clip_norm >= self.clip_norm):
            raise ValueError(
                f"residual_clip_norm={self.residual_clip_norm!r}: it must be finite and at least "
                f"clip_norm={self.clip_norm!r}; at equality the method is DP-SGD"
            )
        if not 1 <= self.noise_inflation < math.inf:
            raise ValueError(f"noise_inflation={self.noise_inflation!r}: it is a finite factor of at least 1")
        if not 0 < self.feedback_rate <= 1:
            raise ValueError(f"feedback_rate={self.feedback_rate!r}: a rate lies in (0, 1]; 1 feeds all back")
        if self.memory_clip_norm is not None:
            _validate.positive(memory_clip_norm=self.memory_clip_norm)
            if self.memory_clip_norm < self.feedback_clip_norm / self.feedback_rate:
                raise ValueError(
                    f"memory_clip_norm={self.memory_clip_norm!r} is below feedback_clip_norm / feedback_rate "
                    f"= {self.feedback_clip_norm / self.feedback_rate:g}: the feedback could never reach its "
                    "radius; 10 times that is a good value"
                )
        if not 0 <= self.regulariser < math.inf:
            raise ValueError(f"regulariser={self.regulariser!r}: it is a finite number of at least 0")
        if self.regulariser and self.variant != "automatic":
            raise ValueError(f"regulariser={self.regulariser!r} belongs to variant='automatic' alone")
        if self.noise_inflation != 1 and self.variant == "independent":
            raise ValueError(
                f"noise_inflation={self.noise_inflation!r}: variant='independent' shares no noise between "
                "the sums that could be inflated"
            )
        if self.published_noise != "algorithm_4":
            raise ValueError(f"published_noise={self.published_noise!r} belongs to recipe='as_published'")
        if isinstance(self.per_layer, Mapping):
            for layer, share in self.per_layer.items():
                _validate.positive(**{f"per_layer[{layer!r}]": share})

    def _check_as_published(self) -> None:
        """The paper's algorithms have neither a residual radius nor the knobs that go with it."""
        given = {
            "residual_clip_norm": self._arguments["residual_clip_norm"] is not None,
            "noise_inflation": self.noise_inflation != 1,
            "feedback_rate": self.feedback_rate != 1,
            "memory_clip_norm": self.memory_clip_norm is not None,
            "per_layer": self.per_layer is not False,
            "feedback_per_layer": self.feedback_per_layer,
            "regulariser": self.regulariser != 0,
        }
        wrong = [name for name, is_given in given.items() if is_given]
        if wrong:
            raise ValueError(
                f"{wrong[0]}={getattr(self, wrong[0])!r} belongs to recipe='library'; the published "
                "algorithms do not have it"
            )
        if not math.isfinite(self.feedback_clip_norm):
            raise ValueError(
                f"feedback_clip_norm={self.feedback_clip_norm!r}: as published the radius is finite"
            )
        if self.variant == "algorithm_4" and self.feedback_clip_norm != self.clip_norm:
            raise ValueError(
                f"feedback_clip_norm={self.feedback_clip_norm!r}: Algorithm 4 has one radius, clip_norm"
            )

    def _joint_noise(self) -> JointGaussian | None:
        """The noise of the two sums; None where they are one, at Ce = C1."""
        radii = (self.clip_norm, self.residual_clip_norm)
        if self.variant == "automatic":
            return dice_noise.normalising_noise(*radii, self.noise_inflation, self.regulariser)
        if self.residual_clip_norm == self.clip_norm:
            return None
        if self.variant == "independent":
            return dice_noise.independent_noise(*radii)
        return dice_noise.joint_noise(*radii, self.noise_inflation)

    # ---- the plan

    def plan(self, setting: Setting) -> Plan:
        """One joint release a step, of DP-SGD's cost whatever the radii; as published an un-proven one."""
        if self._published is not None:
            std = self._published.noise_std(setting, self.noise_multiplier)
            return Plan(self._published.plan(setting.sampling, setting.relation), std)

        def with_noise(noise_multiplier: float) -> PrivacyPlan:
            if self._noise is None:
                releases = [Release("body", self.clip_norm, Gaussian(noise_multiplier))]
            else:
                noise = self._noise.scaled(noise_multiplier)
                releases = [
                    Release(name, bound, noise) for name, bound in zip(noise.names, noise.bounds, strict=True)
                ]
            return PrivacyPlan(releases, setting.sampling, setting.relation)

        return Plan(setting.calibrated(with_noise, self.noise_multiplier))

    def claimed_epsilon(self, plan: Plan, delta: float) -> float | None:
        """As published: what the paper's formula claims for the noise."""
        if self._published is None:
            return None
        return self._published.claimed_epsilon(plan.constants, plan.releases.sampling, delta)

    def worst_case_multiplier(self, plan: Plan) -> float:
        """As published: the noise over the largest change of one update given the earlier ones.

        Raises:
            ValueError: the library's recipe, which has a proven release instead.
        """
        if self._published is None:
            raise ValueError("recipe='library' has a proven release; ask its plan for epsilon")
        return self._published.worst_case_multiplier(
            plan.constants, plan.releases.sampling, plan.releases.relation
        )

    # ---- the steps

    def init(self, context: Context) -> State:
        """An empty memory."""
        if self._published is not None:
            return {"memory": {name: Private(value) for name, value in zeros_like(context.params).items()}}
        if self._noise is None:
            return {}
        return {"memory": zeros_like(context.params), "memory_norm": 0.0, "far_steps": 0}

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        """One draw, one release, and the memory: from what was released, or (as published) from raw sums."""
        if self._published is not None:
            estimate, memory = self._published.step(context, state["memory"], context.plan.constants)
            return estimate, {"memory": memory}
        size = context.sampling.expected_size
        released = self._released(context)
        body = mean_of(released["body"], size)
        if self._noise is None:
            return body, state
        # In place where the tensors are our own: each is as large as the model.
        residual = mean_of(released["total" if "total" in released else "residual"], size)
        if "total" in released:
            residual = {name: value.sub_(body[name]) for name, value in residual.items()}
        del released
        feedback = self._feedback(state["memory"])
        memory = {
            name: (kept - feedback[name]).add_(residual[name]) for name, kept in state["memory"].items()
        }
        del residual
        if self.memory_clip_norm is not None:
            memory = clipped(memory, self.memory_clip_norm)
        norm = float(norm_of(memory))
        far = state["far_steps"] + (norm > 20 * self.feedback_clip_norm > 0)
        if far > context.sampling.steps / 2 >= state["far_steps"]:
            self._warn(norm)
        estimate = {name: value.add_(feedback[name]) for name, value in body.items()}
        return estimate, {"memory": memory, "memory_norm": norm, "far_steps": far}

    def _feedback(self, memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The memory times rho, clipped at C2: whole, or every layer at its share of C2."""
        cut = partial(clipped, rate=self.feedback_rate, normalised=self.variant == "automatic")
        if not self.feedback_per_layer:
            return cut(memory, self.feedback_clip_norm)
        groups, shares = layer_shares(tuple(memory), self.per_layer)
        feedback: dict[str, Tensor] = {}
        for group, share in zip(groups, shares, strict=True):
            feedback |= cut({name: memory[name] for name in group}, share * self.feedback_clip_norm)
        return feedback

    def metrics(self, state: State) -> dict[str, float]:
        """The size of the memory, which the library's recipe may tell; as published it is private."""
        return {"memory_norm": state["memory_norm"]} if "memory_norm" in state else {}

    def _released(self, context: Context) -> dict[str, dict[str, Tensor]]:
        noise = self._noise
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
        """The memory is public in the library's recipe, so that its size may be told."""
        warnings.warn(
            f"the memory of DiceSGD has norm {norm:.3g}, above 20 times "
            f"feedback_clip_norm={self.feedback_clip_norm:g}, in more than half of the steps: the feedback "
            "does not keep up. Raise feedback_clip_norm (at least clip_norm; in high dimension at least "
            "equipoise.methods.feedback.joint_noise.reach(...)), or set memory_clip_norm",
            RuntimeWarning,
            stacklevel=2,
        )

    # ---- settings

    def config(self) -> dict[str, Any]:
        """The settings, as plain values; radii as they were given, not as they follow from others."""
        return super().config() | self._arguments
