"""Epochs without amplification: which of them the booked draws lie in.

With `FixedEpochs` sampling a record is in one draw of each epoch, which is cut by the draws' ordinals. Draws
that were opened and not released leave gaps, so that a few releases may lie in many epochs, and a record
meets a Gaussian in each.

Accounts of a journal: what other runs spent or reserved, and epsilon so far for a progress bar.

What the journal holds of one run: its draws, what was used of the plan, and what was not proved.

What a run has spent and may claim for it: of a ledger that is open, or of a journal that is read later.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dp_accounting

from equipoise.privacy.accounting.calibrate import Budget
from equipoise.privacy.accounting.epsilon import EpsilonResult, epsilon, quick_epsilon
from equipoise.privacy.accounting.private_search import PrivateSearch
from equipoise.privacy.errors import BudgetError, JournalError, LedgerError
from equipoise.privacy.ledger.journal import Journal
from equipoise.privacy.plan import Pattern, PrivacyPlan
from equipoise.privacy.sampling import FixedEpochs
from equipoise.privacy.statement import Hole, Statement, further_deltas, make_statement


class Epochs:
    """Counts, by draw name, how often a record may have met a release.

    Args:
        plan: of the run.

    Example:
        >>> from equipoise.privacy import Gaussian, Release
        >>> plan = PrivacyPlan([Release("gradient", 1.0, Gaussian(1.0))], FixedEpochs(10, 100, 20))
        >>> epochs = Epochs(plan)
        >>> for ordinal in (0, 4, 15):
        ...     epochs.add("batch", ordinal)
        >>> epochs.met
        {'batch': 2}
    """

    def __init__(self, plan: PrivacyPlan) -> None:
        samplings = {release.draw: plan.sampling_of(release.draw) for release in plan.releases}
        self._length = {
            draw: sampling.draws_per_epoch
            for draw, sampling in samplings.items()
            if isinstance(sampling, FixedEpochs)
        }
        self._times: Counter[tuple[str, int]] = Counter()
        self._most: Counter[tuple[str, int]] = Counter()
        self.met: dict[str, int] = dict.fromkeys(self._length, 0)

    def add(self, draw: str, ordinal: int) -> None:
        """Note a release on the draw of this name and ordinal; a slot released twice counts twice."""
        if draw not in self._length:
            return
        slot, epoch = (draw, ordinal), (draw, ordinal // self._length[draw])
        self._times[slot] += 1
        if self._times[slot] > self._most[epoch]:
            self._most[epoch] += 1
            self.met[draw] += 1


def compose_events(events: Iterable[dp_accounting.DpEvent], worst_case: float = 0.0) -> dp_accounting.DpEvent:
    """The composition of events, with a Gaussian of multiplier worst_case^(-1/2) if worst_case > 0."""
    parts = list(events)
    if worst_case > 0:
        parts.append(dp_accounting.GaussianDpEvent(worst_case**-0.5))
    return dp_accounting.ComposedDpEvent(parts)


def exact_epsilon(event: dp_accounting.DpEvent, delta: float, relation: str) -> EpsilonResult:
    """Epsilon of an event (cached by its content)."""
    return epsilon(event, delta, relation)


def events_of_other_runs(
    entries: Iterable[Mapping[str, Any]], relation: str
) -> dict[str, dp_accounting.DpEvent]:
    """The event of every run among the entries: its whole plan, or what it used if it was closed.

    A run with an unproven release without a worst case, or with a disclosure, is not private: its event says
    so.

    Raises:
        JournalError: if a run was accounted under another relation.
    """
    runs: dict[str, list[Mapping[str, Any]]] = {}
    for entry in entries:
        runs.setdefault(str(entry.get("run")), []).append(entry)
    return {run: _event_of_run(run, mine, relation) for run, mine in runs.items()}


def _event_of_run(run: str, entries: list[Mapping[str, Any]], relation: str) -> dp_accounting.DpEvent:
    heads = [entry for entry in entries if entry["type"] == "run"]
    if not heads:
        raise JournalError(
            f"the journal has entries of run {run} without its plan; it is not a journal of this library"
        )
    plan = PrivacyPlan.from_description(heads[0]["plan"])
    if plan.relation != relation:
        raise JournalError(
            f"run {run} in the journal is accounted under {plan.relation}, this one under {relation}: "
            "their costs do not "
            "compose; use one relation for all runs over a data set"
        )
    if any(
        e["type"] == "hole" or (e["type"] == "unproven" and e["worst_case_multiplier"] is None)
        for e in entries
    ):
        return dp_accounting.NonPrivateDpEvent()
    if not all(entry["private"] for entry in heads):
        return dp_accounting.NonPrivateDpEvent()
    worst = sum(e["worst_case_multiplier"] ** -2 for e in entries if e["type"] == "unproven")
    counts: dict[Pattern, int] | None = None
    epochs: Epochs | None = None
    if any(entry["type"] == "close" for entry in entries):
        counts, epochs = {}, Epochs(plan)
        for entry in entries:
            if entry["type"] == "release":
                pattern = plan.pattern(entry["draw"], entry["pattern"])
                counts[pattern] = counts.get(pattern, 0) + 1
                epochs.add(entry["draw"], entry["ordinal"])
    own = plan.event(counts, None if epochs is None else epochs.met)
    return with_search(compose_events([own], worst), search_of(entries))


def search_of(entries: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The search that a run of the entries was charged for, as `PrivateSearch.describe` gives it.

    Raises:
        JournalError: if it was charged for several: which of them it came from is not known.
    """
    found = [entry["search"] for entry in entries if entry["type"] == "search"]
    if len(found) > 1:
        raise JournalError("the journal charges a run for several searches; a run comes out of one")
    return dict(found[0]) if found else None


