"""What the journal says of a run: what was used of its plan, what is not proved, what it costs.

`RunRecord` folds the entries of one run in their order. Whoever needs to know what a run did reads this one
record: the ledger that is open, the ledgers of other runs over the same data, and who verifies a statement.
The fold also holds every entry against the plan and against the entries before; what no ledger writes is a
`JournalError`.

A draw has one index, and one ordinal among the draws of its name; it is released once. An index without an
entry is no sign of an edit, since a draw may be opened and not released.

**What was spent and what is claimed.** The event of the releases made tells what was spent so far. It bounds
what an observer learns only if their number was fixed: who may stop when a release looks bad can make the
loss at the stop larger than that of any fixed number of steps. So what is claimed, towards readers and other
runs over the same data, is the whole plan, however much of it was used. Only where the run was closed with
the word that its stop had been fixed beforehand, no more is claimed than the releases made.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import dp_accounting

from equipoise.privacy.accounting.calibrate import Budget
from equipoise.privacy.accounting.epsilon import EpsilonResult, check_accounted, epsilon
from equipoise.privacy.accounting.private_search import PrivateSearch
from equipoise.privacy.errors import BudgetError, JournalError
from equipoise.privacy.ledger.journal import (
    BookedDraw,
    CloseEntry,
    DisclosureEntry,
    Entry,
    ReleaseEntry,
    RunEntry,
    SearchEntry,
    UnprovenEntry,
    VoidEntry,
)
from equipoise.privacy.plan import Pattern, PrivacyPlan

GUARANTEES = ("proven", "worst_case", "none")
"""What a run may claim, the strongest first."""

# Bounds are computed in floating point, in the plan and in the sums apart. Noise is scaled to the sum's own
# bound, so that a bound above the planned one by rounding costs no privacy.
BOUND_ROUNDING = 1 + 1e-6

OtherRuns = Mapping[str, dp_accounting.DpEvent]
"""What the other runs of a journal cost, by their names."""


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


@dataclass(slots=True)
class DrawRecord:
    """What was booked of one draw.

    Attributes:
        booked: name, ordinal and digest of the draw.
        release: its release, if there was one.
        void: whether it must not be repeated.
    """

    booked: BookedDraw
    release: ReleaseEntry | None = None
    void: bool = False


@dataclass
class RunRecord:
    """One run: its plan, and what the entries after it add up to.

    Attributes:
        run: name of the run.
        plan: what it may release.
        private: whether its key is secret.
        search: the search that the run is the outcome of.
        used: how many releases of each planned pattern are booked.
        epochs: by name of draws that take turns (`Sampling.takes_turns`), how many epochs their releases lie
            in. Draws that were opened and not released leave gaps, so that a few releases may lie in many
            epochs; a record meets one Gaussian per epoch.
        holes: unproven steps, by kind and reason.
        draws: by index, what was booked of the draw.
        unproven: by name and index, what left without proof.
        unproven_used: how many unproven releases of each name are booked.
        patterns: the plan's.
        data: digests of the records that the entries name.
        num_draws: how many draws have entries.
        next_index: 1 + the largest index that has an entry.
        next_ordinals: the same of the ordinals, by name of the draw.
        closed: whether the run has ended.
        stop_fixed_beforehand: whether it ended where it had been fixed to, as who closed it said.

    Example:
        >>> from equipoise.privacy import FixedEpochs, Gaussian, Ledger, Private, Release, capped
        >>> import torch
        >>> ledger = Ledger(PrivacyPlan([Release("total", 5.0, Gaussian(1.0))], FixedEpochs(10, 100, 20)))
        >>> for ordinal in range(12):
        ...     draw = ledger.open("batch")
        ...     if ordinal in (0, 4, 11):
        ...         out = ledger.release(draw, {"total": capped(Private(torch.ones(2), draw), upper=5.0)})
        >>> record = RunRecord.from_entries(ledger.journal.entries())
        >>> list(record.used.values()), record.epochs, record.releases_left()
        ([3], {'batch': 2}, {'batch': 17})
    """

    run: str
    plan: PrivacyPlan
    private: bool
    search: PrivateSearch | None = None
    used: Counter[Pattern] = field(default_factory=Counter)
    epochs: dict[str, int] = field(default_factory=dict)
    holes: dict[tuple[str, str], Hole] = field(default_factory=dict)
    draws: dict[int, DrawRecord] = field(default_factory=dict)
    unproven: dict[tuple[str, int], UnprovenEntry] = field(default_factory=dict)
    unproven_used: Counter[str] = field(default_factory=Counter)
    data: set[str] = field(default_factory=set)
    num_draws: int = 0
    next_index: int = 0
    next_ordinals: dict[str, int] = field(default_factory=dict)
    closed: bool = False
    stop_fixed_beforehand: bool = False
    owners: str = ""

    def __post_init__(self) -> None:
        self.patterns = self.plan.patterns()
        self._patterns: dict[tuple[str, tuple[str, ...]], list[Pattern]] = {}
        for pattern in self.patterns:
            self._patterns.setdefault((pattern.draw, tuple(sorted(pattern.names))), []).append(pattern)
        samplings = {release.draw: self.plan.sampling_of(release.draw) for release in self.plan.releases}
        self._epoch_lengths = {
            draw: sampling.draws_per_epoch for draw, sampling in samplings.items() if sampling.takes_turns
        }
        self.epochs = dict.fromkeys(self._epoch_lengths, 0) | self.epochs
        self._epochs_met: set[tuple[str, int]] = set()
        self._index_of: dict[tuple[str, int], int] = {}  # (draw name, ordinal) -> index
        self._entries = 0

    # ---- the fold

    @classmethod
    def from_entries(cls, entries: Iterable[Entry]) -> RunRecord:
        """The record of the run that all these entries are of, in their order.

        Raises:
            JournalError: they are not what a ledger writes.
        """
        entries = iter(entries)
        record = cls.begun(next(entries))
        for entry in entries:
            record.add(entry)
        return record

    @classmethod
    def begun(cls, entry: Entry) -> RunRecord:
        """The record of a run after its first entry.

        Raises:
            JournalError: the entry holds no plan.
        """
        if not isinstance(entry, RunEntry):
            raise JournalError(
                f"the journal has entries of run {entry.run} without its plan; it is not a journal of this "
                "library"
            )
        record = cls(entry.run, entry.plan, entry.private, data={entry.data}, owners=entry.owners)
        record._entries = 1
        return record

    def add(self, entry: Entry) -> None:
        """Take the run's next entry in.

        Raises:
            JournalError: no ledger with this plan writes it after the entries before.
        """
        self._entries += 1
        if self.closed and isinstance(entry, (ReleaseEntry, UnprovenEntry, DisclosureEntry)):
            raise self._error("release after the run was closed")
        match entry:
            case RunEntry():
                raise self._error("a second plan; a run has one")
            case ReleaseEntry():
                self._add_release(entry)
            case UnprovenEntry():
                self._add_unproven(entry)
            case DisclosureEntry():
                if entry.draw is not None:
                    self._add_draw(entry.draw)
                self._add_hole("disclose", entry.hole, None)
            case VoidEntry():
                if entry.index not in self.draws:
                    raise self._error(f"makes draw {entry.index} void, which the run does not hold")
                self.draws[entry.index].void = True
            case SearchEntry():
                if self.search is not None:
                    raise self._error("charges the run for a second search; a run comes out of one")
                self.search = entry.search
            case CloseEntry() if not self.closed:  # what the first end said stays: others may rest on it
                self.closed, self.stop_fixed_beforehand = True, entry.stop_fixed_beforehand

    def _error(self, what: str) -> JournalError:
        return JournalError(f"line {self._entries} of run {self.run}: {what}")

    def _add_draw(self, booked: BookedDraw) -> DrawRecord:
        """The draw of an entry: it has one index, one ordinal and one digest."""
        name, ordinal = slot = booked.name, booked.ordinal
        record = self.draws.get(booked.index)
        if record is None:
            record = self.draws[booked.index] = DrawRecord(booked)
            self.num_draws += 1
            self.next_index = max(self.next_index, booked.index + 1)
            self.next_ordinals[name] = max(self.next_ordinals.get(name, 0), ordinal + 1)
        known = record.booked
        same = (known.name, known.ordinal, known.digest) == (*slot, booked.digest)
        if not same or self._index_of.setdefault(slot, booked.index) != booked.index:
            raise self._error(
                f"index {booked.index} or ordinal {booked.ordinal} of draw {booked.name!r:.60} is that of "
                "another draw"
            )
        self.data.add(booked.data)
        return record

    def _add_release(self, entry: ReleaseEntry) -> None:
        draw = self._add_draw(entry.draw)
        pattern = self._pattern_of(entry)
        if pattern is None:
            raise self._error(
                f"the plan holds no draw {entry.draw.name!r:.60} that releases {entry.pattern!r:.60} together"
            )
        # A ledger books a release of fewer names as a planned pattern that holds them, which costs more.
        if not entry.bounds or not set(entry.bounds) <= pattern.names:
            raise self._error("releases what the plan does not hold")
        if set(entry.multipliers) != set(entry.bounds):
            raise self._error(
                f"has noise multipliers for {sorted(entry.multipliers)!r:.60} and bounds for "
                f"{sorted(entry.bounds)!r:.60}"
            )
        for name, bound in entry.bounds.items():
            planned = self.plan[name]
            multiplier = planned.at(entry.draw.ordinal).noise_multiplier
            if entry.multipliers[name] != multiplier:
                raise self._error(
                    f"has the noise multiplier {entry.multipliers[name]!r} for {name!r}, the plan "
                    f"{multiplier!r}"
                )
            if bound > planned.max_bound * BOUND_ROUNDING:
                raise self._error(
                    f"has the bound {bound!r} for {name!r}, the plan allows {planned.max_bound!r}"
                )
        if draw.release is not None:
            raise self._error(f"releases draw {entry.draw.index} a second time")
        if self.used[pattern] >= pattern.count:
            raise self._error(
                f"more than the {pattern.count} planned releases of {sorted(pattern.names)} were made"
            )
        draw.release = entry
        self.used[pattern] += 1
        # Epochs that have a release, not releases over the length of an epoch: draws that were opened and not
        # released spread a few releases over many epochs, and a record pays once in each.
        if entry.draw.name in self._epoch_lengths:
            epoch = (entry.draw.name, entry.draw.ordinal // self._epoch_lengths[entry.draw.name])
            if epoch not in self._epochs_met:
                self._epochs_met.add(epoch)
                self.epochs[entry.draw.name] += 1

    def _pattern_of(self, entry: ReleaseEntry) -> Pattern | None:
        """The planned pattern that a release was booked as: of several it is that of the draw's stage."""
        stages, ordinal = self._patterns.get((entry.draw.name, entry.pattern), []), entry.draw.ordinal
        place = bisect_right(stages, ordinal, key=lambda pattern: pattern.first) - 1
        return stages[place] if place >= 0 and stages[place].holds(ordinal) else None

    def _add_unproven(self, entry: UnprovenEntry) -> None:
        self._add_draw(entry.draw)
        name, key = entry.name, (entry.name, entry.draw.index)
        planned = [one for one in self.plan.unproven if (one.name, one.draw) == (name, entry.draw.name)]
        if not planned:
            raise self._error(f"lets out {name!r:.60}, which the plan does not hold")
        if key in self.unproven or self.unproven_used[name] >= self.plan.count(planned[0]):
            raise self._error(f"lets out {name!r:.60} more often than planned")
        self.unproven[key] = entry
        self.unproven_used[name] += 1
        # Gaussians of multipliers z_j compose to one whose inverse square is the sum of theirs.
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

    # ---- what it adds up to

    @property
    def has_entries(self) -> bool:
        """Whether anything is booked but that the run began and ended."""
        return self._entries > 1 + self.closed

    @property
    def guarantee(self) -> str:
        """What the run may claim: one of `GUARANTEES`."""
        # One step without any bound leaves nothing to claim, however good the others are.
        if any(hole.kind == "disclose" or hole.worst_case is None for hole in self.holes.values()):
            return "none"
        return "worst_case" if self.holes else "proven"

    @property
    def event(self) -> dp_accounting.DpEvent:
        """Event of the releases made. Undefined if guarantee == "none"."""
        return self.with_holes(self.plan.event(self.used, self.epochs))

    @property
    def claimed_event(self) -> dp_accounting.DpEvent:
        """Event that bounds what the run's releases tell. Undefined if guarantee == "none".

        It is the plan's, whatever decided where the run ends, unless that was fixed beforehand.
        """
        if self.stop_fixed_beforehand:
            return self.event
        return self.with_holes(self.plan.event(), self._planned_per_unproven)

    @property
    def used_up(self) -> bool:
        """Whether every planned release was made."""
        proven = all(self.used[pattern] == pattern.count for pattern in self.patterns)
        return proven and self._planned_per_unproven == 1.0

    @property
    def _planned_per_unproven(self) -> float:
        """How many times as many unproven releases are planned as were made; 1 where none is either."""
        made = sum(hole.count for hole in self.holes.values() if hole.kind == "release_unproven")
        planned = sum(map(self.plan.count, self.plan.unproven))
        return planned / made if made else 1.0 + planned

    @property
    def reserved_event(self) -> dp_accounting.DpEvent:
        """What the run costs other runs over the same data: what it claims.

        A run with an unproven release without a worst case, with a disclosure, or with a public seed is not
        private, and its event says so. Nor is an open run whose plan has unproven releases: what the next one
        will cost is not known before it is booked.

        Raises:
            JournalError: no accountant can read the plan.
        """
        if self.guarantee == "none" or not self.private or (self.plan.unproven and not self.closed):
            return dp_accounting.NonPrivateDpEvent()
        try:
            return self.claimed_event
        except (ArithmeticError, ValueError, TypeError) as error:
            raise JournalError(
                f"the plan of run {self.run} in the journal has no event ({error}): the journal was edited. "
                "Nothing more can be released under it; restore it from a copy"
            ) from error

    def with_holes(self, event: dp_accounting.DpEvent, times: float = 1.0) -> dp_accounting.DpEvent:
        """An event of the plan, with the worst cases of unproven steps and the search around the run.

        Args:
            event: of the proven releases.
            times: how often the worst cases count.
        """
        worst = times * sum(hole.worst_case or 0.0 for hole in self.holes.values())
        whole = compose_events([event], worst)
        return whole if self.search is None else self.search.event(whole)

    def releases_left(self) -> dict[str, int]:
        """Draws left for each draw name; none of a run that was closed."""
        left: Counter[str] = Counter()
        for pattern in self.patterns:
            left[pattern.draw] += pattern.count - self.used[pattern]
        for item in self.plan.unproven:
            unused = self.plan.count(item) - self.unproven_used[item.name]
            left[item.draw] = max(left[item.draw], unused)
        return dict.fromkeys(left, 0) if self.closed else dict(left)


