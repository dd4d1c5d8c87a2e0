"""DC-DPSGD: large gradients ("tail") and small ones ("body") are clipped at two thresholds c_1 > c_2.

    c_i = c_2 + t_i (c_1 - c_2),     h_i = g_i min(1, c_i / ||g_i||),     t_i = 1[score_i > tau]
    estimate = (sum_i h_i + N(0, (z c_1)^2 I)) / B

Source: Sha et al., "DC-DPSGD" (ICLR 2025 submission, arXiv 2405.17529). The variants:

============  ======================================  ==============  =================================
variant       tail                                    released sum    its bound (noise is z times it)
============  ======================================  ==============  =================================
`PerSample`   score_i above tau                       sum_i h_i       c_1
`TwoChannel`  the same                                tail and body   c_1 and c_2, as one release
`TopShare`    the top floor(p |batch|) by score       sum_i h_i       2 c_1 - c_2
============  ======================================  ==============  =================================

tau is a public number, or follows the tail fraction p through a released count m = sum_i t_i +
N(0, sigma_b^2), one more coordinate of the same Gaussian query:

    tau <- tau exp(clip(0.3 (m / B - p) / max(p, 0.02), -0.9, 0.9)).

The step 1[score > tau] is a ramp from 0.95 tau to 1.05 tau (`privacy.bounds.counts.soft_indicator`), since a
norm rounds differently in batches of different sizes: a record more could otherwise flip every label within a
unit in the last place of tau. Random scores are exact and keep the step. The top share has an order where a
ramp would be needed; that no scores are so close is an assumption, which the statement names.

No label leaves the private side. With c_1 and the noise of DP-SGD(c_1), the method is DP-SGD(c_1) with
weights in [c_2 / c_1, 1] on the body: it weighs records anew, it does not lower the noise.

**Scores.** Each comes from one record and public randomness.

==========  ====================================================  =======================================
score       of record i                                           distribution when it says nothing
==========  ====================================================  =======================================
`Norm`      ||g_i||                                               -
`Trace`     lambda_i = ||V^T g_i||^2 / ||g_i||^2, V^T V = I_k      Beta(k/2, (P-k)/2) for Gaussian V
`Random`    a uniform number of the record's own                  uniform on [0, 1)
==========  ====================================================  =======================================

The trace comes from any columns A that span the subspace, without an orthonormal basis: with y_i = A^T g_i
and the Cholesky factor A^T A = L L^T it is ||L^-1 y_i||^2 / ||g_i||^2. A has heavy-tailed entries,
|v| = E^theta with E exponential, of random sign. The trace carries no information about the norm. If the
entries are symmetric, a signed permutation S leaves the law of A as it is, so that E[V V^T] commutes with all
of them and equals (k/P) I: every record has the expected score k/P.

What the paper and its authors' program do is `equipoise.published.DCDPSGD`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from scipy import special
from torch import Tensor

from equipoise import _validate
from equipoise.methods.base import Context, DrawHandle, Parameters, Plan, Setting, State
from equipoise.methods.configuration import Count, Noise, Option, Positive, Share
from equipoise.methods.estimator import Estimator
from equipoise.methods.named_tensors import mean_of
from equipoise.methods.subspaces import Subspace, random_subspace
from equipoise.methods.thresholds import moved
from equipoise.methods.two_threshold_sums import clip_channels, clip_either, clip_selected, top_share
from equipoise.privacy import Bounded, Gaussian, Private, PrivateRows, Release, capped, soft_indicator

ORDER = (
    "the order of the records' scores does not follow from how they are rounded: batches of different sizes "
    "round a score differently, and records whose scores are some units in the last place apart could all "
    "change places when one record enters or leaves"
)


# ---- what the tail is, and what is released of it


class TwoThresholds(Option):
    """Which records are the tail, and how the sum is released."""


@dataclass(frozen=True, kw_only=True)
class PerSample(TwoThresholds):
    """The records whose score is above tau; one sum of bound c_1."""

    kind: ClassVar[str] = "per_sample"


@dataclass(frozen=True, kw_only=True)
class TwoChannel(TwoThresholds):
    """The records whose score is above tau; tail and body apart, as one release.

    Args:
        tail_weight: in [0, 1], of the tail's sum in the update.
    """

    kind: ClassVar[str] = "two_channel"
    tail_weight: Annotated[float, partial(_validate.within, "[0, 1]")] = 1.0


@dataclass(frozen=True, kw_only=True)
class TopShare(TwoThresholds):
    """The tail fraction of the draw with the highest scores; one sum of bound 2 c_1 - c_2, in two passes."""

    kind: ClassVar[str] = "top_share"


# ---- where the tail begins


PublicTail = Annotated[float, partial(_validate.within, "[0, inf]")]


class TailThreshold(Option):
    """tau, above which a score makes a record tail."""

    def first(self, start: float) -> float:
        """tau of the first step; `start` is the score's own."""
        return start