def with_search(event: dp_accounting.DpEvent, search: Mapping[str, Any] | None) -> dp_accounting.DpEvent:
    """The event of a run, or of the search that it is the outcome of."""
    return event if search is None else PrivateSearch.from_description(search).event(event)


class EpsilonProgress:
    """Epsilon after a fraction of the plan: coarse epsilon at fractions 1, 1/2, 1/4, ..., interpolated in
    logarithms.

    Args:
        event_at: from a fraction of the plan to the event spent by then.
        relation: neighbouring relation.
    """

    def __init__(self, event_at: Callable[[float], dp_accounting.DpEvent], relation: str) -> None:
        self._event_at = event_at
        self._relation = relation

    def __call__(self, fraction: float, delta: float) -> float:
        """Epsilon at delta after this fraction of the plan."""
        if fraction <= 0:
            return self._node(0.0, delta)
        octave = max(0, math.floor(-math.log2(min(fraction, 1.0)))) if fraction < 1 else 0
        high = 2.0**-octave
        upper = self._node(high, delta)
        if fraction >= high:
            return upper
        lower = self._node(high / 2, delta)
        if lower <= 0:
            return upper
        share = math.log(fraction / (high / 2)) / math.log(2)
        return math.exp((1 - share) * math.log(lower) + share * math.log(upper))

    def _node(self, fraction: float, delta: float) -> float:
        return quick_epsilon(self._event_at(fraction), delta, self._relation)


