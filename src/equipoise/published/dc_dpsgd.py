"""DC-DPSGD as published: Algorithm 1 as printed, and what the authors' program does instead.

**Algorithm 1** (`alg1`). lambda_i = ||V^T g_i||^2 / ||g_i||^2 in a fresh heavy-tailed subspace, plus
N(0, sigma_tr^2). The top floor(p |batch|) get c_1, the others c_2; every clipped gradient gets noise of its
own, so that the sum has noise of variance

    sigma_dp^2 (k c_1^2 + (B - k) c_2^2),      k = floor(p B).

Printed with realised counts, whose variance would betray them (one more tail record changes it by 1 part
in 0.109 B, which P coordinates make visible); here k and B are the public ones. The paper's proof does not
hold: it takes the partition for released and equal on neighbouring data. But given the noise on the scores
the sum is a top-share sum of bound 2 c_1 - c_2, whatever the scores, so that it is one Gaussian release of
multiplier sigma_dp (k c_1^2 + (B - k) c_2^2)^(1/2) / (2 c_1 - c_2), with nothing to pay for the trace. That
is proved. Line 6 also prints V V^T = (1/k) sum_j v_j v_j^T, which would need columns of length k^(1/2) or
makes the trace k times smaller: `alg1_mean` is that reading, lambda_i / k under the same noise.

**The authors' program** (`code`). One parameter tensor; positive exponential entries; absolute values over
the Frobenius norm of the whole batch; trace noise sigma / B; tail strictly above the sorted score at index
int(p |batch|); noise on the average of standard deviation

    (sigma / B) ((ph c_1)^2 + ((1 - ph) c_2)^2)^(1/2),      ph the realised tail fraction,

0.1345 sigma c_1 / B at p = 0.1 and c_1 = 10 c_2, where one record can move the average by c_1 / B and more.
No finite epsilon is reported. The script for MNIST (`code_mnist`) does not divide the trace's noise by B.

To the letter, but for these: one noise vector for the sum in place of one for each record, of the same
variance; public counts in it; top floor(p |batch|) with ties by the record's number; division by the expected
B; a record whose gradient is not finite has score 0, counts as body and adds nothing. The paper leaves the
sign of V's entries open: symmetric here, positive in the program. Momentum, Adam and the falling rates of the
program are the optimiser's.

sigma_tr and sigma_dp are the multipliers of a Poisson-sampled Gaussian at the two shares of epsilon, by Renyi
accounting, as in the authors' program (the printed formulas leave their constants open). What they claim is
the sum of both, each at the same delta.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from equipoise._roots import crossing
from equipoise.methods.base import Context, DrawHandle, Plan, Setting, State
from equipoise.methods.clip_rules import ClipRule
from equipoise.methods.configuration import Share
from equipoise.methods.named_tensors import mean_of
from equipoise.methods.two_threshold_sums import sum_of_either, thresholds
from equipoise.methods.two_thresholds import ORDER, Scorer, Trace, TwoClipNorms, record_normals, sub_weibull
from equipoise.privacy import Budget, Gaussian, PrivacyPlan, PrivateRows, Release, Sampling
from equipoise.privacy.accounting.epsilon import rdp_epsilon
from equipoise.privacy.bounds.bounded import Bounded, make_bounded
from equipoise.privacy.private import Private, unwrap
from equipoise.published.ledger import PublishedLedger, disclose, release_unproven
from equipoise.published.record import PublishedPlan, Unproven

DISCLOSED = "the realised number of tail records sets the scale of the noise and is used as it is"


@dataclass(frozen=True, kw_only=True)
class DCDPSGD(TwoClipNorms):
    """DC-DPSGD as published: Algorithm 1, or the authors' program.

    Further arguments are those of the library's `TwoClipNorms`.

    Args:
        variant: "alg1" or "alg1_mean" (Algorithm 1), "code" or "code_mnist" (the program).
        trace: the score. The program takes its dimension, and looks at one layer, the first when None.
        trace_share: share of epsilon that is set aside for the trace.
        noise_multiplier: sigma_dp and sigma_tr; from the shares of the budget when None.
    """

    ledger_class = PublishedLedger

    variant: Literal["alg1", "alg1_mean", "code", "code_mnist"] = "alg1"
    trace: Trace = Trace(structure="dense")
    tail_fraction: Share = 0.1
    trace_share: Share = 0.5

    @property
    def guarantee(self) -> str:
        """Algorithm 1's one release is proven."""
        return "proven" if self._printed else self.card.guarantee

    @property
    def _printed(self) -> bool:
        return self.variant.startswith("alg1")

    def plan(self, setting: Setting) -> Plan:
        """Algorithm 1's one release; of the program nothing. The constants are (sigma_dp, sigma_tr)."""
        sampling, relation = setting.sampling, setting.relation
        if self.noise_multiplier is not None:
            multipliers = (self.noise_multiplier, self.noise_multiplier)
        else:
            multipliers = share_multipliers(setting.required_budget(), sampling, self.trace_share)
        if not self._printed:
            return Plan(PublishedPlan([], sampling, relation, unproven=[Unproven("gradient")]), multipliers)
        tail, body = float(self.clip_norm), self.body
        multiplier = printed_multiplier(
            multipliers[0], tail, body, self.tail_fraction, sampling.expected_size
        )
        releases = [Release("gradient", self.top_share_bound, Gaussian(multiplier))]
        return Plan(PrivacyPlan(releases, sampling, relation), multipliers)

    def passes_over(self, draw: str) -> int:
        """One for the scores, one for the sum."""
        return 2

    def claimed_epsilon(self, plan: Plan, delta: float) -> float | None:
        return claimed(plan.constants, plan.releases.sampling, delta)

    def assumptions(self, plan: Plan | None = None) -> Sequence[str]:
        return (ORDER,) if self._printed else ()

    def init(self, context: Context) -> State:
        if self._printed:
            self.trace.start(self.tail_fraction, self.clip_norm, context.params)  # refuses too many columns
        return {}

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        size = context.sampling.expected_size
        if not self._printed:
            return mean_of(self._of_program(context), size), state
        draw = context.draw("batch")
        scorer = self._noised_trace(context, draw)
        sums = self.top_share_sum(draw, scorer)
        return mean_of(context.ledger.release(draw, sums)["gradient"], size), state

    def _noised_trace(self, context: Context, draw: DrawHandle) -> Scorer:
        """The trace plus N(0, sigma_tr^2), noise that every record has of its own."""
        trace, secret = self.trace.of_step(context, draw), draw.secret_number("lots")
        _, sigma = context.plan.constants
        scale = self.trace.dimension if self.variant == "alg1_mean" else 1

        def score(rows: PrivateRows, ids: Private) -> Private:
            noisy = trace(rows, ids) / scale + sigma * record_normals(ids, secret)
            assert isinstance(noisy, Private)
            return noisy

        return score

    def _of_program(self, context: Context) -> dict[str, Tensor]:
        """One step of the authors' program: the noised sum, released without proof."""
        (layer, *more), (sigma, sigma_trace) = self.trace.looked_at(context.params), context.plan.constants
        if self.trace.layers is not None and more:
            raise ValueError(
                f"layers={self.trace.layers!r}: variant={self.variant!r} looks at one parameter tensor"
            )
        tail, body, fraction = float(self.clip_norm), self.body, self.tail_fraction
        rng = context.public_rng(context.step)
        seed = int(torch.randint(2**62, (), generator=rng, device=rng.device))
        some = context.params[layer]
        entries = torch.Generator().manual_seed(seed % 2**62)
        size = min(self.trace.dimension, some.numel())  # more columns than parameters span everything
        columns = sub_weibull((some.numel(), size), entries, 1.0, "positive")
        basis = torch.linalg.qr(columns.double()).Q.to(some.device)
        draw = context.draw("batch")

        def traces(rows: PrivateRows, ids: Private) -> dict[str, Private]:
            part = rows.select([layer]).matrix().double()
            inside = _finite((part.abs() @ basis).square().sum(dim=1))
            return {"inside": inside, "whole": _finite(part.square().sum(dim=1)), "id": ids}

        found = draw.rows(traces)
        batch_norm = found["whole"].sum().clamp(min=1e-300)
        divisor = 1.0 if self.variant == "code_mnist" else context.sampling.expected_size
        noise = record_normals(found["id"], draw.secret_number("lots")) * (sigma_trace / divisor)
        scores = found["inside"] / batch_norm + noise
        count = scores.shape[0]
        chosen = scores > scores.sort(descending=True).values[int(fraction * count)] if count else scores > 0

        def sums(rows: PrivateRows, ids: Private, chosen: Private) -> dict[str, Bounded]:
            return {"gradient": clip_unbounded(rows, chosen, tail, body, self.clip_rule)}

        bounded = draw.query(sums, along=chosen)["gradient"]
        realised = float(disclose(context, chosen.sum(), DISCLOSED)) / max(1, count)
        lower = average_noise(sigma, 1.0, body / tail, fraction)
        return release_unproven(
            context,
            draw,
            "gradient",
            bounded.value,
            average_noise(sigma, tail, body, realised),
            hole=(
                "the noise is scaled to the mean norm of the clipped gradients, not to what one record can "
                "change, and every label depends on every record through the norm of the batch; epsilon is "
                f"at least that of a Gaussian of multiplier {lower:.4g}"
            ),
        )


