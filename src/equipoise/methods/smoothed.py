"""Estimates filtered over the steps, after the release: DiSK's Kalman filter, and DOPPLER's linear ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from equipoise.methods.base import Context, Parameters, State
from equipoise.methods.configuration import Option, Positive, UpToOne
from equipoise.methods.dp_sgd import DPSGD
from equipoise.methods.estimator import Sums, View
from equipoise.methods.named_tensors import copied

ONE_POINT = 1e-6
"""DiSK's c this close to 1 is 1: gamma is then (1 - kappa) / kappa, up to the digits that were written.

With less room such a gamma would take a second pass over each draw, for a weight of nothing but rounding.
"""

CHECKED_STEPS = 1000
"""Over how many steps a filter's response to ones has to stay above zero.

A choice: of a filter whose response reaches zero later, estimates would be divided by it.
"""


@dataclass(frozen=True, kw_only=True)
class DiSK(DPSGD):
    """DP-SGD with a simplified Kalman filter, whose prediction is a gradient a little further along the path.

    With d_t = x_t - x_{t-1}, the gain kappa, the step ahead gamma and c = (1 - kappa) / (kappa gamma),

        row_i = c g_i(x_t + gamma d_t) + (1 - c) g_i(x_t)
        u_t = (sum_i clip(row_i, C) + N(0, (z C)^2 I)) / B
        estimate_t = (1 - kappa) estimate_{t-1} + kappa u_t,          estimate_0 = u_0

    The average over the past makes the noise smaller, by sqrt(kappa / (2 - kappa)) where the gradient stands
    still: 0.73 at kappa = 0.7. Alone it would lag behind. The rows make up for that: their mean is about
    ``g(x_t) + (1 - kappa) / kappa (g(x_t) - g(x_{t-1}))``, what the average of the past missed by one step.
    At kappa = 1 it is DP-SGD, bit for bit. At gamma = (1 - kappa) / kappa, c is 1 and the gradients at x_t
    drop out: one point, half of the cost.

    Guarantee: that of DP-SGD at the same noise. Both points follow from earlier releases. A row is made of
    the gradients of one record, with public numbers c and 1 - c, and is clipped after they are added, so a
    record moves the sum by at most C. The average over steps is post-processing.

    Source: Zhang, Bu, Balle, Hong, Razaviyayn and Mirrokni 2024, "DiSK", arXiv 2410.03883.

    Args:
        clip_norm: as for DP-SGD; of the combined row.
        clip_rule: as for DP-SGD.
        per_layer: as for DP-SGD.
        noise_multiplier: as for DP-SGD.
        kappa: the gain, in (0, 1]: how much of an estimate is new. 1 is DP-SGD.
        gamma: > 0, how far ahead the second point lies, in steps.

    Example:
        >>> round(DiSK(kappa=0.7, gamma=0.5).share_ahead, 4)
        0.8571
    """

    kappa: UpToOne = 0.7
    gamma: Positive = 0.5

    @property
    def share_ahead(self) -> float:
        """c, the weight of the gradient at the point ahead."""
        share = (1 - self.kappa) / (self.kappa * self.gamma)
        return 1.0 if abs(share - 1) < ONE_POINT else share

    def passes_over(self, draw: str) -> int:
        return 1 if self.share_ahead in (0.0, 1.0) else 2

    def start(self, params: Parameters) -> State:
        return {} if self.kappa == 1 else {"previous": copied(params), "estimate": None}

    def view(self, context: Context, state: State) -> View:
        if self.kappa == 1:
            return View()
        here, previous, share = context.params, state["previous"], self.share_ahead
        ahead = {name: value + self.gamma * (value - previous[name]) for name, value in here.items()}
        if share == 1:
            return View(at=(ahead,))
        return View(lambda at_ahead, at_here: share * at_ahead + (1 - share) * at_here, (ahead, here))

    def update(
        self, context: Context, state: State, mean: dict[str, Tensor], released: Sums
    ) -> tuple[dict[str, Tensor], State]:
        if self.kappa == 1:
            return mean, {}
        before, estimate = state["estimate"], mean
        if before is not None:
            estimate = {name: (1 - self.kappa) * before[name] + self.kappa * mean[name] for name in mean}
        return dict(estimate), {"previous": copied(context.params), "estimate": estimate}

    def rebase(self, state: State, params: Parameters) -> State:
        """The state after someone else moved the parameters: that move is no step to look ahead along."""
        return {**state, "previous": copied(params)} if "previous" in state else dict(state)


@dataclass(frozen=True)
class LowPass(Option):
    """A linear filter by its coefficients.

    Args:
        forward: b_0, b_1, ..., of this and earlier inputs.
        feedback: a_1, a_2, ..., of earlier outputs; none for a filter of finite memory.

    Example:
        >>> round(LowPass().noise_share(1000), 3)
        0.224
    """

    kind: ClassVar[str] = "low_pass"
    forward: tuple[float, ...] = (0.05, 0.05)
    feedback: tuple[float, ...] = (-0.9,)

    def __post_init__(self) -> None:
        for name in ("forward", "feedback"):
            values = getattr(self, name)
            if not isinstance(values, list | tuple) or not all(
                isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in values
            ):
                raise ValueError(f"{name}={values!r} is no list of finite numbers; give (0.05, 0.05)")
            object.__setattr__(self, name, tuple(map(float, values)))
        if not self.forward:
            raise ValueError("forward=() lets nothing pass; give (1.0,) for no filter")
        companion = torch.diag(torch.ones(len(self.feedback), dtype=torch.float64), -1)[:-1, :-1]
        if self.feedback:
            companion[0] = -torch.tensor(self.feedback, dtype=torch.float64)
            if float(torch.linalg.eigvals(companion).abs().max()) >= 1:
                raise ValueError(
                    f"feedback={self.feedback!r} makes the filter grow without end; its poles must lie "
                    "within the unit circle, as for (-0.9,)"
                )
        if min(self.response([1.0] * CHECKED_STEPS)) <= 0:
            raise ValueError(
                f"forward={self.forward!r} with feedback={self.feedback!r} answers constant gradients with "
                "zero or the other sign, and estimates are divided by that answer; change the coefficients"
            )

    def response(self, inputs: list[float]) -> list[float]:
        """What the filter makes of some numbers."""
        out: list[float] = []
        for t in range(len(inputs)):
            passed = sum(b * inputs[t - k] for k, b in enumerate(self.forward) if k <= t)
            out.append(passed - sum(a * out[t - k] for k, a in enumerate(self.feedback, 1) if k <= t))
        return out

    def noise_share(self, steps: int) -> float:
        """The noise of the estimate after so many steps, over that of DP-SGD's."""
        impulse = self.response([1.0] + [0.0] * (steps - 1))
        return math.sqrt(sum(h * h for h in impulse)) / sum(impulse)


