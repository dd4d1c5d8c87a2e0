"""DP-C4's paper on linear models, written down for many trainings at once: its methods and their rivals.

A grid of settings is one call, in which all trainings see the same drawn records; so are many trainings with
one setting, each with draws of its own. Noise is each one's own. A record's gradient at w is
f(a . w, y) a + ridge w. `tests/reproduction/test_linear_trainings.py` holds every method to the library's.

    DP-SGD     x - eta_k (mean clip(g_i(x), C_k) + noise)
    DP-SVRG    x - eta_k (mean [clip(g_i(x), C_k) - clip(g_i(w), C_k)] + noise + anchor gradient),
               clipped at C_k
    DiceSGD    x - eta_k (v + noise), v = mean clip(g_i(x), C_k) + clip(e, C_k), e <- e + mean g_i(x) - v
    DP-C4      x - eta_k (mean clip(g_i(x) - g_i(w), C1) + noise + anchor gradient clipped at C2),
               C1 = min(C_k, c1 |mean of the differences|), C2 = min(C_k, c2_k |anchor gradient|)
    DP-C4+     C1 = min(C_k, c1 |x - w|), C2 = min(C_k, c2_k |gradient at the anchor before|)
    released   as DP-C4+, and C2 from the released anchor gradient without its noise: proven
    quantile   as DP-C4+, and C2 from a noised count: proven

An anchor gradient is noised once and used until the anchor moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "ANCHORED",
    "DICE",
    "PLUS",
    "QUANTILE",
    "RAW",
    "RELEASED",
    "SGD",
    "SVRG",
    "Arm",
    "Design",
    "LinearRecords",
    "Noise",
    "simulate",
]

SGD, SVRG, DICE, RAW, PLUS = "DP-SGD", "DP-SVRG", "DiceSGD", "DP-C4", "DP-C4+"
RELEASED, QUANTILE = "DP-C4+, released", "DP-C4+, quantile"
ANCHORED = (SVRG, RAW, PLUS, RELEASED, QUANTILE)
SHRINK_LIMIT, QUANTILE_RATE, COUNT_NOISE, RAMP, FLOOR = 0.5, 3.0, 0.05, 0.05, 1e-30
"""The library's defaults of `ReleasedNorm`, `Quantile` and its soft count."""

TINY = 1e-37
"""No length is divided by less; a float32."""


@dataclass(frozen=True)
class LinearRecords:
    """Records of a linear model.

    Attributes:
        x, y: [N, d] and [N].
        factor: (scores, y) -> the factor of a record's row in its gradient.
        ridge: times the point, in every record's gradient.
    """

    x: Tensor
    y: Tensor
    factor: Callable[[Tensor, Tensor], Tensor]
    ridge: float = 0.0


@dataclass(frozen=True)
class Arm:
    """Settings of one training.

    Attributes:
        rate, halved_at: eta_k = rate / (1 + k / halved_at).
        clip_norm, decay: C_k = clip_norm decay^k.
        c1: scale of the coupled threshold.
        c2, growth: c2_k = c2 + growth k.
        quantile: share of anchor rows that `QUANTILE` wants inside.
    """

    rate: float
    halved_at: float = math.inf
    clip_norm: float = 1.0
    decay: float = 1.0
    c1: float = 1.0
    c2: float = 1.0
    growth: float = 0.0
    quantile: float = 0.8


@dataclass(frozen=True)
class Noise:
    """Noise of sums over what one record may add: z of the steps, z of the anchor gradients.

    The pair of clipped gradients of DP-SVRG may add 2 C.
    """

    step: float
    anchor: float = 0.0
    count: float = COUNT_NOISE


@dataclass(frozen=True)
class Design:
    """What all trainings of a call share.

    Attributes:
        steps: T.
        batch, anchor_batch: expected records, each drawn by itself; all of them for the whole number.
        period: a new anchor with probability 1 / period, or after every so many steps.
        routine: 1 to 4, as the paper counts.
    """

    steps: int
    batch: int
    anchor_batch: int
    period: int
    routine: int = 1

    def moves(self, rng: torch.Generator) -> list[bool]:
        """After which steps the anchor moves."""
        if self.routine in (2, 4):
            return [k % self.period == 1 % self.period for k in range(self.steps)]
        found: list[bool] = (torch.rand(self.steps, generator=rng) < 1 / self.period).tolist()
        return found