# ---- epsilon of a run among others


def compose_events(events: Iterable[dp_accounting.DpEvent], worst_case: float = 0.0) -> dp_accounting.DpEvent:
    """The composition of events, with a Gaussian of multiplier worst_case^(-1/2) if worst_case > 0."""
    parts = list(events)
    if worst_case > 0:
        parts.append(dp_accounting.GaussianDpEvent(worst_case**-0.5))
    return dp_accounting.ComposedDpEvent(parts)


def check_budget(plan: PrivacyPlan, others: OtherRuns, budget: Budget | None) -> None:
    """Refuse a plan that would bring the journal's total above the budget, or that cannot be accounted for.

    Raises:
        BudgetError: saying by how much.
        PlanError: without a budget, if no accountant covers the plan and the other runs.
    """
    event = compose_events([plan.event(), *others.values()])
    if budget is None:
        check_accounted(event, plan.relation)
        return
    found = epsilon(event, budget.delta, plan.relation)
    if (found.noise_tail or 0.0) >= budget.delta:
        raise BudgetError(
            f"noise this small adds {found.noise_tail:.2g} to delta={budget.delta:g}, since normal numbers "
            "end (noise_tail of a statement). Nothing was spent. Give a smaller epsilon or a larger "
            "noise_multiplier, or a larger delta"
        )
    total = found.value
    # The noise was fitted with the same accountant; the sum over the runs may round in another order.
    if total > budget.epsilon * (1 + 1e-9):
        over = f"at delta={budget.delta:g}, above the budget of {budget.epsilon:g}"
        if not others:
            raise BudgetError(
                f"the plan costs epsilon={total:.4g} {over}. Nothing was spent. Give a larger "
                "noise_multiplier, or none and the noise is fitted to the budget; take fewer steps, or raise "
                "the budget"
            )
        before = epsilon(compose_events(others.values()), budget.delta, plan.relation).value
        raise BudgetError(
            f"the plan would bring the journal's total to epsilon={total:.4g} {over} (other runs: "
            f"{before:.4g}). Nothing was spent. Calibrate the plan to what is left, close runs whose early "
            "stop was fixed beforehand (stop_fixed_beforehand=True), or raise the budget"
        )


def spent(record: RunRecord, others: OtherRuns, delta: float, *, cross_check: bool = True) -> EpsilonResult:
    """Epsilon of the releases made, and of what other runs claim. Undefined if the guarantee is "none"."""
    event = compose_events([record.event, *others.values()])
    return epsilon(event, delta, record.plan.relation, cross_check=cross_check)