class Books:
    """The entries of a run, as the ledger needs them.

    Args:
        entries: of the journal, this run's alone, in their order.
        plan: of the run.
        position: number of draws opened when the checkpoint that is resumed was written.

    Attributes:
        lines: draw index -> the entry that decides whether the draw may be repeated.
        used: how many releases of each planned pattern are booked.
        epochs: the epochs that they lie in, where sampling does not amplify.
        ordinals: draw name -> how many draws of that name were opened.
        holes: what left without proof, by the sentence that says so.
        unproven_done: (release, index, digest) -> what it was asked.
        unproven_used: how many un-proven releases of each name are booked.

    Raises:
        LedgerError: the journal holds this run with another plan.
        JournalError: the journal lacks draws that the checkpoint has seen.
    """

    def __init__(self, entries: Sequence[dict[str, Any]], plan: PrivacyPlan, position: int) -> None:
        self.lines: dict[int, dict[str, Any]] = {}
        self.used: dict[Pattern, int] = {}
        self.epochs = Epochs(plan)
        self.ordinals: dict[str, int] = {}
        self.holes: dict[str, Hole] = {}
        self.unproven_done: dict[tuple[str, int, str], tuple[Any, ...]] = {}
        self.unproven_used: dict[str, int] = {}
        for entry in entries:
            if entry["type"] == "run" and entry["fingerprint"] != plan.fingerprint():
                raise LedgerError(
                    "the journal holds this run with another plan; a run keeps its plan. Start a new run "
                    "folder (a new key) for the "
                    "new plan: the old one stays charged"
                )
            if entry["type"] == "release":
                self.book_release(entry, plan.pattern(entry["draw"], entry["pattern"]))
            elif entry["type"] == "void":
                self.lines[entry["index"]]["hash"] = "void"
            elif entry["type"] == "unproven":
                self.lines.setdefault(entry["index"], entry)
                self.book_unproven(entry)
            elif entry["type"] == "hole":
                if "index" in entry:
                    self.lines.setdefault(entry["index"], entry)
                self.holes.setdefault(entry["hole"], Hole("disclose", entry["hole"], 0)).count += 1
            if "ordinal" in entry:
                self.ordinals[entry["draw"]] = max(self.ordinals.get(entry["draw"], 0), entry["ordinal"] + 1)
        if position > 0 and position - 1 not in self.lines:
            raise JournalError(
                f"the checkpoint has seen {position} draws of this run, and the journal does not hold "
                "the last of them: it was cut or replaced, and charges are lost. Restore the journal from a "
                "copy, or start a new run and count the old one as spent in full"
            )

    def book_release(self, line: dict[str, Any], pattern: Pattern) -> None:
        """Note a release of this pattern."""
        self.lines[line["index"]] = line
        self.used[pattern] = self.used.get(pattern, 0) + 1
        self.epochs.add(line["draw"], line["ordinal"])

    def book_unproven(self, line: dict[str, Any]) -> None:
        """Note an un-proven release and what its worst case adds to the hole that it is."""
        self.unproven_done[line["name"], line["index"], line["hash"]] = question(line)
        self.unproven_used[line["name"]] = self.unproven_used.get(line["name"], 0) + 1
        hole = self.holes.setdefault(line["hole"], Hole("release_unproven", line["hole"], 0, 0.0))
        hole.count += 1
        multiplier = line["worst_case_multiplier"]
        if multiplier is None or hole.worst_case is None:
            hole.worst_case = None
        else:
            hole.worst_case += multiplier**-2


def question(line: Mapping[str, Any]) -> tuple[Any, ...]:
    """What an unproven release was asked: with anything else, its noise must not be given again."""
    return line["std"], line["worst_case_multiplier"], line.get("answer")


def book_end(journal: Journal, run: str) -> None:
    """Book that a run has ended, once; it is on the device when this returns."""
    with journal.locked():
        if not any(entry["type"] == "close" and entry.get("run") == run for entry in journal.entries()):
            journal.append({"type": "close", "run": run})
    journal.sync()


Others = Mapping[str, dp_accounting.DpEvent]
"""What the other runs of a journal cost, by their names."""


