"""What an audit of neighbouring data sets found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

CHANGES = ("add", "remove", "replace", "silent")
"""What is done to one record, or to one user; a silent one enters without a gradient of its own."""

MOVEMENT_SLACK = 1e-5
"""What rounding may add, in units of the bound."""


@dataclass(frozen=True)
class NeighbourPair:
    """Two neighbouring data sets, and how far their sums were apart.

    Attributes:
        change: one of `CHANGES`.
        position: of the record, or of the user's first one, in its first draw.
        scale: what the floating-point numbers of what enters were multiplied by; 1 if nothing does.
        threads: that the processor used.
        movement: the largest distance of two sums, in units of the bound of this change.
        epsilon: of these steps for this very pair, at the audit's delta.
        claimed: what the bounds allow the steps, for a record that is in all of their draws.
    """

    change: str
    position: int
    scale: float
    threads: int
    movement: float
    epsilon: float
    claimed: float

    @property
    def limit(self) -> float:
        """The largest movement that holds: the bound, and for a silent record nothing."""
        return MOVEMENT_SLACK if self.change == "silent" else 1 + MOVEMENT_SLACK

    @property
    def holds(self) -> bool:
        return self.movement <= self.limit


@dataclass(frozen=True)
class NeighbourAudit:
    """What was measured.

    Attributes:
        pairs: every pair of data sets.
        method: by its name.
        steps: that were taken on each.
        records: of the data set.
        micro_batch_size: as the training chose it.
        draws_numbers: whether collate, augmentation, model or loss draw random numbers.
        left_out: the changes that were not tried, and why.
        delta: that the epsilons are for.
        plan_epsilon: what the whole plan claims at delta.
        unit: what a change adds, removes or replaces: one "record", or one "user" with all records.
    """

    pairs: tuple[NeighbourPair, ...]
    method: str
    steps: int
    records: int
    micro_batch_size: int
    draws_numbers: bool
    left_out: Mapping[str, str]
    delta: float
    plan_epsilon: float
    unit: str = "record"

    @property
    def holds(self) -> bool:
        """Whether no sum moved farther than it may."""
        return all(pair.holds for pair in self.pairs)

    @property
    def worst(self) -> NeighbourPair:
        """The pair that came closest to its limit, or went beyond it the farthest."""
        return max(self.pairs, key=lambda pair: pair.movement / pair.limit)

    def worst_of(self, change: str) -> NeighbourPair | None:
        """The pair of this change that moved the most; None if it was not tried."""
        return max((p for p in self.pairs if p.change == change), key=lambda p: p.movement, default=None)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "holds": self.holds, "slack": MOVEMENT_SLACK}
