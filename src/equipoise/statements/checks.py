"""Verify the statement of a run: against its journal, or on its own.

The data owner has the journal. `check_with_journal` holds every entry against the plan, counts what the run
released and computes the statement again; nothing in the statement is believed.

Everybody else has the published files only. `check_published` checks that the statement agrees with itself:
its plan and counts must hash to the plan's name and give its epsilon, so that no figure can be edited on its
own. Whether the run released what is counted is known to the journal, and rests on the issuer's word, which a
signature ties to the issuer (`sign.py`).

What is checked, here and in `recompute`, `consistency` and `verify`:

- **Form.** Every key must hold a value of its kind. Duplicate keys are refused: another reader might take
  the other value.
- **Figures.** Plan, counts and deltas must be equal; `epsilon`, `epsilons` and `cross_check` must agree to
  a millionth. If the statement names other package versions they may be up to 1% above what is computed
  here, never below. A bound that a tighter accountant gave cannot be confirmed by yours: verify with the
  versions that the statement names.
- **Assumptions.** Required are those on population, sampling and searches, that the loss treats each record
  by itself, that the start is public or paid for in the same journal, and one of the two on NaN and
  infinity; for a federation's client, that no person's records lie at several owners; and those that
  `config.json` holds: public records, `conditions` of the method, and what the run's processes found out of
  data, model and start. Records count as checked only if every process checked them. Sentences that stand
  in every statement are compared for runs that this version began. Every other text is shown as the
  issuer's own words.
- **Words of the issuer**, which are not in the journal (`recipe`, `epsilon_claimed` as published,
  `versions`, further assumptions), must have a possible value.
- **Journal.** A draw without a line, and lines of different data, are reported, not refused. A plan with
  `unproven` releases needs holes, no more than were planned.
- **Shared journals.** The statement must fit one of the journal's states since the run's last release; what
  other runs had spent or reserved is part of the figure. Runs that joined later are counted, with the
  epsilon of all together. Without the journal every epsilon must be at least this run's own, and the
  guarantee no better.
- **Stop.** If the figures are of the releases made, the journal must hold the same word about the stop.
  Whether it was true no file shows, so it is listed as not checked.
- **Metrics.** `metrics.jsonl` may name no more steps than configuration and releases hold. Its epsilons,
  computed coarsely, must not exceed the statement's by more than 4% (unless other runs or a search are in
  the figure).
- **Configuration.** Plan (by its hash), `sampling`, `relation`, `unit` (with records and rows of a user),
  `hardened`, `reproducible`, recipe and the budget's delta of `config.json` must be the statement's, and
  the statement must name its public records. With these the plan may have fewer steps. What else the file
  holds, such as seed, optimizer, `experiment` and options of the method, is compared with nothing, and
  listed as not checked.
- **Model, scores and page.** `model.safetensors` must name the statement's run. What it holds, the scores in
  `metrics.jsonl` and `report.html` are compared with nothing; a signature covers them, and without one they
  are marked `?`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from dp_accounting import DpEvent

from equipoise._rounding import plain
from equipoise._run_files import finite_number
from equipoise.privacy.accounting.private_search import PrivateSearch
from equipoise.privacy.errors import JournalError
from equipoise.privacy.ledger.journal import (
    CloseEntry,
    Entry,
    ReleaseEntry,
    VoidEntry,
)
from equipoise.privacy.ledger.journal_records import (
    JournalRecords,
    check_neighbours,
)
from equipoise.privacy.ledger.run_record import OtherRuns, RunRecord
from equipoise.privacy.plan import Pattern, PrivacyPlan
from equipoise.statements.recompute import (
    ANY_FINITE,
    FIGURES,
    MALFORMED,
    STOP_KEY,
    Finding,
    compared,
    delta_of,
    differences,
    message,
    text_of,
)
from equipoise.statements.statement import Statement, make_statement

__all__ = ["check_published", "check_with_journal", "statement_from_journal"]


# ---- with the journal


def check_with_journal(statement: Mapping[str, Any], journal: Iterable[Entry]) -> list[Finding]:
    """Hold a statement against the journal of its run.

    Args:
        statement: as `statement.json` holds it; nothing about it is assumed.
        journal: all its lines, other runs' included; a `Journal` is read line by line.

    Returns:
        One finding per subject; the statement is consistent if none of them is false.
    """
    try:
        delta = delta_of(statement)
        record, lines, views = _read(journal, statement.get("run"))
        # Statements without the key are older than it, and claim the releases made.
        record.stop_fixed_beforehand |= STOP_KEY not in statement
        candidates = [make_statement(record, delta, others) for others in views]
        # A shared journal goes on after the statement: any state of the others since then will do.
        place = min(range(len(candidates)), key=lambda i: len(differences(statement, candidates[i])))
        findings = compared(statement, candidates[place])
        findings += _later_runs(views[place], views[-1], candidates[-1])
    except JournalError as error:
        return [Finding("journal", False, str(error))]
    # Statement and journal come from somebody else: whatever they break is a finding, never a crash.
    except MALFORMED as error:
        return [Finding("journal", False, f"it is not what this library writes ({message(error)})")]
    return [
        Finding("journal", True, f"{lines} lines of run {record.run}; each release fits the plan"),
        *_open_questions(record),
        *_stop(record),
        *findings,
    ]


def statement_from_journal(journal: Iterable[Entry], run: str, delta: float, **facts: Any) -> Statement:
    """The statement of a run, from the whole journal as it is now; `facts` as in `make_statement`.

    Raises:
        JournalError: for a journal that does not hold the run, or whose entries do not fit its plan.
    """
    record, _, views = _read(journal, run)
    return make_statement(record, delta, views[-1], **facts)


# The entries that change nothing of a run's own cost: a statement of all others was made after the last one.
_FREE = (VoidEntry, CloseEntry)
# And those that change nothing of what a run costs others: a release changes nothing until its run is closed.
_FREE_TO_OTHERS = (ReleaseEntry, VoidEntry)


def _read(journal: Iterable[Entry], run: object) -> tuple[RunRecord, int, list[OtherRuns]]:
    """Take every entry in: each is held against those before it.

    Returns:
        The record of the run, how many lines are the run's, and what the other runs cost, at every moment
        from the run's last costly entry to the end.

    Raises:
        JournalError: the journal does not hold the run, or no ledger wrote it.
    """
    records, lines, costs, views = JournalRecords(), 0, dict[str, DpEvent](), list[OtherRuns]()
    for line in journal:
        records.take(line)
        if line.run == run:
            lines += 1
            if not isinstance(line, _FREE):
                views = [costs]
        elif not isinstance(line, _FREE_TO_OTHERS):
            record = records.runs[line.run]
            changed = {**costs, line.run: record.reserved_event}
            if changed != costs:
                costs = changed
                views.append(costs)
    if run not in records.runs:
        held = sorted(records.runs)
        raise JournalError(f"it holds no run {run!r:.60}, which the statement names; it holds {held}")
    own = records.runs[str(run)]
    check_neighbours(records.runs, own.plan.relation, own.plan.unit.name, own.owners)
    return own, lines, views


def _later_runs(then: OtherRuns, now: OtherRuns, together: Statement) -> list[Finding]:
    """What other runs added to the journal after the statement was made."""
    later = [run for run, event in now.items() if then.get(run) != event]
    if not later:
        return []
    runs = f"{len(later)} later run{'s'[: len(later) > 1]} of the journal"
    total = "no epsilon" if together.epsilon is None else f"epsilon {text_of(together.epsilon, 4)}"
    return [
        Finding("later runs", True, f"{runs}; all together {total} at delta {plain(together.delta or 0.0)}")
    ]


def _open_questions(record: RunRecord) -> list[Finding]:
    """What an honest journal may show as well as an edited one."""
    found = []
    gaps = record.next_index - record.num_draws
    if gaps:
        detail = f"{gaps} draw(s) before the last have no line: opened and not released, or cut out"
        found.append(Finding("draws", None, detail))
    if len(record.data) > 1:
        detail = f"the lines name {len(record.data)} data sets: the run went on with changed records"
        found.append(Finding("data", None, detail))
    return found


def _stop(record: RunRecord) -> list[Finding]:
    """Whether the figures rest on a word about the stop, which no file bears out."""
    if record.used_up or not record.stop_fixed_beforehand:
        return []
    detail = (
        "epsilon is of the releases made, not of the plan; no file shows that the stop was fixed beforehand"
    )
    return [Finding("stop", None, detail)]


# ---- from the published files only


def check_published(statement: Mapping[str, Any]) -> list[Finding]:
    """Hold a statement against itself: its plan against the plan's hash, its epsilon against its counts.

    Args:
        statement: as `statement.json` holds it; nothing about it is assumed.
    """
    try:
        record = published_record(statement)
        again = make_statement(record, delta_of(statement), {})
        alone = _epsilon_alone(statement, again) if statement.get("other_runs") else None
        findings = compared(statement, again, alone)
    except MALFORMED as error:
        return [Finding("statement", False, f"it is not what this library writes ({message(error)})")]
    detail = "only the data owner's journal tells whether the run released what is counted here"
    return [*findings, Finding("releases", None, detail), *_stop(record)]


def published_record(statement: Mapping[str, Any]) -> RunRecord:
    """The plan and the counts that a statement holds."""
    counts = ("used", "used_by_stage", "epochs")
    rows = [{key: value for key, value in row.items() if key not in counts} for row in statement["releases"]]
    description = {"relation": statement["relation"], "sampling": statement["sampling"]}
    if statement.get("users") is not None:
        description["users"] = statement["users"]
    plan = PrivacyPlan.from_description(description | {"releases": rows, "unproven": statement["unproven"]})
    counted = {row["name"]: row["used"] for row in statement["releases"]}
    in_stages = {row["name"]: row.get("used_by_stage", ()) for row in statement["releases"]}
    used: Counter[Pattern] = Counter()
    # Patterns of a draw are nested, the one with the most names first: what a name was released beyond the
    # patterns before belongs to the last pattern that has it.
    for pattern in plan.patterns():
        names = sorted(pattern.names)
        before = [p for p in used if p.draw == pattern.draw]
        if pattern.stop is None:
            here = {counted[name] - sum(used[p] for p in before if name in p.names) for name in names}
        else:
            here = {in_stages[name][len(before)] for name in names}
        used[pattern] = min(here)
    for name, count in counted.items():
        if sum(n for pattern, n in used.items() if name in pattern.names) != count:
            raise ValueError(f"the counts of {name!r} and of the releases with it do not agree")
    if any(isinstance(n, bool) or not 0 <= n <= p.count for p, n in used.items()):
        raise ValueError("a count is not between 0 and the planned number")
    search = statement["search"]
    record = RunRecord(
        run=str(statement["run"]),
        plan=plan,
        private=statement["private"] is True,
        search=None if search is None else PrivateSearch.from_description(search),
        stop_fixed_beforehand=statement.get(STOP_KEY, True) is True,
        used=used,
    )
    for row in statement["releases"]:
        if row["draw"] in record.epochs:
            record.epochs[row["draw"]] = row["epochs"]
            length = plan.sampling_of(row["draw"]).draws_per_epoch
            if not row["used"] / length <= row["epochs"] <= row["used"]:
                raise ValueError(f"{row['used']} draws cannot lie in {row['epochs']!r} epochs")
    return plan.fitting(record).with_steps(statement["holes"])


def _epsilon_alone(statement: Mapping[str, Any], alone: Statement) -> Finding:
    """Of a run among others: what those cost is in the journal, so the figures are at least this run's."""
    others, keys = statement.get("other_runs"), {"guarantee", "epsilon", "epsilons", "cross_check"}
    # Renyi accounting may cover the others and not this run: then its epsilon is what it costs at least.
    least = replace(alone, cross_check=alone.cross_check or alone.epsilon)
    if statement.get("guarantee") == "none":
        least, keys = alone.without_guarantee(alone.holes), FIGURES - {"warnings"}
    wrong = keys & set(differences(statement, least, above=ANY_FINITE))
    if statement.get("cross_check", "absent") is None:  # where Renyi accounting does not cover the others
        wrong.discard("cross_check")
    if isinstance(others, bool) or not isinstance(others, int) or others < 0:
        wrong.add("other_runs")
    stated, found = finite_number(statement.get("epsilon")), finite_number(alone.epsilon)
    detail = f"stated {text_of(stated, 4)}; this run alone costs {text_of(found, 4)}, the others are in the "
    detail += "journal" + (f"; wrong: {', '.join(sorted(wrong))}" if wrong else "")
    return Finding("epsilon", False if wrong else None, detail)