@dataclass
class _Gradients:
    """Of n records at K points, or their differences: factor times row plus ridge times the point."""

    records: LinearRecords
    rows: Tensor  # [n, d], or [K, n, d]
    live: Tensor  # [1 or K, n]: one for a drawn record, zero where other trainings drew more
    factors: Tensor  # [K, n]
    scores: Tensor
    points: Tensor  # [K, d]

    def __sub__(self, other: _Gradients) -> _Gradients:
        return _Gradients(
            self.records,
            self.rows,
            self.live,
            self.factors - other.factors,
            self.scores - other.scores,
            self.points - other.points,
        )

    def norms(self) -> Tensor:
        lengths = self.rows.norm(dim=-1)
        if not self.records.ridge:
            return self.factors.abs() * lengths
        ridge = self.records.ridge
        squares = (self.factors * lengths).square() + 2 * ridge * self.factors * self.scores
        return (squares + ridge**2 * self.points.square().sum(1)[:, None]).clamp(min=0).sqrt()

    def sums(self, bound: Tensor | None = None) -> Tensor:
        """[K, d]; each gradient clipped at its training's bound [K]."""
        weights = self.live.expand_as(self.factors)
        if bound is not None:
            weights = weights * (bound[:, None] / self.norms().clamp(min=TINY)).clamp(max=1)
        factors = weights * self.factors
        total = factors @ self.rows if self.rows.dim() == 2 else (factors[:, None] @ self.rows)[:, 0]
        if self.records.ridge:
            total = total + self.records.ridge * weights.sum(1)[:, None] * self.points
        return total

    def mean_norm(self) -> Tensor:
        return self.sums().norm(dim=1) / self.live.sum(1).clamp(min=1)


