"""DP-C4 and DP-C4+: the difference to an anchor is clipped as a whole, and thresholds follow what they clip.

    h = (sum_S clip(g_i(x) - g_i(w), C_1) + N(0, (z_1 C_1)^2 I)) / B
    g = (sum_D clip(g_i(w), C_2)          + N(0, (z_2 C_2)^2 I)) / n_A,   released once per anchor
    x <- x - eta (h + g)

Source: the anonymous submission nw0pePP5qd at OpenReview, 2025 (a later version is listed for ICML 2026 as
"Eliminating Solution Bias in Differentially Private Optimization"). C_1 shrinks with ||x - w|| and C_2 with
the gradient at the anchor, so that noise and clipping error vanish where both do. They do when every record's
gradient vanishes at the optimum (interpolation), and in general they do not: see the documentation page.

**Thresholds.** At step k with iterate x, anchor w, cap C and the released coupled mean h (noise deviation
z_1 C_1 / B per coordinate, d coordinates), the coupled threshold is always

    C_1 = min(C, c_1 L ||x - w||),       never below 1e-30,

and the rules differ in the learned factor L:

==============  =======================================================================================
`Distance`      L = 1: of DP-C4+; a function of public points
`Curvature`     L <- clip(0.9 L + 0.1 R / ||x - w||, L/4, 4 L),  R = sqrt(max(0, ||h||^2 - d (z_1 C_1 / B)^2))
`Tracked`       L <- L exp(-0.2 (b / B + 1/2 - 0.8)),  b a noised count of the rows inside C_1
==============  =======================================================================================

The anchor threshold starts at C; after anchor gradient g (noise deviation s = z_2 C_2 / n_A) it becomes

==============  =======================================================================================
`Quantile`      clip(C_2 exp(-eta (b / n_A + 1/2 - q)), floor, C),  b a noised count of the rows inside C_2
`ReleasedNorm`  clip(max(c_2 R, gamma C_2), floor, C),  R = sqrt(max(0, ||g||^2 - d s^2))
`Constant`      C
==============  =======================================================================================

C, c_1 and c_2 of `ReleasedNorm` may be schedules by the step (`ByStep`): with a constant c_2 the clipping
bias stays wherever gradients of single records do not vanish, and the paper's remarks on Theorems 1 and 2
raise it slowly while the step size falls. c_2 is taken at the step of the release that it scales.

`R` is the norm of a released vector without the part that its noise adds on average; without it the
threshold could never fall below its own noise.

As published, C_1 of DP-C4 and C_2 of both are raw private numbers: `equipoise.published.DPC4`, `.DPC4Plus`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from equipoise._dtensor import norm_of_all
from equipoise.methods.anchored import AnchoredMethod
from equipoise.methods.base import Context, DrawHandle, Parameters, Plan, State
from equipoise.methods.clip_rules import Abadi
from equipoise.methods.configuration import Option, Positive, UpToOne
from equipoise.methods.named_tensors import mean_of
from equipoise.methods.thresholds import ByStep, ReleasedQuantile, at_step, moved
from equipoise.privacy import Bounded, PrivateRows, centred_indicator, clip, soft_indicator

SOURCE = "DP-C4, anonymous submission nw0pePP5qd at OpenReview, 2025"

# How large the rounding of the two forward passes is follows from private activations: no threshold could be
# floored above it by public or released numbers.
ROUNDING_ASSUMPTION = (
    "clipped differences of gradients are large compared with the rounding of the two forward passes: in "
    "float32, where losses vanish to rounding and the two points are a few units in the last place apart, a "
    "search found sums that moved by up to 1.8 times the threshold; in float64 it found none above it"
)

FLOOR = 1e-30
"""No threshold falls below it: a bound of zero could not be noised.

The ledger refuses noise of a standard deviation below 2e-31 in float32: a smaller floor would end runs.
"""

TRACKED_SHARE, TRACKED_RATE = 0.8, 0.2
"""Of `Tracked`: the share of rows inside that it keeps, and how fast it follows.

