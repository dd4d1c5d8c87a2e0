"""Accounts of a journal: what other runs spent or reserved, and epsilon so far for a progress bar."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import dp_accounting

from equipoise.privacy.accounting import EpsilonResult, epsilon, quick_epsilon
from equipoise.privacy.epochs import Epochs
from equipoise.privacy.errors import JournalError
from equipoise.privacy.releases import Pattern, PrivacyPlan
from equipoise.privacy.search import PrivateSearch


def compose(events: Iterable[dp_accounting.DpEvent], worst_case: float = 0.0) -> dp_accounting.DpEvent:
    """The composition of events, with a Gaussian of multiplier worst_case^(-1/2) if worst_case > 0."""
    parts = list(events)
    if worst_case > 0:
        parts.append(dp_accounting.GaussianDpEvent(worst_case**-0.5))
    return dp_accounting.ComposedDpEvent(parts)


def exact(event: dp_accounting.DpEvent, delta: float, relation: str) -> EpsilonResult:
    """Epsilon of an event (cached by its content)."""
    return epsilon(event, delta, relation)


def other_runs(entries: Iterable[Mapping[str, Any]], relation: str) -> dict[str, dp_accounting.DpEvent]:
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
    return searched(compose([own], worst), search_of(entries))


def search_of(entries: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The search that a run of the entries was charged for, as `PrivateSearch.describe` gives it.

    Raises:
        JournalError: if it was charged for several: which of them it came from is not known.
    """
    found = [entry["search"] for entry in entries if entry["type"] == "search"]
    if len(found) > 1:
        raise JournalError("the journal charges a run for several searches; a run comes out of one")
    return dict(found[0]) if found else None


def searched(event: dp_accounting.DpEvent, search: Mapping[str, Any] | None) -> dp_accounting.DpEvent:
    """The event of a run, or of the search that it is the outcome of."""
    return event if search is None else PrivateSearch.from_description(search).event(event)


class Progress:
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