class _Trainings:
    def __init__(
        self,
        method: str,
        records: LinearRecords,
        arms: Sequence[Arm],
        noise: Noise,
        design: Design,
        seed: int,
        own_draws: bool,
    ) -> None:
        self.own_draws = own_draws
        self.method, self.records, self.noise, self.design = method, records, noise, design
        self.rng = torch.Generator().manual_seed(seed)
        self.dtype = records.x.dtype
        self.x = torch.zeros(len(arms), records.x.shape[1], dtype=self.dtype)
        names = ("rate", "halved_at", "clip_norm", "decay", "c1", "c2", "growth", "quantile")
        self.of = {
            name: torch.tensor([getattr(arm, name) for arm in arms], dtype=self.dtype) for name in names
        }
        self.moves = design.moves(self.rng)
        self.anchor, self.new = self.x, True
        self.gradient = self.memory = torch.zeros_like(self.x)
        self.raw = torch.full((len(arms),), math.inf, dtype=self.dtype)
        self.bound = self.cap(0)

    def cap(self, k: int) -> Tensor:
        return self.of["clip_norm"] * self.of["decay"] ** k

    def draw(self, size: int) -> tuple[Tensor, Tensor]:
        """Records of which some are drawn, each by itself, and which: [n] or [K, n], and [1 or K, n]."""
        count = len(self.records.y)
        if size >= count:
            return torch.arange(count), torch.ones(1, count, dtype=self.dtype)
        arms = len(self.x) if self.own_draws else 1
        drawn = torch.rand(arms, count, generator=self.rng) < size / count
        if not self.own_draws:
            found = drawn[0].nonzero().flatten()
            return found, torch.ones(1, len(found), dtype=self.dtype)
        if 4 * size > count:  # then all rows are fewer than each one's drawn ones
            return torch.arange(count), drawn.to(self.dtype)
        counts = drawn.sum(1)
        arm, record = drawn.nonzero().unbind(1)
        place = torch.arange(len(arm)) - (counts.cumsum(0) - counts)[arm]
        found = torch.zeros(arms, int(counts.max()), dtype=torch.long)
        found[arm, place] = record
        return found, (torch.arange(found.shape[1]) < counts[:, None]).to(self.dtype)

    def at(self, points: Tensor, drawn: tuple[Tensor, Tensor]) -> _Gradients:
        rows = self.records.x[drawn[0]]
        scores = points @ rows.T if rows.dim() == 2 else (rows @ points[:, :, None])[:, :, 0]
        factors = self.records.factor(scores, self.records.y[drawn[0]])
        return _Gradients(self.records, rows, drawn[1], factors, scores, points)

    def normal(self, std: Tensor) -> Tensor:
        return torch.randn(self.x.shape, generator=self.rng, dtype=self.dtype) * std[:, None]

    def step(self, k: int) -> None:
        update = self.anchored(k) if self.method in ANCHORED else self.plain(k)
        before = self.x
        self.x = self.x - (self.of["rate"] / (1 + k / self.of["halved_at"]))[:, None] * update
        if self.method in ANCHORED:
            self.new = self.moves[k]
            if self.new:
                self.anchor = self.x if self.design.routine in (3, 4) else before

    def plain(self, k: int) -> Tensor:
        cap, size = self.cap(k), self.design.batch
        found = self.at(self.x, self.draw(size))
        update = found.sums(cap) / size
        if self.method == DICE:
            lengths = self.memory.norm(dim=1).clamp(min=TINY)
            update = update + self.memory * (cap / lengths).clamp(max=1)[:, None]
            self.memory = self.memory + found.sums() / size - update
        return update + self.normal(self.noise.step * cap / size)

    def anchored(self, k: int) -> Tensor:
        if self.new:
            self.release_anchor(k)
        apart = k > 0 and not (self.design.routine in (3, 4) and self.new)
        return self.gradient + self.coupled(k) if apart else self.gradient

    def release_anchor(self, k: int) -> None:
        cap, size = self.cap(k), self.design.anchor_batch
        found = self.at(self.anchor, self.draw(size))
        c2 = self.of["c2"] + self.of["growth"] * k
        if self.method == SVRG:
            bound = cap
        elif self.method in (RAW, PLUS):
            raw = found.mean_norm()
            bound = torch.minimum(cap, c2 * (raw if self.method == RAW else self.raw)).clamp(min=FLOOR)
            self.raw = raw
        else:
            bound = torch.minimum(cap, self.bound)
        std = self.noise.anchor * bound / size
        self.gradient = found.sums(bound) / size + self.normal(std)
        if self.method == RELEASED:
            square = self.gradient.square().sum(1) - self.x.shape[1] * std.square()
            following = torch.maximum(c2 * square.clamp(min=0).sqrt(), SHRINK_LIMIT * bound)
            self.bound = torch.minimum(following, cap).clamp(min=FLOOR)
        if self.method == QUANTILE:
            above = ((found.norms() / bound[:, None] - 1 + RAMP) / (2 * RAMP)).clamp(0, 1)
            count = ((0.5 - above) * found.live).sum(1) + self.normal(torch.ones_like(bound))[
                :, 0
            ] * self.noise.count * size
            push = -QUANTILE_RATE * (count / size + 0.5 - self.of["quantile"])
            self.bound = torch.minimum(bound * push.exp(), cap).clamp(min=FLOOR)

    def coupled(self, k: int) -> Tensor:
        cap, size, drawn = self.cap(k), self.design.batch, self.draw(self.design.batch)
        here, there = self.at(self.x, drawn), self.at(self.anchor, drawn)
        if self.method == SVRG:
            pair = here.sums(cap) - there.sums(cap)
            return pair / size + self.normal(2 * self.noise.step * cap / size)
        apart = here - there
        length = apart.mean_norm() if self.method == RAW else (self.x - self.anchor).norm(dim=1)
        bound = torch.minimum(cap, self.of["c1"] * length).clamp(min=FLOOR)
        return apart.sums(bound) / size + self.normal(self.noise.step * bound / size)


def simulate(
    method: str,
    records: LinearRecords,
    arms: Sequence[Arm],
    noise: Noise,
    design: Design,
    seed: int,
    measure: Callable[[Tensor], Tensor],
    at: Sequence[int] = (),
    own_draws: bool = False,
) -> dict[int, list[float]]:
    """Train all arms, from zero.

    Args:
        method: one of this module's.
        records: the data.
        arms: settings of the trainings.
        noise: of sums.
        design: of all trainings.
        seed: of draws, noise and anchors.
        measure: models [K, d] -> [K].
        at: steps done after which to measure; at the end by default.
        own_draws: each training draws for itself; the steps at which anchors move are the call's.
    """
    trainings = _Trainings(method, records, arms, noise, design, seed, own_draws)
    found = {}
    for k in range(design.steps):
        trainings.step(k)
        if k + 1 in (at or (design.steps,)):
            found[k + 1] = measure(trainings.x).tolist()
    return found
