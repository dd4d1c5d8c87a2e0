"""FittedRate: DP-SGD that finds its learning rate from released losses, and needs no clip norm to be tuned.

    d   = x_t - x_{t-1}                                   the last move: rate eta, along a released mean
    l_i = losses of a record at x_{t-1}, x_t, x_t + d     one batch for all three, and not that of the move
    u   = sum_i clip((l_i(x_t) - l_i(x_{t-1}), l_i(x_t + d) - l_i(x_t)) / eta, L) + noise

A parabola through the three means has its least value at so many times the last move; one and a half times
that rate is taken for the next. Averages over some steps serve for slope and curvature, and the rate moves
only as far as they are sure of: the noise on them is known. The batch is a new one, so the noise of the move
counts as what it is, a move at random: a rate at which noise does more harm than the gradient does good is
seen to be too high.

Gradients are normalised (AUTO-S), so that no clip norm decides anything. L follows a released quantile of
the differences, whose size falls during a training.

Source: this library. The idea of a parabola through released losses is that of HyFreeDP (ICLR 2025), which
fits it along the gradient of the same batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from equipoise import _validate
from equipoise.methods.base import Context, Parameters, Plan, Setting, State
from equipoise.methods.clip_rules import Abadi, AutoS, ClipRule
from equipoise.methods.configuration import Share
from equipoise.methods.dp_sgd import DPSGD
from equipoise.methods.estimator import Sums, View
from equipoise.methods.named_tensors import copied
from equipoise.methods.thresholds import ReleasedQuantile
from equipoise.privacy import Gaussian, PrivateRows, Release, clip_coordinates
from equipoise.privacy.bounds.bounded import Bounded
from equipoise.privacy.bounds.counts import centred_indicator, soft_indicator

REACH = 1.5  # of the least point: the best single step is short-sighted, as weights are averaged over many
SURE = 0.5  # errors that a slope must be away from where it was: more waits too long where noise is heavy
GROWTH = 1.2  # at most so much from step to step: a rate far too high for one step can undo all before it
FORGET = 3  # a slope that was found at half of the rate counts an eighth: losses are parabolas only nearby
WINDOW = 10  # steps that an average runs over, or a twentieth of all; fewer are mostly noise
SIZES = ReleasedQuantile(initial=0.5, quantile=0.8, learning_rate=0.5)  # L is twice that of the differences

ROUNDING = (
    1e-3  # L is at least so much over the rate: a last digit of a loss is then 1e-4 of a record's bound
)

_ASSUMED = (
    "fitted-rate: a record's losses are the same to the last digit whoever else is drawn; a place in a "
    "micro-batch may round them anew, which epsilon does not count"
)


@dataclass(frozen=True, kw_only=True)
class FittedRate(DPSGD):
    """DP-SGD that sets its own learning rate; give it `torch.optim.SGD(model.parameters(), lr=1.0)`.

    Epsilon covers the choice of the rate, where a search over rates would have to be accounted for. Average
    the weights (`Run(ema_decay=0.99)`): the rate falls only where the losses say so.

    Guarantee: a step is one Gaussian release of multiplier z, of three sums. Gradients are clipped at C, with
    multiplier z / (1 - s)^(1/2); differences of losses at L, with z / (3 s / 4)^(1/2); a count moves by 1/2,
    with z / (s / 4)^(1/2). All points, L and the rate follow from earlier releases. What one record moves is
    made of that record alone. The proof needs each record's losses to come from its own record to the last
    digit: the statement names that. On a CPU some layers round a loss anew at another place in the
    micro-batch; with 512 records of a small network that moved the differences by 0.004 of their bound.

    A move by someone else tells nothing about the rate: in a federation give several local steps a round.

    Args:
        clip_norm: C > 0; with normalised gradients it only scales the rate.
        clip_rule: as for DP-SGD; `AutoS` by default.
        per_layer: as for DP-SGD.
        noise_multiplier: as for DP-SGD.
        first_rate: of the first step, from 0.001 to 1000; it may be too small: it grows by a fifth per step.
        share: s of 1 / z^2 for losses and count.

    Example:
        >>> FittedRate().config()["clip_rule"]["kind"]
        'auto_s'
    """

    is_whole_step = True

    clip_rule: ClipRule = AutoS()
    first_rate: Annotated[float, partial(_validate.within, "[1e-3, 1e3]")] = 0.1
    share: Share = 0.02

    def assumptions(self, plan: Plan | None = None) -> Sequence[str]:
        return (_ASSUMED, *super().assumptions(plan))

    def passes_over(self, draw: str) -> int:
        return 3

    def plan(self, setting: Setting) -> Plan:
        def others(z: float) -> list[Release]:
            of_losses, of_count = z / (0.75 * self.share) ** 0.5, z / (0.25 * self.share) ** 0.5
            return [
                Release("losses", 2 * SIZES.upper(1), Gaussian(of_losses)),
                Release("small_changes", 0.5, Gaussian(setting.count_noise(of_count, z))),
            ]

        return Plan(self.calibrated(setting, lambda z: Gaussian(z / (1 - self.share) ** 0.5), others=others))

    def start(self, params: Parameters) -> State:
        nothing = {"weight": 0.0, "slope": 0.0, "bend": 0.0, "slope_error": 0.0, "bend_error": 0.0}
        return {
            "before": copied(params),
            "rate": self.first_rate,
            "measured_at": self.first_rate,
            "moved": False,
            "size": SIZES.start(),
            **nothing,
        }

    def view(self, context: Context, state: State) -> View:
        here, before = context.params, state["before"]
        beyond = {name: 2 * value - before[name] for name, value in here.items()}
        rate, size = state["rate"], _size(state)

        def sums(here: PrivateRows, before: PrivateRows, beyond: PrivateRows) -> dict[str, Bounded]:
            at = [rows.losses.double() for rows in (before, here, beyond)]  # type: ignore[union-attr]
            # A loss that overflowed says at least that it is large.
            pair: Any = torch.stack([at[1] - at[0], at[2] - at[1]], 1).div(rate).clamp(-2 * size, 2 * size)
            largest = pair.abs().amax(1)
            return {
                "losses": clip_coordinates(pair, Abadi(), 2 * size, "changes"),
                "small_changes": centred_indicator(soft_indicator(largest, size, "below", width=0.5)),
            }

        return View(lambda here, *_: here, (here, before, beyond), sums=sums)

    def update(
        self, context: Context, state: State, mean: dict[str, Tensor], released: Sums
    ) -> tuple[dict[str, Tensor], State]:
        found = {**state, "before": copied(context.params), "moved": True}
        if state["moved"]:
            found |= self._measured(context, state, released)
            found["rate"] = self._rate(found)
        return {name: found["rate"] * value for name, value in mean.items()}, found

    def _measured(self, context: Context, state: State, released: Sums) -> State:
        """What the losses of this step add to the averages."""
        batch, rate, size = context.sampling.expected_size, state["rate"], _size(state)
        (changes,), (count,) = (released[name].values() for name in ("losses", "small_changes"))
        first, second = (changes / batch).tolist()
        mechanism = context.plan.releases["losses"].at(context.step)
        noise = mechanism.standard_deviation("losses", 2 * size) / batch
        window = max(WINDOW, context.sampling.steps / 20)
        change = max(rate / state["measured_at"], state["measured_at"] / rate)
        weight = (1 - 1 / window) * change**-FORGET * state["weight"] + 1

        def mixed(name: str, new: float, power: int) -> float:
            return (1 - 1 / weight) ** power * state[name] + weight**-power * new

        return {
            "weight": weight,
            "measured_at": rate,
            "size": SIZES.update(size, float(count), batch),
            # Of the parabola with these two differences; errors are variances.
            "slope": mixed("slope", (3 * first - second) / 2, 1),
            "bend": mixed("bend", (second - first) / rate, 1),
            "slope_error": mixed("slope_error", 2.5 * noise**2, 2),
            "bend_error": mixed("bend_error", 2 * (noise / rate) ** 2, 2),
        }

    def _rate(self, found: State) -> float:
        """The last rate, moved into the range that slope and bend leave within their errors."""
        fall, bend, rate = -found["slope"], found["bend"], found["measured_at"]
        of_slope, of_bend = (SURE * math.sqrt(found[name]) for name in ("slope_error", "bend_error"))
        low = max(fall - of_slope, 0.0) / max(bend + of_bend, 1e-9)
        high = max(fall + of_slope, 0.0) / (bend - of_bend) if bend > of_bend else math.inf
        wanted = min(max(rate, REACH * low), REACH * high)
        return min(max(wanted, rate / GROWTH, 1e-4), rate * GROWTH, 1e9)

    def rebase(self, state: State, params: Parameters) -> State:
        """The state after someone else moved the parameters: that move tells nothing about the rate."""
        return {**state, "before": copied(params), "moved": False}

    def metrics(self, state: State) -> dict[str, float]:
        return {"rate": state["rate"]}


def _size(state: State) -> float:
    """Half of L."""
    return max(state["size"], ROUNDING / state["rate"])
