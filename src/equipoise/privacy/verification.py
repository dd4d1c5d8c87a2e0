"""Does a statement say what the journal says? Everything is computed again; nothing of it is believed.

The keeper of the data has the journal: what the run released is counted from its lines, each line is held
against the plan, and epsilon follows. Without the journal `published.py` checks what the files alone tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import dp_accounting

from equipoise.privacy.errors import JournalError
from equipoise.privacy.ledger.run_record import Epochs, KnownRun, events_of_other_runs, search_of
from equipoise.privacy.lines import COSTLY, RunLines
from equipoise.privacy.plan import PrivacyPlan
from equipoise.privacy.restatement import MALFORMED, Finding, compared, delta_of, differences, message
from equipoise.privacy.statement import Hole, Statement

__all__ = ["check_with_journal", "statement_from_journal"]

Entries = Sequence[Mapping[str, Any]]


def check_with_journal(statement: Mapping[str, Any], entries: Entries) -> list[Finding]:
    """Hold a statement against the journal of its run.

    Args:
        statement: as `statement.json` holds it; nothing about it is assumed.
        entries: the whole journal, other runs included.

    Returns:
        One finding a subject; the statement is consistent if none of them is false.
    """
    try:
        delta = delta_of(statement)
        run = _run_of(statement, entries)
        own, open_questions = _read_run([entry for entry in entries if entry.get("run") == run])
        candidates = [own.statement(run, delta, others) for others in _views(entries, run)]
        # A shared journal goes on after the statement: any state of the others since then will do.
        best = min(candidates, key=lambda again: len(differences(statement, again)))
        findings = compared(statement, best)
    except JournalError as error:
        return [Finding("journal", False, str(error))]
    except MALFORMED as error:
        return [Finding("journal", False, f"it is not what this library writes ({message(error)})")]
    lines = sum(1 for entry in entries if entry.get("run") == run)
    return [
        Finding("journal", True, f"{lines} lines of run {run}; each release fits the plan"),
        *open_questions,
        *findings,
    ]


def statement_from_journal(entries: Entries, run: str, delta: float, **facts: Any) -> Statement:
    """The statement of a run, from the whole journal as it is now; `facts` as in `make_statement`.

    Raises:
        JournalError: for a journal that does not hold the run, or whose lines do not fit its plan.
    """
    own, _ = _read_run([entry for entry in entries if entry.get("run") == run])
    others = [entry for entry in entries if entry.get("run") != run]
    return own.statement(run, delta, events_of_other_runs(others, own.plan.relation), **facts)


def _run_of(statement: Mapping[str, Any], entries: Entries) -> str:
    runs = {str(entry["run"]) for entry in entries if entry.get("type") == "run"}
    run = statement.get("run")
    if run not in runs:
        raise JournalError(f"it holds no run {run!r}, which the statement names; it holds {sorted(runs)}")
    return str(run)


def _read_run(entries: Entries) -> tuple[KnownRun, list[Finding]]:
    """Count what a run released, and hold every line against the run's plan; and what stays open."""
    heads = [entry for entry in entries if entry["type"] == "run"]
    if len(heads) != 1:
        raise JournalError(f"it holds {len(heads)} plans for one run instead of one")
    plan = PrivacyPlan.from_description(heads[0]["plan"])
    if plan.fingerprint() != heads[0]["fingerprint"]:
        raise JournalError("its plan does not have the hash that stands beside it: the plan was edited")
    lines = RunLines(plan, heads[0]["data"])
    epochs = Epochs(plan)
    holes: dict[str, Hole] = {}
    for number, entry in enumerate(entries, start=1):
        kind = entry["type"]
        lines.take(entry, number)
        if kind == "release":
            epochs.add(entry["draw"], entry["ordinal"])
        elif kind == "unproven":
            hole = holes.setdefault(entry["hole"], Hole("release_unproven", entry["hole"], 0, 0.0))
            hole.count += 1
            multiplier = entry["worst_case_multiplier"]
            known = multiplier is not None and hole.worst_case is not None
            hole.worst_case = (hole.worst_case or 0.0) + multiplier**-2 if known else None
        elif kind == "hole":
            holes.setdefault(entry["hole"], Hole("disclose", entry["hole"], 0)).count += 1
        elif kind not in ("run", "void", "close", "search"):
            raise JournalError(f"line {number} of the run is of the unknown type {kind!r}")
    run = KnownRun(
        plan=plan,
        used=lines.used,
        epochs=epochs.met,
        holes=list(holes.values()),
        private=heads[0]["private"] is True,
        search=search_of(entries),
        noise=heads[0].get("noise", "floating_point"),
    )
    return run, lines.findings()


# The lines by which a run's own cost changes: a statement of all of them was made after the last one.
_OWN_COSTS = ("run", *COSTLY, "search")


def _views(entries: Entries, run: str) -> Iterable[dict[str, dp_accounting.DpEvent]]:
    """What the other runs cost, at every moment from the run's last costly line to the journal's end."""
    own = [i for i, e in enumerate(entries) if e.get("run") == run and e["type"] in _OWN_COSTS]
    relation = next(entries[i] for i in own if entries[i]["type"] == "run")["plan"]["relation"]
    others: list[Mapping[str, Any]] = [entry for entry in entries[: own[-1]] if entry.get("run") != run]
    yield events_of_other_runs(others, relation)
    for entry in entries[own[-1] + 1 :]:
        if entry.get("run") == run:
            continue
        others.append(entry)
        if entry["type"] in ("run", "close", "search"):  # a release changes nothing until its run is closed
            yield events_of_other_runs(others, relation)
    yield events_of_other_runs(others, relation)