@dataclass(frozen=True, kw_only=True)
class AdaptiveTail(TailThreshold):
    """tau follows the tail fraction through a released count.

    Args:
        initial: where it starts; c_1 (norm) or the null quantile (trace) when None.
        count_noise: sigma_b as a share of the expected batch size.
    """

    kind: ClassVar[str] = "adaptive"
    initial: Positive | None = None
    count_noise: Positive = 0.1

    def first(self, start: float) -> float:
        return start if self.initial is None else float(self.initial)

    def moved(self, threshold: float, fraction: float, wanted: float) -> float:
        """The next tau, from the released share of the tail."""
        push = 0.3 * (fraction - wanted) / max(wanted, 0.02)
        # Neither zero nor infinity, from where no factor leads back.
        return moved(threshold, push, 1e-30, 1e30, most=0.9)


@dataclass(frozen=True, kw_only=True)
class NullTail(TailThreshold):
    """The quantile of a trace that has no information."""

    kind: ClassVar[str] = "null"


@dataclass(frozen=True)
class FixedTail(TailThreshold):
    """A public number.

    Args:
        value: at least 0; infinity for no tail at all.
    """

    kind: ClassVar[str] = "fixed"
    value: PublicTail

    def first(self, start: float) -> float:
        return float(self.value)


# ---- the scores


Signs = Literal["symmetric", "positive"]


Scorer = Callable[[PrivateRows, Private], Private]
"""From the rows of a micro-batch and their records' numbers to their scores."""


_LOW = (1 << 63) - 1  # the bits of a seed that torch's signed numbers hold without their sign


def sub_weibull(
    shape: Sequence[int], generator: torch.Generator, tail_index: float = 2.0, signs: Signs = "symmetric"
) -> Tensor:
    """Independent numbers with |v| = E^theta, E ~ Exp(1): P(|v| > x) = exp(-x^(1/theta)).

    Args:
        shape: of the result.
        generator: public randomness.
        tail_index: theta >= 1/2; 1/2 is a Rayleigh law (no Gaussian), 1 exponential, more is heavier.
        signs: "symmetric" (a fair sign each) or "positive".

    Returns:
        float32, on the generator's device.

    Example:
        >>> v = sub_weibull((1000,), torch.Generator().manual_seed(0), tail_index=1.0)
        >>> bool(v.abs().mean() > 0.9), bool((v < 0).any())
        (True, True)
    """
    uniform = torch.rand(*shape, generator=generator, dtype=torch.float64)
    out = (-torch.log1p(-uniform)).pow(tail_index)
    if signs == "symmetric":
        out = out * (2 * torch.randint(2, tuple(shape), generator=generator) - 1)
    return out.to(torch.float32)


def null_threshold(fraction: float, dimension: int, parameters: int) -> float:
    """The upper `fraction` quantile of the trace of a fixed direction: Beta(k/2, (P-k)/2).

    Exact for Gaussian columns, approximate for symmetric heavy-tailed ones, wrong for positive ones.

    Example:
        >>> round(null_threshold(0.1, 200, 2000), 6)
        0.112315
    """
    return float(special.betaincinv(dimension / 2, (parameters - dimension) / 2, 1 - fraction))


class Score(Option, ABC):
    """What says which records form the tail."""

    exact: ClassVar[bool] = False
    """Whether scores have no rounding that a step at the threshold could make large."""

    @abstractmethod
    def start(self, fraction: float, clip_norm: float, params: Parameters) -> float:
        """The first threshold for a tail of this fraction, from public constants."""

    @abstractmethod
    def of_step(self, context: Context, draw: DrawHandle) -> Scorer:
        """The score of a step: a function of rows and their numbers."""


@dataclass(frozen=True, kw_only=True)
class Norm(Score):
    """The norm of a record's gradient."""

    kind: ClassVar[str] = "norm"

    def start(self, fraction: float, clip_norm: float, params: Parameters) -> float:
        return clip_norm

    def of_step(self, context: Context, draw: DrawHandle) -> Scorer:
        return lambda rows, ids: rows.row_norms()