@dataclass(frozen=True)
class RunRecord:
    """What a ledger, a journal or the published files tell of one run."""

    plan: PrivacyPlan
    used: Mapping[Pattern, int]
    epochs: Mapping[str, int]
    holes: list[Hole]
    private: bool
    search: Mapping[str, Any] | None
    noise: str

    @property
    def guarantee(self) -> str:
        """What the run may claim: "proven", "worst_case" or "none"."""
        if any(hole.kind == "disclose" or hole.worst_case is None for hole in self.holes):
            return "none"
        return "worst_case" if self.holes else "proven"

    @property
    def event(self) -> dp_accounting.DpEvent:
        """Of everything that it released; only where the guarantee is not `none`."""
        return self.with_holes(self.plan.event(self.used, self.epochs))

    def with_holes(self, event: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
        """An event of the plan, with the worst cases of what was not proved and the search around the run."""
        worst = sum(hole.worst_case or 0.0 for hole in self.holes)
        return with_search(compose_events([event], worst), self.search)

    def statement(self, run: str, delta: float | None, others: Others, **facts: Any) -> Statement:
        """The statement of the run among others; `facts` as in `make_statement`."""
        spent: EpsilonResult | None = None
        further: list[EpsilonResult] = []
        if self.guarantee != "none":
            assert delta is not None
            event = compose_events([self.event, *others.values()])
            spent = exact_epsilon(event, delta, self.plan.relation)
            further = [exact_epsilon(event, other, self.plan.relation) for other in further_deltas(delta)]
        return make_statement(
            plan=self.plan,
            spent=spent,
            further=further,
            delta=delta,
            guarantee=self.guarantee,
            holes=self.holes,
            private=self.private,
            used=self.used,
            epochs=self.epochs,
            other_runs=len(others),
            run=run,
            search=self.search,
            noise=self.noise,
            **facts,
        )


class Spending:
    """What the run of an open ledger has spent, the journal's other runs included.

    Args:
        plan: of the run.
        books: what is booked of it; read anew at every question.
        others: what the other runs cost.
        search: the search that the run came out of.
        private, noise: of its noise.
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        books: Books,
        others: Others,
        search: Mapping[str, Any] | None,
        *,
        private: bool,
        noise: str,
    ) -> None:
        self.others = others
        self._plan, self._books, self._search = plan, books, search
        self._private, self._noise = private, noise
        self._patterns = plan.patterns()
        self._progress = EpsilonProgress(self._event_at, plan.relation)

    @property
    def run(self) -> RunRecord:
        """The run as it is now."""
        books = self._books
        holes = list(books.holes.values())
        return RunRecord(
            self._plan, books.used, books.epochs.met, holes, self._private, self._search, self._noise
        )

    def check(self, budget: Budget | None) -> None:
        """Raise a `BudgetError` if the whole plan would bring the journal's total above the budget."""
        if budget is None:
            return
        relation = self._plan.relation
        event = compose_events([self._plan.event(), *self.others.values()])
        total = exact_epsilon(event, budget.delta, relation).value
        if total > budget.epsilon * (1 + 1e-9):
            before = exact_epsilon(compose_events(self.others.values()), budget.delta, relation).value
            raise BudgetError(
                f"the plan would bring the journal's total to epsilon={total:.4g} at "
                f"delta={budget.delta:g}, above the budget of {budget.epsilon:g} (other runs: "
                f"{before:.4g}). Nothing was spent. Calibrate the plan to what is left, close finished runs "
                "that used less than they reserved, or raise the budget"
            )

    def epsilon(self, delta: float) -> EpsilonResult:
        """Epsilon of all that has been released so far."""
        event = compose_events([self.run.event, *self.others.values()])
        return exact_epsilon(event, delta, self._plan.relation)

    def progress(self, delta: float) -> float:
        """Epsilon so far to about 2% (interpolated, cached); only where the guarantee is not `none`."""
        run = self.run
        used, total = sum(run.used.values()), sum(p.count for p in self._patterns)
        gaps = self._plan.event(run.used) != self._plan.event(run.used, run.epochs)
        if total == 0 or run.guarantee == "worst_case" or gaps:
            return self.epsilon(delta).value
        return self._progress(used / total, delta)

    def releases_left(self) -> dict[str, int]:
        """Draws left for each draw name."""
        left: dict[str, int] = {}
        for pattern in self._patterns:
            left[pattern.draw] = left.get(pattern.draw, 0) + pattern.count - self._books.used.get(pattern, 0)
        for item in self._plan.unproven:
            unused = self._plan.count(item) - self._books.unproven_used.get(item.name, 0)
            left[item.draw] = max(left.get(item.draw, 0), unused)
        return left

    def _event_at(self, fraction: float) -> dp_accounting.DpEvent:
        """Event of a fraction of the plan, with the other runs."""
        event = self._plan.event({p: min(p.count, math.ceil(fraction * p.count)) for p in self._patterns})
        return compose_events([self.run.with_holes(event), *self.others.values()])
