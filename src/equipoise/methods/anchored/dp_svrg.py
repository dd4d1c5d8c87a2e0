"""DP-SVRG: differences to an anchor, both points clipped at one threshold.

    h = (sum_S [clip(g_i(x), C) - clip(g_i(w), C)] + N(0, (2 z_1 C)^2 I)) / B,    x <- x - eta (h + g),
    g = (sum_D clip(g_i(w), C) + N(0, (z_2 C)^2 I)) / n_A,  released once per anchor

Source: Lee 2017, "Differentially Private Variance Reduced Stochastic Gradient Descent", in the form that the
authors of DP-C4 compare with. The pair of clipped gradients of a record is released as one row of norm at
most 2C, so that one record moves the sum by 2C and the noise multiplier z_1 means what it does elsewhere;
their pseudocode noises the two sums apart, with factors that do not agree between its tables. With a
decaying threshold (C_k on a public schedule) it is their DP-SVRG-TD.

Near the anchor the two clipped rows nearly cancel while the noise keeps the size 2C: this baseline pays for
the difference as if it were large, which is what DP-C4 changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from equipoise.methods.anchored.anchored_method import AnchoredMethod
from equipoise.methods.base import Context, State
from equipoise.methods.card import Card
from equipoise.methods.clip_rules import Abadi
from equipoise.methods.named_tensors import mean_of
from equipoise.methods.thresholds import ReleasedQuantile, Threshold, resolve_threshold
from equipoise.privacy.bounds.bounded import Bounded
from equipoise.privacy.bounds.clipping import clip
from equipoise.privacy.rows import PrivateRows

__all__ = ["DPSVRG"]


@dataclass(frozen=True, kw_only=True)
class DPSVRG(AnchoredMethod):
    """Differentially private SVRG.

    The arguments are those of `AnchoredMethod`; `clip_norm` may also be a function of the step, or a schedule
    such as `ExponentialDecay`.

    Example:
        >>> from equipoise.methods.base import Setting
        >>> from equipoise.privacy import Budget, Poisson
        >>> setting = Setting(sampling=Poisson(64, 2000, 100), budget=Budget(4.0, 1e-5))
        >>> plan = DPSVRG(clip_norm=0.5).plan(setting).releases
        >>> [(release.name, release.max_bound) for release in plan.releases]
        [('coupled', 1.0), ('anchor', 0.5)]
    """

    name: ClassVar[str] = "dp-svrg"
    card: ClassVar[Card] = Card(
        summary="Variance reduction by an old iterate, both gradients of a record clipped at one threshold.",
        claim="Private. Meant to lower the variance of sampling; the noise of the pair outweighs the gain.",
        source="Lee 2017, Differentially Private Variance Reduced Stochastic Gradient Descent",
        guarantee="proven",
        cost="four gradients per drawn record and step at the default anchors; one copy of the parameters, "
        "one gradient, and a second set of factors a micro-batch",
        use_when="As a baseline of DP-C4.",
        avoid_when="Otherwise: under interpolation it stalled three times further out than DP-SGD.",
    )

    # The coupled bound is 2C and the anchor's C, and the ratio is of their squares.
    threshold_ratio: ClassVar[float] = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.threshold, ReleasedQuantile):
            raise ValueError(
                "clip_norm=ReleasedQuantile(...) is not offered for DP-SVRG: one count cannot steer a pair "
                "of gradients; give a number or a schedule"
            )

    @property
    def threshold(self) -> Threshold:
        """C_k."""
        return resolve_threshold(self.clip_norm)

    def max_bounds(self, steps: int) -> tuple[float, float]:
        """2C and C, at the largest C of the schedule."""
        upper = self.threshold.upper(steps)
        return 2 * upper, upper

    def release_anchor(self, context: Context, state: State, new: bool) -> State:
        clip_norm = self.threshold.at(context.step, self.threshold.start())

        def sums(rows: PrivateRows, ids: Tensor) -> dict[str, Bounded]:
            return {"anchor": clip(rows, Abadi(), clip_norm)}

        draw = context.draw("anchor")
        released = context.ledger.release(draw, draw.query(sums, at=(state["anchor"],)))
        size = context.plan.constants.anchor.expected_size
        return {**state, "gradient": mean_of(released["anchor"], size)}

    def release_coupled(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        """The difference of the two clipped sums, as one query of bound 2C."""
        clip_norm = self.threshold.at(context.step, self.threshold.start())

        def sums(at_x: PrivateRows, at_w: PrivateRows, ids: Tensor) -> dict[str, Bounded]:
            return {"coupled": clip(at_x, Abadi(), clip_norm) - clip(at_w, Abadi(), clip_norm)}

        draw = context.draw("batch")
        released = context.ledger.release(draw, draw.query(sums, at=(context.params, state["anchor"])))
        return mean_of(released["coupled"], context.sampling.expected_size), state