@dataclass(frozen=True, kw_only=True)
class Random(Score):
    """Labels at random: the control. Every record's number is a secret of the draw."""

    kind: ClassVar[str] = "random"
    exact: ClassVar[bool] = True

    def start(self, fraction: float, clip_norm: float, params: Parameters) -> float:
        return 1 - fraction

    def of_step(self, context: Context, draw: DrawHandle) -> Scorer:
        secret = draw.secret_number("lots")
        return lambda rows, ids: record_uniforms(ids, secret)


@dataclass(frozen=True, kw_only=True)
class Trace(Score):
    """The share of a record's squared gradient in a public random subspace.

    Args:
        dimension: k; at most the number of parameters.
        absolute: of the gradient's entries without their signs, as in the authors' program; forms every
            record's gradient and all columns.
        tail_index: theta >= 1/2 of the columns' entries.
        signs: "symmetric" or "positive".
        structure: "khatri_rao" (matrix parameters get columns vec(u w^T), so that nothing of size P k is
            formed) or "dense".
        refresh_every: steps between new subspaces.
        layers: names of the parameters that the trace looks at; all when None.
    """

    kind: ClassVar[str] = "trace"
    dimension: Count = 200
    absolute: bool = False
    # Sub-Weibull laws have a theta of at least 1/2.
    tail_index: Annotated[float, partial(_validate.within, "[0.5, inf)")] = 2.0
    signs: Signs = "symmetric"
    structure: Literal["khatri_rao", "dense"] = "khatri_rao"
    refresh_every: Count = 1
    layers: tuple[str, ...] | None = None

    def start(self, fraction: float, clip_norm: float, params: Parameters) -> float:
        size = sum(params[name].numel() for name in self.looked_at(params))
        if self.dimension > size:
            raise ValueError(
                f"dimension={self.dimension} exceeds the {size} parameters that the trace looks at; take at "
                "most that many"
            )
        return null_threshold(fraction, self.dimension, size)

    def of_step(self, context: Context, draw: DrawHandle) -> Scorer:
        rng = context.public_rng(context.step - context.step % self.refresh_every)
        seed = int(torch.randint(2**62, (), generator=rng, device=rng.device))
        names = self.looked_at(context.params)
        some = context.params[names[0]]
        subspace = random_subspace(
            seed,
            {name: context.params[name].shape for name in names},
            self.dimension,
            dtype=some.dtype,
            device=some.device,
            dense_limit=4096 if self.structure == "khatri_rao" else 2**62,
            entries=partial(sub_weibull, tail_index=self.tail_index, signs=self.signs),
        )
        trace = subspace_trace(subspace, self.absolute)
        return lambda rows, ids: trace(rows if self.layers is None else rows.select(names))

    def looked_at(self, params: Parameters) -> tuple[str, ...]:
        """The names of the parameters that the trace looks at, in the model's order."""
        if self.layers is None:
            return tuple(params)
        unknown = [name for name in self.layers if name not in params]
        if unknown:
            raise ValueError(
                f"layers names {unknown}, which are no trainable parameters; there are {sorted(params)}"
            )
        return tuple(name for name in params if name in self.layers)


def subspace_trace(subspace: Subspace, absolute: bool = False) -> Callable[[PrivateRows], Private]:
    """From rows to the share of each row's square that lies in a subspace, in [0, 1], float64, [b].

    Zero for a row of zeros or one that is not finite.

    Args:
        subspace: of one block, columns A, not necessarily orthonormal.
        absolute: take the rows' entries without their signs; needs the dense rows and columns.

    Raises:
        ValueError: columns that are linearly dependent to working precision.

    Example:
        >>> from equipoise.gradients import DenseGradients
        >>> from equipoise.methods.subspaces import held
        >>> rows = PrivateRows(DenseGradients({"w": torch.tensor([[3.0, 4.0, 0.0]])}))
        >>> subspace_trace(held({"w": torch.tensor([[2.0, 0.0, 0.0]])}))(rows).by_record  # 9 / 25
        True
    """
    # In float64: the factor of a nearly singular matrix in float32 would be refused without need.
    gram = subspace.gram().double()
    # Heavy-tailed columns differ by orders of magnitude; the score does not change with their lengths.
    scale = gram.diagonal().sqrt()
    factor, failed = torch.linalg.cholesky_ex(gram / scale / scale[:, None])
    if int(failed) or not bool(torch.isfinite(factor).all()):
        raise ValueError(
            f"dimension={subspace.dimension}: the columns are linearly dependent to working precision; take "
            "a smaller dimension or more layers"
        )
    eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    inverse = torch.linalg.solve_triangular(factor, eye, upper=False)
    dense: dict[str, Tensor] = subspace.columns()[0] if absolute else {}  # once per step

    def score(rows: PrivateRows) -> Private:
        if absolute:
            columns = torch.cat([dense[name].flatten(1) for name in rows.names], dim=1).t().to(rows.dtype)
            y: Any = rows.matrix().abs() @ columns
        else:
            y = rows.coordinates(subspace)
        squares = ((y.double() / scale) @ inverse.t()).square().sum(dim=1)
        scores = squares / rows.row_norms().double().square()
        out = torch.nan_to_num(scores, nan=0.0, posinf=0.0).clamp(min=0, max=1)
        assert isinstance(out, Private)
        return out

    return score


