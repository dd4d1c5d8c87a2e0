"""What leaves without a proof: how it is planned, booked in the journal and added up.

A *hole* is a step that no proof covers: a raw value that left, or noise of a scale that is not proved. One
without a worst case leaves its run no guarantee. Of the others the worst cases are added up, as Gaussians of
their own: multipliers z_j compose to one whose inverse square is the sum of theirs.

`PublishedPlan`, the entries and `PublishedRecord` are read by whoever reads a journal, so nothing here needs
torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import dp_accounting

from equipoise.privacy import PlanError, Sampling, sampling_from
from equipoise.privacy.ledger.journal import BookedDraw, Entry, FromZero, Positive
from equipoise.privacy.ledger.run_record import RunRecord, compose_events
from equipoise.privacy.plan import Planned, PrivacyPlan


@dataclass(frozen=True)
class Unproven(Planned):
    """One kind of quantity that leaves with noise of a scale that no proof covers, or with none.

    It is planned so that its draw has a sampling and its number a limit; it adds nothing to the plan's event.

    Args:
        name: its name in the ledger.
        draw: name of the draw.
        sampling: sampling of the draw; None takes the plan's.
        count: number of releases; None takes the steps of its sampling.
    """

    name: str
    draw: str = "batch"
    sampling: Sampling | None = None
    count: int | None = None


@dataclass(frozen=True)
class PublishedPlan(PrivacyPlan):
    """A plan that holds, in addition to its releases, what will leave without a proof.

    Args:
        unproven: what will; it has no part in the event.
    """

    unproven: Sequence[Unproven] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "unproven", tuple(self.unproven))
        super().__post_init__()
        for item in self.unproven:
            if self.sampling_of(item.draw).pushes_out:
                raise PlanError(
                    f"release {item.name!r} without a proof has draws in which a record may push another "
                    f"one out ({type(self.sampling_of(item.draw)).__name__}): what one record does there at "
                    "worst is not known. Take Poisson"
                )

    @property
    def planned(self) -> tuple[Planned, ...]:
        return (*self.releases, *self.unproven)

    @property
    def guarantee(self) -> str:
        return "worst_case" if self.unproven else super().guarantee

    @property
    def arithmetic(self) -> str:
        return "floating_point" if self.unproven else super().arithmetic  # the ledger's, of their noise

    def hardened(self) -> PrivacyPlan:
        if self.unproven:
            raise PlanError(
                "hardened=True covers proven releases, and the plan holds the unproven ones "
                f"{[item.name for item in self.unproven]}, whose noise is floating point. Take a method or a "
                "recipe that is proven, or leave hardened out"
            )
        return super().hardened()

    def describe(self) -> dict[str, Any]:
        rows = [
            {
                "name": item.name,
                "draw": item.draw,
                "sampling": self.sampling_of(item.draw).describe(),
                "count": self.count(item),
            }
            for item in self.unproven
        ]
        return super().describe() | {"unproven": rows}

    @classmethod
    def _fields_of(cls, description: Mapping[str, Any]) -> dict[str, Any]:
        rows = [{**row, "sampling": sampling_from(row["sampling"])} for row in description["unproven"]]
        return super()._fields_of(description) | {"unproven": [Unproven(**row) for row in rows]}

    def fitting(self, record: RunRecord) -> RunRecord:
        return PublishedRecord.of(record) if self.unproven else record


# ---- lines of the journal


class PublishedEntry(Entry):
    """A line on something that left without a proof."""

    def fitting(self, record: RunRecord) -> RunRecord:
        return PublishedRecord.of(record)


@dataclass(frozen=True, kw_only=True)
class UnprovenEntry(PublishedEntry):
    """A value leaves with noise that no proof covers.

    Attributes:
        draw: that the value is of.
        name: as planned.
        std: standard deviation of the noise.
        hole: what is not proved.
        worst_case_multiplier: std over a proved worst-case change of the value; None without one.
        answer: keyed digest of the exact value.
    """

    kind = "unproven"
    draw: BookedDraw
    name: str
    std: FromZero
    hole: str
    worst_case_multiplier: Positive | None
    answer: str

    @property
    def question(self) -> tuple[float, float | None, str]:
        """What was asked: with anything else, the noise must not be given again."""
        return self.std, self.worst_case_multiplier, self.answer


@dataclass(frozen=True, kw_only=True)
class DisclosureEntry(PublishedEntry):
    """A private value leaves as it is.

    Attributes:
        hole: why, in a sentence.
        draw: that the value is of; None where it comes from no open draw.
    """

    kind = "hole"
    constants: ClassVar[dict[str, str]] = {"kind": "disclose"}
    hole: str
    draw: BookedDraw | None = None


# ---- what it adds up to


@dataclass
class Hole:
    """Unproven steps of one kind and reason.

    Attributes:
        kind: "disclose" (a raw value left, or nothing is claimed) or "release_unproven" (noise of a scale
            that is not proved).
        reason: the sentence given with it.
        count: how often.
        worst_case: sum of inverse squared worst-case multipliers; None if there is no worst-case bound.
    """

    kind: str
    reason: str
    count: int
    worst_case: float | None = None


@dataclass
class PublishedRecord(RunRecord):
    """The record of a run of which something left, or was planned to leave, without a proof.

    Attributes:
        holes: unproven steps, by kind and reason.
        unproven: by name and index, what left without proof.
        unproven_used: how many unproven releases of each name are booked.
    """

    holes: dict[tuple[str, str], Hole] = field(default_factory=dict)
    unproven: dict[tuple[str, int], UnprovenEntry] = field(default_factory=dict)
    unproven_used: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, record: RunRecord) -> PublishedRecord:
        """A record that goes on from what another one has taken in."""
        if isinstance(record, cls):
            return record
        found = cls(record.run, record.plan, record.private)
        vars(found).update(vars(record))
        return found

    def with_steps(self, steps: Sequence[Mapping[str, Any]]) -> PublishedRecord:
        for number, hole in enumerate(Hole(**row) for row in steps):
            if isinstance(hole.count, bool) or not isinstance(hole.count, int) or hole.count < 1:
                raise ValueError(f"holes[{number}].count must be at least 1")
            if self.holes.setdefault((hole.kind, hole.reason), hole) is not hole:
                raise ValueError(f"holes[{number}] has the kind and reason of an earlier one")
        if self._planned and not self.holes:
            raise ValueError(f"the plan holds {self._planned} releases without a proof, and no hole is named")
        if self._left > self._planned:
            raise ValueError(f"{self._left} releases without a proof are named, {self._planned} are planned")
        return self

    def add(self, entry: Entry) -> None:
        match entry:
            case UnprovenEntry():
                self._begin(entry, leaves=True)
                self._add_unproven(entry)
            case DisclosureEntry():
                self._begin(entry, leaves=True)
                if entry.draw is not None:
                    self._add_draw(entry.draw)
                self._add_hole("disclose", entry.hole, None)
            case _:
                super().add(entry)

    def _add_unproven(self, entry: UnprovenEntry) -> None:
        self._add_draw(entry.draw)
        name, key = entry.name, (entry.name, entry.draw.index)
        planned = [one for one in self._unproven if (one.name, one.draw) == (name, entry.draw.name)]
        if not planned:
            raise self._error(f"lets out {name!r:.60}, which the plan does not hold")
        if key in self.unproven or self.unproven_used[name] >= self.plan.count(planned[0]):
            raise self._error(f"lets out {name!r:.60} more often than planned")
        self.unproven[key] = entry
        self.unproven_used[name] += 1
        multiplier = entry.worst_case_multiplier
        try:
            cost = None if multiplier is None else multiplier**-2
        except OverflowError:
            raise self._error(f"worst_case_multiplier={multiplier!r} is too small") from None
        self._add_hole("release_unproven", entry.hole, cost)

    def _add_hole(self, kind: str, reason: str, cost: float | None) -> None:
        """Count an unproven step; one without a worst case leaves its hole without one."""
        hole = self.holes.setdefault((kind, reason), Hole(kind, reason, 0, None if cost is None else 0.0))
        hole.count += 1
        hole.worst_case = None if cost is None or hole.worst_case is None else hole.worst_case + cost

    @property
    def _unproven(self) -> Sequence[Unproven]:
        return self.plan.unproven if isinstance(self.plan, PublishedPlan) else ()

    @property
    def _left(self) -> int:
        return sum(hole.count for hole in self.holes.values() if hole.kind == "release_unproven")

    @property
    def _planned(self) -> int:
        return sum(map(self.plan.count, self._unproven))

    @property
    def guarantee(self) -> str:
        # One step without any bound leaves nothing to claim, however good the others are.
        if any(hole.kind == "disclose" or hole.worst_case is None for hole in self.holes.values()):
            return "none"
        return "worst_case" if self.holes else super().guarantee

    @property
    def unproven_steps(self) -> list[dict[str, Any]]:
        return [asdict(hole) for hole in self.holes.values()]

    @property
    def used_up(self) -> bool:
        return super().used_up and self._left == self._planned

    def whole_event(self, event: dp_accounting.DpEvent, is_planned: bool) -> dp_accounting.DpEvent:
        """With the worst cases of the unproven steps; of a whole plan as if those to come were like them."""
        times = self._planned / self._left if is_planned and self._left else 1.0
        worst = times * sum(hole.worst_case or 0.0 for hole in self.holes.values())
        if worst > 0:
            event = compose_events([event, dp_accounting.GaussianDpEvent(worst**-0.5)])
        return super().whole_event(event, is_planned)

    @property
    def reserved_event(self) -> dp_accounting.DpEvent:
        """A run with a step that has no worst case is not private.

        Nor is an open run whose plan has unproven releases: what the next one will cost is not known before
        it is booked.
        """
        if self.guarantee == "none" or (self._unproven and not self.closed):
            return dp_accounting.NonPrivateDpEvent()
        return super().reserved_event

    def releases_left(self) -> dict[str, int]:
        left = super().releases_left()
        for item in self._unproven:
            unused = 0 if self.closed else self.plan.count(item) - self.unproven_used[item.name]
            left[item.draw] = max(left.get(item.draw, 0), unused)
        return left
