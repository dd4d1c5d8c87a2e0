"""What the journal says of a run: what was used of its plan, and what it costs.

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import dp_accounting

from equipoise._rounding import plain
from equipoise.privacy.accounting.calibrate import Budget
from equipoise.privacy.accounting.epsilon import EpsilonResult, check_accounted, epsilon
from equipoise.privacy.accounting.private_search import PrivateSearch
from equipoise.privacy.errors import BudgetError, JournalError
from equipoise.privacy.ledger.journal import (
    BookedDraw,
    CloseEntry,
    Entry,
    ReleaseEntry,
    RunEntry,
    SearchEntry,
    VoidEntry,
)
from equipoise.privacy.plan import Pattern, PrivacyPlan, published

GUARANTEES = ("proven", "worst_case", "none")
"""What a run may claim, the strongest first."""

# Bounds are computed in floating point, in the plan and in the sums apart. Noise is scaled to the sum's own
# bound, so that a bound above the planned one by rounding costs no privacy. A smaller slack than some eps of
# float32 refuses sums for rounding; a larger one takes sums that the plan did not name.
BOUND_ROUNDING = 1 + 1e-6

OtherRuns = Mapping[str, dp_accounting.DpEvent]
"""What the other runs of a journal cost, by their names."""


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
        draws: by index, what was booked of the draw.
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
        >>> record = ledger.record
        >>> list(record.used.values()), record.epochs, record.releases_left()
        ([3], {'batch': 2}, {'batch': 17})
    """

    run: str
    plan: PrivacyPlan
    private: bool
    search: PrivateSearch | None = None
    used: Counter[Pattern] = field(default_factory=Counter)
    epochs: dict[str, int] = field(default_factory=dict)
    draws: dict[int, DrawRecord] = field(default_factory=dict)
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
        return entry.fitting(record)

    def after(self, entry: Entry) -> RunRecord:
        """The record with the run's next entry, of the kind that the entry needs; this one is used up."""
        record = entry.fitting(self)
        record.add(entry)
        return record

    def with_steps(self, steps: Sequence[Mapping[str, Any]]) -> RunRecord:
        """The record with the unproven steps that a statement lists, which no entry here has brought.

        Raises:
            ValueError: no run with this plan has them.
        """
        return published.PublishedRecord.of(self).with_steps(steps) if steps else self

    def add(self, entry: Entry) -> None:
        """Take the run's next entry in.

        Raises:
            JournalError: no ledger with this plan writes it after the entries before.
        """
        self._begin(entry, leaves=isinstance(entry, ReleaseEntry))
        match entry:
            case RunEntry():
                raise self._error("a second plan; a run has one")
            case ReleaseEntry():
                self._add_release(entry)
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

    def _begin(self, entry: Entry, leaves: bool) -> None:
        """Count an entry; nothing leaves after the end of the run."""
        self._entries += 1
        if self.closed and leaves:
            raise self._error("release after the run was closed")

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

    # ---- what it adds up to

    @property
    def guarantee(self) -> str:
        """What the run may claim: one of `GUARANTEES`."""
        return "proven"

    @property
    def unproven_steps(self) -> list[dict[str, Any]]:
        """Steps that no proof covers, as a statement lists them; a ledger of this room books none."""
        return []

    @property
    def event(self) -> dp_accounting.DpEvent:
        """Event of the releases made. Undefined if guarantee == "none"."""
        return self.whole_event(self.plan.event(self.used, self.epochs), is_planned=False)

    @property
    def claimed_event(self) -> dp_accounting.DpEvent:
        """Event that bounds what the run's releases tell. Undefined if guarantee == "none".

        It is the plan's, whatever decided where the run ends, unless that was fixed beforehand.
        """
        return self.event if self.stop_fixed_beforehand else self.whole_event(self.plan.event(), True)

    def whole_event(self, event: dp_accounting.DpEvent, is_planned: bool) -> dp_accounting.DpEvent:
        """An event of the plan's releases, all of them if `is_planned`, with the search around the run."""
        whole = compose_events([event])
        return whole if self.search is None else self.search.event(whole)

    @property
    def used_up(self) -> bool:
        """Whether every planned release was made."""
        return all(self.used[pattern] == pattern.count for pattern in self.patterns)

    @property
    def reserved_event(self) -> dp_accounting.DpEvent:
        """What the run costs other runs over the same data: what it claims.

        A run with a public seed is not private, and its event says so.

        Raises:
            JournalError: no accountant can read the plan.
        """
        if not self.private:
            return dp_accounting.NonPrivateDpEvent()
        try:
            return self.claimed_event
        except (ArithmeticError, ValueError, TypeError) as error:
            raise JournalError(
                f"the plan of run {self.run} in the journal has no event ({error}): the journal was edited. "
                "Nothing more can be released under it; restore it from a copy"
            ) from error

    def releases_left(self) -> dict[str, int]:
        """Draws left for each draw name; none of a run that was closed."""
        left: Counter[str] = Counter()
        for pattern in self.patterns:
            left[pattern.draw] += pattern.count - self.used[pattern]
        return dict.fromkeys(left, 0) if self.closed else dict(left)


# ---- epsilon of a run among others


def compose_events(events: Iterable[dp_accounting.DpEvent]) -> dp_accounting.DpEvent:
    """The composition of events."""
    return dp_accounting.ComposedDpEvent(list(events))


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
            f"noise this small adds {found.noise_tail:.2g} to delta={plain(budget.delta)}, since normal "
            "numbers end (noise_tail of a statement). Nothing was spent. Give a smaller epsilon or a larger "
            "noise_multiplier, or a larger delta"
        )
    total = found.value
    # The noise was fitted with the same accountant; the sum over the runs may round in another order.
    if total > budget.epsilon * (1 + 1e-9):
        over = f"at delta={plain(budget.delta)}, above the budget of {budget.epsilon:g}"
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