def share_multipliers(budget: Budget, sampling: Sampling, trace_share: float) -> tuple[float, float]:
    """(sigma_dp, sigma_tr): multipliers at (1 - share) epsilon and share epsilon, by Renyi accounting."""
    shares = ((1 - trace_share) * budget.epsilon, trace_share * budget.epsilon)
    gradient, trace = (_multiplier(epsilon, budget.delta, sampling) for epsilon in shares)
    return gradient, trace


@functools.lru_cache(maxsize=64)
def _multiplier(epsilon: float, delta: float, sampling: Sampling) -> float:
    def excess(log_sigma: float) -> float:
        event = sampling.event(math.exp(log_sigma), sampling.steps)
        return math.log(max(rdp_epsilon(event, delta), 1e-9) / epsilon)

    _, found = crossing(excess, 0.0, 1.0, least=math.log(0.2), most=math.log(1e4), tolerance=1e-4)
    return math.exp(found)


def claimed(multipliers: tuple[float, float], sampling: Sampling, delta: float) -> float:
    """The epsilon that the paper states: of the trace and of the gradient, each at delta, added."""
    return sum(rdp_epsilon(sampling.event(sigma, sampling.steps), delta) for sigma in multipliers)


def printed_multiplier(sigma: float, tail: float, body: float, fraction: float, batch: float) -> float:
    """Noise of Algorithm 1's sum over its sensitivity 2 c_1 - c_2, with public counts.

    Example:
        >>> round(printed_multiplier(1.0, 1.0, 0.1, 0.1, 128), 2)
        1.91
    """
    chosen = math.floor(fraction * batch)
    return sigma * math.sqrt(chosen * tail**2 + (batch - chosen) * body**2) / (2 * tail - body)


def average_noise(sigma: float, tail: float, body: float, fraction: float) -> float:
    """B times the standard deviation of the noise that the authors' program adds to an average of B.

    Example:
        >>> round(average_noise(1.0, 1.0, 0.1, 0.1), 6)
        0.134536
    """
    return sigma * math.hypot(fraction * tail, (1 - fraction) * body)


def clip_unbounded(rows: PrivateRows, mask: Private, upper: float, lower: float, rule: ClipRule) -> Bounded:
    """The sum of `clip_either` for a mask that may know other records: its bounds are infinite.

    No plan holds such a release; only `release_unproven` and `disclose` hand its value out.
    """
    if not isinstance(mask, Private):
        raise TypeError(f"mask must be a Private tensor, got {type(mask).__name__}")
    value, bad = sum_of_either(rows, unwrap(mask), *thresholds(upper, lower), rule)
    return make_bounded(value, math.inf, math.inf, rows.draw, bad)


def _finite(values: Tensor) -> Private:
    out = torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    assert isinstance(out, Private)
    return out