def record_uniforms(ids: Private, seed: int) -> Private:
    """A uniform number in [0, 1) for every record, from its own number and a secret seed, float64.

    A record keeps its number however the batch is cut. The seed must be a secret of the draw
    (`draw.secret_number`): numbers are positions in the data set, which shift when a record leaves.

    Example:
        >>> record_uniforms(Private(torch.arange(3)), seed=1).by_record
        True
    """
    # The finaliser of SplitMix64; its constants are written as signed numbers, since torch has no unsigned.
    bits = ids.long() * -0x61C8864680B583EB + (seed & _LOW)
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        bits = (bits ^ _shifted(bits, shift)) * factor
    bits = bits ^ _shifted(bits, 31)
    # 53 bits are what a float64 holds exactly, so that no number rounds up to 1.
    out = _shifted(bits, 11).double() * 2.0**-53
    assert isinstance(out, Private)
    return out


def record_normals(ids: Private, seed: int) -> Private:
    """A standard normal number for every record, as `record_uniforms`."""
    # Box and Muller; the second seed is any other, for an angle of its own. 1 - first is never 0.
    first, second = record_uniforms(ids, seed), record_uniforms(ids, seed ^ 0x5DEECE66D)
    out = (-2 * torch.log1p(-first)).sqrt() * torch.cos(2 * math.pi * second)
    assert isinstance(out, Private)
    return out


