"""What a run has spent and may claim for it: of a ledger that is open, or of a journal that is read later."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import dp_accounting

from equipoise.privacy import accounts
from equipoise.privacy.accounting import EpsilonResult
from equipoise.privacy.books import Books
from equipoise.privacy.calibration import Budget
from equipoise.privacy.errors import BudgetError
from equipoise.privacy.releases import Pattern, PrivacyPlan
from equipoise.privacy.statement import Hole, Statement, further_deltas, make_statement

__all__ = ["KnownRun", "Others", "Spending"]

Others = Mapping[str, dp_accounting.DpEvent]
"""What the other runs of a journal cost, by their names."""


@dataclass(frozen=True)
class KnownRun:
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
        return accounts.searched(accounts.compose([event], worst), self.search)

    def statement(self, run: str, delta: float | None, others: Others, **facts: Any) -> Statement:
        """The statement of the run among others; `facts` as in `make_statement`."""
        spent: EpsilonResult | None = None
        further: list[EpsilonResult] = []
        if self.guarantee != "none":
            assert delta is not None
            event = accounts.compose([self.event, *others.values()])
            spent = accounts.exact(event, delta, self.plan.relation)
            further = [accounts.exact(event, other, self.plan.relation) for other in further_deltas(delta)]
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
        self._progress = accounts.Progress(self._event_at, plan.relation)

    @property
    def run(self) -> KnownRun:
        """The run as it is now."""
        books = self._books
        holes = list(books.holes.values())
        return KnownRun(
            self._plan, books.used, books.epochs.met, holes, self._private, self._search, self._noise
        )

    def check(self, budget: Budget | None) -> None:
        """Raise a `BudgetError` if the whole plan would bring the journal's total above the budget."""
        if budget is None:
            return
        relation = self._plan.relation
        event = accounts.compose([self._plan.event(), *self.others.values()])
        total = accounts.exact(event, budget.delta, relation).value
        if total > budget.epsilon * (1 + 1e-9):
            before = accounts.exact(accounts.compose(self.others.values()), budget.delta, relation).value
            raise BudgetError(
                f"the plan would bring the journal's total to epsilon={total:.4g} at "
                f"delta={budget.delta:g}, above the budget of {budget.epsilon:g} (other runs: "
                f"{before:.4g}). Nothing was spent. Calibrate the plan to what is left, close finished runs "
                "that used less than they reserved, or raise the budget"
            )

    def epsilon(self, delta: float) -> EpsilonResult:
        """Epsilon of all that has been released so far."""
        event = accounts.compose([self.run.event, *self.others.values()])
        return accounts.exact(event, delta, self._plan.relation)

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
        return accounts.compose([self.run.with_holes(event), *self.others.values()])
