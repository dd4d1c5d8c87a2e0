"""DOPPLER: a low-pass filter of the released gradients.

    u_t = (sum_i clip(g_i, C) + N(0, (z C)^2 I)) / B                    DP-SGD's estimate
    m_t = sum_k b_k u_{t-k} - sum_k a_k m_{t-k}                         the filter
    c_t = sum_k b_k - sum_k a_k c_{t-k}      over the steps so far      the same filter of ones
    estimate_t = m_t / c_t

Gradients change slowly from step to step and noise does not, so a filter that lets slow changes pass keeps
the gradient and drops most of the noise. With the impulse response h the standard deviation of the noise
is that of DP-SGD times |h| / sum(h) (`LowPass.noise_share`). Division by c_t keeps the first estimates at
their size.

**Private as DP-SGD is**: the filter sees released values alone, which is post-processing. With b = (1,) and
no a it is DP-SGD, bit for bit; with a = (-beta,), b = (1 - beta,) the bias-corrected momentum of Adam.

Source: Zhang, Bu, Hong and Razaviyayn 2024, "DOPPLER", arXiv 2408.13460.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from equipoise import _validate
from equipoise.methods.base import Context, State
from equipoise.methods.card import Card
from equipoise.methods.configuration import Option
from equipoise.methods.dp_sgd import DPSGD

__all__ = ["Doppler", "LowPass"]

CHECKED_STEPS = 1000
"""Over how many steps a filter's response to ones is held against zero."""


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

    name: ClassVar[str] = "doppler"
    card: ClassVar[Card] = Card(
        summary="DP-SGD whose released gradients pass a low-pass filter.",
        claim="Less noise per step; private at DP-SGD's noise, and proved so.",
        source="Zhang, Bu, Hong and Razaviyayn 2024, DOPPLER: low-pass filter, arXiv 2408.13460",
        guarantee="proven",
        cost="as DP-SGD; as many copies of the parameters as the filter has coefficients",
        use_when="Steps are many and small, and the optimiser has no momentum of its own.",
        avoid_when="Few large steps are taken: the filter lags behind.",
    )

    filter: LowPass = LowPass()

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.instance(LowPass, "LowPass(forward=(0.1,), feedback=(-0.9,))", filter=self.filter)

    def init(self, context: Context) -> State:
        return {**super().init(context), "inputs": [], "outputs": [], "responses": []}

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        b, a = self.filter.forward, self.filter.feedback
        fresh, rest = self.clipped_mean(context, {"threshold": state["threshold"]})
        # Of released values alone, newest first: what is made of them costs nothing.
        inputs = [fresh, *state["inputs"]][: len(b)]
        # Outputs and the answer to ones, which began when the inputs did.
        outputs, responses = list(state["outputs"]), list(state["responses"])
        passed = {name: b[0] * value for name, value in fresh.items()}
        response = sum(b[: len(inputs)])
        for factor, earlier in zip(b[1:], inputs[1:], strict=False):
            passed = {name: value + factor * earlier[name] for name, value in passed.items()}
        for factor, earlier, answer in zip(a, outputs, responses, strict=False):
            passed = {name: value - factor * earlier[name] for name, value in passed.items()}
            response -= factor * answer
        return {name: value / response for name, value in passed.items()}, {
            **rest,
            "inputs": inputs[: len(b) - 1],
            "outputs": [passed, *outputs][: len(a)],
            "responses": [response, *responses][: len(a)],
        }