@dataclass(frozen=True, kw_only=True)
class Doppler(DPSGD):
    """DP-SGD whose estimates pass a low-pass filter; they suit any optimiser.

        u_t = (sum_i clip(g_i, C) + N(0, (z C)^2 I)) / B                    DP-SGD's estimate
        m_t = sum_k b_k u_{t-k} - sum_k a_k m_{t-k}                         the filter
        c_t = sum_k b_k - sum_k a_k c_{t-k}      over the steps so far      the same filter of ones
        estimate_t = m_t / c_t

    Gradients change slowly from step to step and noise does not, so a filter that lets slow changes pass
    keeps the gradient and drops most of the noise. With the impulse response h the standard deviation of the
    noise is that of DP-SGD times |h| / sum(h) (`LowPass.noise_share`). Division by c_t keeps the first
    estimates at their size. With b = (1,) and no a it is DP-SGD, bit for bit; with a = (-beta,),
    b = (1 - beta,) the bias-corrected momentum of Adam.

    Guarantee: that of DP-SGD. The filter sees released values alone, which is post-processing.

    Source: Zhang, Bu, Hong and Razaviyayn 2024, "DOPPLER", arXiv 2408.13460.

    Args:
        clip_norm: as for DP-SGD.
        clip_rule: as for DP-SGD.
        per_layer: as for DP-SGD.
        noise_multiplier: as for DP-SGD.
        filter: the coefficients.

    Example:
        >>> Doppler(filter=LowPass(forward=(1.0,), feedback=())).config()["filter"]
        {'kind': 'low_pass', 'forward': [1.0], 'feedback': []}
    """

    filter: LowPass = LowPass()

    def start(self, params: Parameters) -> State:
        return {"inputs": [], "outputs": [], "responses": []}

    def update(
        self, context: Context, state: State, mean: dict[str, Tensor], released: Sums
    ) -> tuple[dict[str, Tensor], State]:
        b, a = self.filter.forward, self.filter.feedback
        # Newest first: inputs, outputs, and the answer to ones, which began when the inputs did.
        inputs = [mean, *state["inputs"]][: len(b)]
        outputs, responses = list(state["outputs"]), list(state["responses"])
        passed = {name: b[0] * value for name, value in mean.items()}
        response = sum(b[: len(inputs)])
        for factor, earlier in zip(b[1:], inputs[1:], strict=False):
            passed = {name: value + factor * earlier[name] for name, value in passed.items()}
        for factor, earlier, answer in zip(a, outputs, responses, strict=False):
            passed = {name: value - factor * earlier[name] for name, value in passed.items()}
            response -= factor * answer
        return {name: value / response for name, value in passed.items()}, {
            "inputs": inputs[: len(b) - 1],
            "outputs": [passed, *outputs][: len(a)],
            "responses": [response, *responses][: len(a)],
        }