def _shifted(bits: Tensor, by: int) -> Tensor:
    """A logical shift to the right of signed 64-bit numbers."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


# ---- the method


@dataclass(frozen=True, kw_only=True)
class TwoClipNorms(Estimator):
    """What DC-DPSGD in the library and as published share.

    Guarantee: a record's clipped row is at most c_1 long, whichever threshold it gets, and which one follows
    from that record, public randomness and earlier releases alone: the sum moves by at most c_1. Where the
    labels are decided over the whole draw, a record that enters the tail pushes another one out of it: by at
    most c_1 + (c_1 - c_2). The count of the tail is one more coordinate of the same Gaussian; its terms are
    in [0, 1], so that it moves by at most 1, also where a record is replaced.

    Args:
        clip_norm: c_1 > 0, of the tail; the noise follows it.
        body_clip_norm: c_2 in (0, c_1]; c_1 / 10 when None.
        tail_fraction: p in (0, 1), the wanted share of the tail.
        clip_rule: weighs the rows at both thresholds.
        noise_multiplier: z; calibrated to the budget when None.
    """

    clip_norm: Positive = 1.0
    noise_multiplier: Noise = None
    body_clip_norm: Positive | None = None
    tail_fraction: Share = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.body > self.clip_norm:
            raise ValueError(
                f"body_clip_norm={self.body_clip_norm!r} exceeds clip_norm={self.clip_norm!r}: the tail has "
                "the larger threshold; swap them"
            )

    @property
    def body(self) -> float:
        """c_2."""
        return float(self.clip_norm) / 10 if self.body_clip_norm is None else float(self.body_clip_norm)

    @property
    def top_share_bound(self) -> float:
        """2 c_1 - c_2: a record that enters the tail also pushes another one out of it."""
        return 2 * float(self.clip_norm) - self.body

    def top_share_sum(self, draw: DrawHandle, scorer: Scorer) -> dict[str, Bounded]:
        """The sum of the clipped rows; the tail fraction of the draw with the highest scores is the tail."""
        found = draw.rows(lambda rows, ids: {"score": scorer(rows, ids), "id": ids})
        chosen = top_share(found["score"], found["id"], self.tail_fraction)
        radii = (float(self.clip_norm), self.body)
        return draw.query(
            lambda rows, ids: {"gradient": clip_selected(rows, ids, chosen, *radii, self.clip_rule)}
        )


@dataclass(frozen=True, kw_only=True)
class DCDPSGD(TwoClipNorms):
    """Two clip norms, the larger one for the records that a score puts into the tail.

    Further arguments are those of `TwoClipNorms`.

    Args:
        variant: `PerSample`, `TwoChannel` or `TopShare`.
        score: `Norm`, `Trace`, or `Random` (labels at random: the control).
        tail_threshold: `AdaptiveTail` (follows p through a released count), `NullTail` (of `Trace`), or a
            public number of at least 0. `TopShare` and `Random` have no use for it.

    Example:
        >>> DCDPSGD(clip_norm=2.0).body
        0.2
    """

    variant: TwoThresholds = PerSample()
    score: Score = Norm()
    tail_threshold: PublicTail | TailThreshold = AdaptiveTail()

    def __post_init__(self) -> None:
        super().__post_init__()
        tail = self.tail
        if isinstance(tail, NullTail) and not isinstance(self.score, Trace):
            raise ValueError(
                f"tail_threshold={tail!r} is the quantile of an uninformative trace; "
                f"score={self.score!r} has none. Give a number or AdaptiveTail()"
            )
        if not isinstance(tail, AdaptiveTail) and (self._joint or self.score.exact):
            raise ValueError(
                f"tail_threshold={tail!r} is not used: variant={self.variant!r} takes the top share of "
                "the batch, and random labels have the threshold 1 - tail_fraction. Leave it out"
            )

    @property
    def tail(self) -> TailThreshold:
        """tau."""
        given = self.tail_threshold
        return given if isinstance(given, TailThreshold) else FixedTail(given)

    @property
    def _joint(self) -> bool:
        """Whether the labels are decided over the whole draw."""
        return isinstance(self.variant, TopShare)

    @property
    def _counter(self) -> AdaptiveTail | None:
        """What follows the released number of tail records; None where none is released."""
        # At equal thresholds the labels are of no consequence.
        used = not (self._joint or self.score.exact) and self.clip_norm != self.body
        return self.tail if used and isinstance(self.tail, AdaptiveTail) else None

    def plan(self, setting: Setting) -> Plan:
        """One release of the gradient per step, with the count where the threshold is learned."""
        counter = self._counter

        def count(noise_multiplier: float) -> list[Release]:
            if counter is None:
                return []
            sigma = float(counter.count_noise) * setting.sampling.expected_size
            noise = Gaussian(setting.count_noise(sigma, noise_multiplier))
            # A label is in [0, 1]: adding, removing or replacing a record moves the count by at most 1.
            return [Release("tail_count", 1.0, noise, replace_ratio=1.0)]

        bound = self.top_share_bound if self._joint else None
        return Plan(self.calibrated(setting, others=count, bound=bound))

    def passes_over(self, draw: str) -> int:
        """Two where the labels are decided over the whole draw: one for the scores, one for the sum."""
        return 2 if self._joint else 1

    def assumptions(self, plan: Plan | None = None) -> Sequence[str]:
        return (ORDER,) if self._joint else ()

    def init(self, context: Context) -> State:
        """The threshold of the first step: a public constant, never a quantile of the first batch."""
        start = self.score.start(self.tail_fraction, float(self.clip_norm), context.params)
        return {"threshold": start if self.score.exact else self.tail.first(start)}

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        draw = context.draw("batch")
        scorer = self.score.of_step(context, draw)
        if self._joint:
            sums = self.top_share_sum(draw, scorer)
        else:
            sums = draw.query(partial(self._sums, scorer, state["threshold"]))
        released = context.ledger.release(draw, sums)
        size = context.sampling.expected_size
        if self._counter is not None:
            (count,) = released["tail_count"].values()
            fraction = float(count) / size
            state = {"threshold": self._counter.moved(state["threshold"], fraction, self.tail_fraction)}
        total = released["gradient"]
        if isinstance(self.variant, TwoChannel):
            # The body was scaled up by c_1 / c_2, so that one noise fits both channels.
            back = self.body / self.clip_norm
            names = [name.removeprefix("tail/") for name in total if name.startswith("tail/")]
            total = {
                name: total[f"body/{name}"] * back + self.variant.tail_weight * total[f"tail/{name}"]
                for name in names
            }
        return mean_of(total, size), state

    def _sums(self, scorer: Scorer, threshold: float, rows: PrivateRows, ids: Private) -> dict[str, Bounded]:
        scores = scorer(rows, ids)
        # A score that is not finite comes from a bad record: body, and no part of the count.
        if self.score.exact:
            tail = scores > threshold  # there is no rounding that a step could make large
            assert isinstance(tail, Private)
        else:
            tail = soft_indicator(scores, threshold, "above")
        clipped = clip_channels if isinstance(self.variant, TwoChannel) else clip_either
        out = {"gradient": clipped(rows, tail, float(self.clip_norm), self.body, self.clip_rule)}
        if self._counter is not None:
            out["tail_count"] = capped(tail, 1.0, name="count")
        return out