Choices: a larger share clips less and takes more noise; a faster one follows the noise of the count, too.
"""


@dataclass(frozen=True)
class Released:
    """What left with a release and the public constants that made its noise.

    Attributes:
        norm: of the released mean.
        num_parameters: d.
        noise_std: standard deviation of its noise per coordinate.
        count: released centred count of the rows inside the threshold, or None.
        expected_size: public divisor of the count.
        step: of the release.
    """

    norm: float
    num_parameters: int
    noise_std: float
    count: float | None
    expected_size: float
    step: int = 0

    @property
    def debiased(self) -> float:
        """R = sqrt(max(0, norm^2 - d std^2)), the norm without what its noise adds on average.

        Example:
            >>> released = Released(0.5, num_parameters=100, noise_std=0.02, count=None, expected_size=100.0)
            >>> round(released.debiased, 6)
            0.458258
        """
        return math.sqrt(max(0.0, self.norm**2 - self.num_parameters * self.noise_std**2))

    @property
    def share(self) -> float:
        """The released share of the rows inside."""
        assert self.count is not None
        return self.count / self.expected_size + 0.5


@dataclass(frozen=True)
class CoupledRule(Option):
    """How the coupled threshold min(C, c_1 L ||x - w||) learns L; the base class does not.

    Args:
        scale: c_1 > 0, a number or a schedule; with L = 1 a guess of the losses' smoothness.
    """

    count_noise: ClassVar[float | None] = None
    """Noise of the count of rows inside, as a share of the expected batch; None where none is released."""

    scale: Positive | ByStep = 1.0

    def next_factor(self, factor: float, distance: float, released: Released) -> float:
        """L after a release at this distance ||x - w||."""
        return factor


@dataclass(frozen=True)
class Distance(CoupledRule):
    """L = 1."""

    kind: ClassVar[str] = "distance"


@dataclass(frozen=True)
class Curvature(CoupledRule):
    """L follows the released size of the coupled term over the distance."""

    kind: ClassVar[str] = "curvature"

    def next_factor(self, factor: float, distance: float, released: Released) -> float:
        if distance <= 0:
            return factor
        # Released noise may throw the ratio anywhere; one step moves the factor by at most 4 either way.
        value = min(max(0.9 * factor + 0.1 * released.debiased / distance, factor / 4), 4 * factor)
        return moved(value, 0.0, FLOOR, 1 / FLOOR)


@dataclass(frozen=True)
class Tracked(CoupledRule):
    """L follows the released share of the rows inside.

    Example:
        >>> inside = Released(norm=1.0, num_parameters=4, noise_std=0.1, count=50.0, expected_size=100.0)
        >>> round(Tracked().next_factor(1.0, 0.1, inside), 4)  # all rows inside: the factor falls
        0.9608
    """

    kind: ClassVar[str] = "tracked"
    count_noise: ClassVar[float | None] = 0.1

    def next_factor(self, factor: float, distance: float, released: Released) -> float:
        return moved(factor, -TRACKED_RATE * (released.share - TRACKED_SHARE), FLOOR, 1 / FLOOR)


@dataclass(frozen=True)
class AnchorRule(Option):
    """How the anchor threshold C_2 follows what was released at an anchor.

    Args:
        minimum: floor of C_2.
    """

    count_noise: ClassVar[float | None] = None
    """As of `CoupledRule`, of the anchor batch."""

    minimum: float = 0.0

    def check(self, cap: float) -> None:
        """Raise a ValueError where the rule does not go with the cap C."""
        if not 0 <= self.minimum <= cap:
            raise ValueError(f"minimum={self.minimum!r}: it lies between 0 and clip_norm={cap!r}")

    @abstractmethod
    def following(self, clip_norm: float, released: Released, cap: float) -> float:
        """C_2 of the next anchor.

        Args:
            clip_norm: C_2 of this anchor.
            released: the anchor release.
            cap: C.
        """


@dataclass(frozen=True)
class Quantile(AnchorRule):
    """C_2 follows a quantile of the anchor rows' norms, through a noised count.

    Args:
        minimum: floor of C_2.
        quantile: q, the wanted share of anchor rows inside.
        learning_rate: eta of the geometric update.
        count_noise: noise of the count as a share of n_A.
    """

    kind: ClassVar[str] = "quantile"
    minimum: float = field(default=0.0, kw_only=True)
    quantile: float = 0.8
    learning_rate: float = 3.0
    count_noise: float = 0.05  # type: ignore[misc]

    def __post_init__(self) -> None:
        ReleasedQuantile(1.0, self.quantile, self.learning_rate, self.count_noise)  # refuses bad numbers

    def following(self, clip_norm: float, released: Released, cap: float) -> float:
        push = -self.learning_rate * (released.share - self.quantile)
        return moved(clip_norm, push, max(self.minimum, FLOOR), max(cap, FLOOR))


@dataclass(frozen=True)
class ReleasedNorm(AnchorRule):
    """C_2 follows the norm of the released anchor gradient, without its noise.

    Args:
        minimum: floor of C_2.
        scale: c_2 > 0, a number or a schedule.
        shrink_limit: gamma in (0, 1], the least ratio of consecutive thresholds; 1 never lets C_2 shrink.

    Example:
        >>> anchor = Released(norm=0.5, num_parameters=100, noise_std=0.02, count=None, expected_size=100.0)
        >>> ReleasedNorm(shrink_limit=0.5).following(1.0, anchor, cap=1.0)
        0.5
        >>> round(ReleasedNorm(shrink_limit=0.25).following(1.0, anchor, cap=1.0), 6)
        0.458258
    """

    kind: ClassVar[str] = "released"
    minimum: float = field(default=0.0, kw_only=True)
    scale: Positive | ByStep = 1.0
    shrink_limit: UpToOne = 0.5

    def following(self, clip_norm: float, released: Released, cap: float) -> float:
        value = max(at_step(self.scale, released.step) * released.debiased, self.shrink_limit * clip_norm)
        return max(min(max(value, self.minimum), cap), FLOOR)


@dataclass(frozen=True)
class Constant(AnchorRule):
    """C_2 = C."""

    kind: ClassVar[str] = "constant"

    def following(self, clip_norm: float, released: Released, cap: float) -> float:
        return cap


@dataclass(frozen=True, kw_only=True)
class ClippedDifferences(AnchoredMethod):
    """What DP-C4 and DP-C4+ share, in the library and as published: sums clipped at two thresholds.

    The cap of both thresholds is C = `clip_norm`, which is also the first anchor threshold of DP-C4+.
    """

    # ---- how the thresholds follow

    @abstractmethod
    def at_anchor(self, context: Context, draw: DrawHandle, state: State, new: bool) -> State:
        """The state with C_2 of an anchor gradient about to be released; `new` at the anchor's first."""

    @abstractmethod
    def coupled_threshold(self, context: Context, draw: DrawHandle, state: State, distance: float) -> float:
        """C_1 at the distance ||x - w||."""

    def learn_anchor(self, state: State, released: Released) -> State:
        """The state after the release of a new anchor's gradient."""
        return state

    def learn_coupled(self, state: State, distance: float, released: Released) -> State:
        """The state after the release of a coupled term at this distance."""
        return state

    # ---- the steps

    @property
    @abstractmethod
    def scales(self) -> tuple[object, ...]:
        """c_1 and c_2, where there are such: numbers or schedules."""

    def max_bounds(self, steps: int) -> tuple[float, float]:
        for scale in self.scales:
            if isinstance(scale, ByStep):
                scale.upper(steps)  # refuses what is no number above zero before a step is paid for
        upper = self.threshold.upper(steps)
        return upper, upper

    def assumptions(self, plan: Plan | None = None) -> Sequence[str]:
        return (ROUNDING_ASSUMPTION, *super().assumptions(plan))

    def init(self, context: Context) -> State:
        cap = self.clip_norm_at(context.step)
        return super().init(context) | {"anchor_clip_norm": cap, "next_anchor_clip_norm": cap}

    def release_anchor(self, context: Context, state: State, new: bool) -> State:
        draw = context.draw("anchor")
        state = self.at_anchor(context, draw, state, new)
        # A count is released once per anchor, however often its gradient is.
        gradient, found = self._sent(
            context, draw, "anchor", (state["anchor"],), state["anchor_clip_norm"], count=new
        )
        state = {**state, "gradient": gradient}
        return self.learn_anchor(state, found) if new else state

    def release_coupled(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        draw, at = context.draw("batch"), (context.params, state["anchor"])
        # Close floats subtract exactly, so nothing is lost when x nears w.
        distance = _norm({name: value - at[1][name] for name, value in at[0].items()})
        clip_norm = self.coupled_threshold(context, draw, state, distance)
        coupled, found = self._sent(context, draw, "coupled", at, clip_norm)
        return coupled, self.learn_coupled(state, distance, found)

    def _sent(
        self,
        context: Context,
        draw: DrawHandle,
        name: str,
        at: Sequence[Parameters],
        clip_norm: float,
        count: bool = True,
    ) -> tuple[dict[str, Tensor], Released]:
        """The released mean of the rows, or of their differences, and what a threshold learns of it."""
        sizes = context.sampling.expected_size, context.plan.constants.anchor.expected_size
        size, count = sizes[name == "anchor"], count and name in self.counts(*sizes)

        def sums(*given: PrivateRows) -> dict[str, Bounded]:
            rows = given[0] if len(at) == 1 else given[0] - given[1]
            out = {name: clip(rows, Abadi(), clip_norm)}
            if count:
                below = soft_indicator(rows.row_norms(), clip_norm, "below")
                out[f"{name}_count"] = centred_indicator(below)
            return out

        sent = context.ledger.release(draw, draw.query(sums, at=at))
        mean = mean_of(sent[name], size)
        return mean, Released(
            norm=_norm(mean),
            num_parameters=sum(value.numel() for value in mean.values()),
            noise_std=context.plan.releases[name].noise_multiplier * clip_norm / size,
            count=float(next(iter(sent[f"{name}_count"].values()))) if count else None,
            expected_size=size,
            step=context.step,
        )


@dataclass(frozen=True, kw_only=True)
class ReleasedThresholds(ClippedDifferences):
    """DP-C4 and DP-C4+ with thresholds from what was released. Further arguments as for `AnchoredMethod`.

    Guarantee: that of `AnchoredMethod`. The difference of a record's two gradients is one row, clipped at C_1
    as a whole. Every threshold is a function of released values and public constants, so that given all
    earlier releases the coupled releases are (q_1, z_1) events and the anchor releases (q_2, z_2) events
    whatever the thresholds are. A count moves by at most 1/2.

    Args:
        clip_norm: C > 0, cap of both thresholds and the first anchor threshold; a number, a function of the
            step or a schedule.
        coupled: sets the coupled threshold: `Distance`, `Curvature` or `Tracked`.
        anchor: sets the anchor threshold: `Quantile` (default), `ReleasedNorm` or `Constant`.
    """

    coupled: CoupledRule = Distance()
    anchor: AnchorRule = Quantile()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.anchor.check(self.threshold.start())

    @property
    def scales(self) -> tuple[object, ...]:
        return self.coupled.scale, getattr(self.anchor, "scale", None)

    def counts(self, batch: float, anchor_batch: float) -> Mapping[str, float]:
        rules = (("anchor", self.anchor, anchor_batch), ("coupled", self.coupled, batch))
        return {
            name: 2 * rule.count_noise * size for name, rule, size in rules if rule.count_noise is not None
        }

    def init(self, context: Context) -> State:
        return super().init(context) | {"coupled_factor": 1.0}

    def at_anchor(self, context: Context, draw: DrawHandle, state: State, new: bool) -> State:
        clip_norm = state["next_anchor_clip_norm" if new else "anchor_clip_norm"]
        return {**state, "anchor_clip_norm": min(clip_norm, self.clip_norm_at(context.step))}

    def coupled_threshold(self, context: Context, draw: DrawHandle, state: State, distance: float) -> float:
        scale = at_step(self.coupled.scale, context.step)
        threshold = scale * (state["coupled_factor"] * distance)
        return max(min(self.clip_norm_at(context.step), threshold), FLOOR)

    def learn_anchor(self, state: State, released: Released) -> State:
        following = self.anchor.following(
            state["anchor_clip_norm"], released, self.clip_norm_at(released.step)
        )
        return {**state, "next_anchor_clip_norm": following}

    def learn_coupled(self, state: State, distance: float, released: Released) -> State:
        factor = self.coupled.next_factor(state["coupled_factor"], distance, released)
        return {**state, "coupled_factor": factor}


@dataclass(frozen=True, kw_only=True)
class DPC4Plus(ReleasedThresholds):
    """DP-C4+: the coupled threshold follows the distance to the anchor. Arguments of `ReleasedThresholds`.

    Example:
        >>> from equipoise.privacy import Budget, Poisson
        >>> from equipoise.methods.base import Setting
        >>> setting = Setting(sampling=Poisson(64, 2000, 100), budget=Budget(4.0, 1e-5))
        >>> plan = DPC4Plus(clip_norm=0.5).plan(setting).releases
        >>> [release.name for release in plan.releases]
        ['coupled', 'anchor', 'anchor_count']
    """


@dataclass(frozen=True, kw_only=True)
class DPC4(ReleasedThresholds):
    """DP-C4: the coupled threshold follows the size of the coupled term itself.

    That size is predicted from released coupled terms (`Curvature`): its ratio to the distance is learned,
    where DP-C4+ takes a constant. Arguments of `ReleasedThresholds`.

    Example:
        >>> DPC4().coupled
        Curvature(scale=1.0)
    """

    coupled: CoupledRule = Curvature()


def _norm(tensors: Mapping[str, Tensor]) -> float:
    """The Euclidean norm of named public tensors, in float64."""
    return float(norm_of_all(tensors.values(), torch.float64)) if tensors else 0.0
