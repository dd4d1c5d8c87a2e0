"""Do the lines of one run's journal fit together? What a ledger never writes is refused, line by line.

A draw has one index, and one ordinal among the draws of its name; it is released once. An index without a
line is no sign of an edit: a draw may be opened and not released, so that it is told and not refused.

Does a statement agree with itself? What a stranger can tell, who has the published files alone.

The statement's own plan and counts must hash to the plan's name and give its epsilon, so that no figure of
the statement can be edited by itself; whether the run released what the statement counts is the journal's
knowledge (see `verification.py`) and the issuer's word, which a signature ties to the issuer (see
`signatures.py`).

Does a statement say what the journal says? Everything is computed again; nothing of it is believed.

The keeper of the data has the journal: what the run released is counted from its lines, each line is held
against the plan, and epsilon follows. Without the journal `published.py` checks what the files alone tell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import dp_accounting

from equipoise.privacy.errors import JournalError
from equipoise.privacy.ledger.run_record import Epochs, RunRecord, events_of_other_runs, search_of
from equipoise.privacy.plan import Pattern, PrivacyPlan
from equipoise.privacy.statement import Hole, Statement
from equipoise.statements.recompute import (
    MALFORMED,
    SAME,
    Finding,
    compared,
    delta_of,
    differences,
    figure,
    message,
    text_of,
)

__all__ = ["COSTLY", "JournalChecker", "check_published", "check_with_journal", "statement_from_journal"]


COSTLY = ("release", "unproven", "hole")
"""The lines by which something left the private side."""


_ROUNDING = 1 + 1e-6


class JournalChecker:
    """Holds the lines of one run against its plan and against each other, in their order.

    Args:
        plan: of the run.
        data: digest of the records, as the run's first line has it.

    Attributes:
        used: how many releases of each planned pattern were taken.
    """

    def __init__(self, plan: PrivacyPlan, data: object) -> None:
        self.used: Counter[Pattern] = Counter()
        self._plan = plan
        self._data = {data}
        self._draws: dict[int, tuple[object, ...]] = {}  # index -> draw, ordinal and hash
        self._slots: dict[tuple[object, ...], int] = {}  # draw and ordinal -> index
        self._released: set[int] = set()
        self._unproven: set[tuple[str, int]] = set()
        self._asked: Counter[str] = Counter()
        self._closed = False

    def take(self, entry: Mapping[str, Any], number: int) -> None:
        """Look at line `number` of the run.

        Raises:
            JournalError: it is not what a ledger with this plan writes after the lines before.
        """
        kind = entry["type"]
        if kind == "close":
            self._closed = True
        if kind in COSTLY:
            if self._closed:
                raise JournalError(f"line {number} of the run lets something out after the run was closed")
            if kind != "hole" or "index" in entry:
                self._place(entry, number)
        if kind == "release":
            self._release(entry, number)
        elif kind == "unproven":
            self._unproved(entry, number)
        elif kind == "void" and entry["index"] not in self._draws:
            raise JournalError(f"line {number} of the run makes a draw void that it does not hold")

    def findings(self) -> list[Finding]:
        """What the lines leave open once all are taken."""
        found = []
        gaps = max(self._draws, default=-1) + 1 - len(self._draws)
        if gaps:
            detail = f"{gaps} draw(s) before the last have no line: opened and not released, or cut out"
            found.append(Finding("draws", None, detail))
        if len(self._data) > 1:
            detail = f"the lines name {len(self._data)} data sets: the run went on with changed records"
            found.append(Finding("data", None, detail))
        return found

    def _place(self, entry: Mapping[str, Any], number: int) -> None:
        """The draw of a line: one index, one ordinal, one question."""
        index, ordinal = entry["index"], entry["ordinal"]
        if not _counts(index) or not _counts(ordinal):
            raise JournalError(
                f"line {number} of the run has the index {index!r} and the ordinal {ordinal!r}; both count "
                "from 0"
            )
        slot = (entry["draw"], ordinal)
        draw = (*slot, entry["hash"])
        if self._draws.setdefault(index, draw) != draw or self._slots.setdefault(slot, index) != index:
            raise JournalError(
                f"line {number} of the run has the index {index} or the ordinal {ordinal} of another draw"
            )
        self._data.add(entry["data"])

    def _release(self, entry: Mapping[str, Any], number: int) -> None:
        pattern = self._plan.pattern(entry["draw"], entry["pattern"])
        # A ledger books a release of fewer names as a planned pattern that holds them, which costs more.
        if not entry["bounds"] or not set(entry["bounds"]) <= pattern.names:
            raise JournalError(f"line {number} of the run releases what its plan does not hold")
        if set(entry["multipliers"]) != set(entry["bounds"]):
            raise JournalError(
                f"line {number} of the run has noise multipliers for {sorted(entry['multipliers'])} and "
                f"bounds for {sorted(entry['bounds'])}"
            )
        for name, bound in entry["bounds"].items():
            release = self._plan[name]
            if entry["multipliers"][name] != release.noise_multiplier:
                raise JournalError(
                    f"line {number} of the run has the noise multiplier {entry['multipliers'][name]!r} for "
                    f"{name!r}, the plan {release.noise_multiplier!r}"
                )
            size = figure(bound)
            if size is None or not 0 < size <= release.max_bound * _ROUNDING:
                raise JournalError(
                    f"line {number} of the run has the bound {bound!r} for {name!r}, the plan allows "
                    f"{release.max_bound!r}"
                )
        if entry["index"] in self._released:
            raise JournalError(f"line {number} of the run releases the draw {entry['index']} a second time")
        self._released.add(entry["index"])
        self.used[pattern] += 1
        if self.used[pattern] > pattern.count:
            raise JournalError(
                f"it holds more than the {pattern.count} planned releases of {sorted(pattern.names)}"
            )

    def _unproved(self, entry: Mapping[str, Any], number: int) -> None:
        name, draw = entry["name"], entry["draw"]
        planned = [item for item in self._plan.unproven if (item.name, item.draw) == (name, draw)]
        if not planned:
            raise JournalError(f"line {number} of the run lets out {name!r}, which its plan does not hold")
        self._asked[name] += 1
        if (name, entry["index"]) in self._unproven or self._asked[name] > self._plan.count(planned[0]):
            raise JournalError(f"line {number} of the run lets out {name!r} more often than planned")
        self._unproven.add((name, entry["index"]))


def _counts(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def check_published(
    statement: Mapping[str, Any], config: Mapping[str, Any] | None = None, *, fewer_steps: bool = False
) -> list[Finding]:
    """Hold a statement against itself: its plan against the plan's hash, its epsilon against its counts.

    Args:
        statement: as `statement.json` holds it.
        config: as `config.json` holds it, if there is one; what it says must be what the statement says.
        fewer_steps: the plan may cover fewer steps than the training has: some draw no private record.
    """
    try:
        delta = delta_of(statement)
        own = _published_run(statement)
        again = own.statement(str(statement["run"]), delta, {})
        alone = _epsilon_alone(statement, again) if statement.get("other_runs") else None
        findings = compared(statement, again, alone)
    except MALFORMED as error:
        return [Finding("statement", False, f"it is not what this library writes ({message(error)})")]
    findings += _check_config(statement, own.plan.fingerprint(), config or {}, fewer_steps)
    findings.append(
        Finding(
            "releases",
            None,
            "that the run released what is counted here is known to the keeper's journal alone",
        )
    )
    return findings


def _check_config(
    statement: Mapping[str, Any], plan: str, config: Mapping[str, Any], fewer_steps: bool
) -> list[Finding]:
    """What settings and statement both tell must be the same; an absent setting tells nothing."""
    if config.get("plan") is not None and config["plan"] != plan:
        return [Finding("configuration", False, "config.json names another plan")]
    found: dict[str, tuple[object, object]] = {}  # by key of the statement: stated, configured
    settings, budget = config.get("settings"), config.get("budget")
    settings = settings if isinstance(settings, Mapping) else {}
    # a setting that is no yes or no agrees with nothing
    if "reproducible" in settings:
        public = settings["reproducible"]
        found["private"] = statement["private"], (not public) if isinstance(public, bool) else None
    if "hardened" in settings:
        hardened = settings["hardened"]
        noise = ("grid" if hardened else "floating_point") if isinstance(hardened, bool) else None
        found["noise"] = statement["noise"], noise
    if "relation" in settings:
        found["relation"] = statement["relation"], settings["relation"]
    if "sampling" in config:
        sampling = config["sampling"]
        found["sampling"] = (
            statement["sampling"],
            (_planned(sampling, statement["sampling"]) if fewer_steps else sampling),
        )
    if isinstance(budget, Mapping) and "delta" in budget:
        found["delta"] = statement["delta"], budget["delta"]
    wrong = [f"{key} is {told!r}"[:80] for key, (stated, told) in found.items() if stated != told]
    if wrong:
        detail = f"config.json says otherwise than the statement: {', '.join(wrong)}"
        return [Finding("configuration", False, detail)]
    if "plan" not in config:
        return []
    return [Finding("configuration", True, "config.json names the same plan")]


def _planned(configured: Any, stated: Any) -> Any:
    """The configured sampling with the stated number of steps, where that is not larger."""
    if isinstance(configured, Mapping) and isinstance(stated, Mapping) and "steps" in configured:
        steps, fewer = configured["steps"], stated.get("steps")
        if isinstance(steps, int) and isinstance(fewer, int) and fewer <= steps:
            return {**configured, "steps": fewer}
    return configured


def _published_run(statement: Mapping[str, Any]) -> RunRecord:
    counts = ("used", "epochs")
    rows = [{key: value for key, value in row.items() if key not in counts} for row in statement["releases"]]
    description = {"relation": statement["relation"], "sampling": statement["sampling"]}
    plan = PrivacyPlan.from_description(description | {"releases": rows, "unproven": statement["unproven"]})
    counted = {row["name"]: row["used"] for row in statement["releases"]}
    used: dict[Pattern, int] = {}
    # Patterns of a draw are nested, the one with the most names first: what a name was released beyond the
    # patterns before belongs to the last pattern that has it.
    for pattern in plan.patterns():
        names = sorted(pattern.names)
        before = [p for p in used if p.draw == pattern.draw]
        here = {counted[name] - sum(used[p] for p in before if name in p.names) for name in names}
        used[pattern] = min(here)
    for name, count in counted.items():
        if sum(n for pattern, n in used.items() if name in pattern.names) != count:
            raise ValueError(f"the counts of {name!r} and of the releases with it do not agree")
    if any(isinstance(n, bool) or not 0 <= n <= p.count for p, n in used.items()):
        raise ValueError("a count is not between 0 and the planned number")
    epochs = dict(Epochs(plan).met)
    for row in statement["releases"]:
        if row["draw"] in epochs:
            epochs[row["draw"]] = row["epochs"]
            length = row["sampling"]["population"] / row["sampling"]["batch_size"]
            if not row["used"] / max(1, round(length)) <= row["epochs"] <= row["used"]:
                raise ValueError(f"{row['used']} draws cannot lie in {row['epochs']!r} epochs")
    holes = [Hole(**row) for row in statement["holes"]]
    _check_holes(plan, holes)
    private = statement["private"] is True
    return RunRecord(plan, used, epochs, holes, private, statement["search"], statement["noise"])


def _check_holes(plan: PrivacyPlan, holes: list[Hole]) -> None:
    """What was planned to leave without a proof is a hole, as often as planned at most."""
    if any(isinstance(h.count, bool) or not isinstance(h.count, int) or h.count < 1 for h in holes):
        raise ValueError("a hole that was never met is none")
    left = sum(hole.count for hole in holes if hole.kind == "release_unproven")
    planned = sum(plan.count(item) for item in plan.unproven)
    if planned and not holes:
        raise ValueError(f"the plan holds {planned} releases without a proof, and no hole is named")
    if left > planned:
        raise ValueError(f"{left} releases without a proof are named, {planned} are planned")


def _epsilon_alone(statement: Mapping[str, Any], alone: Statement) -> Finding:
    """Of a run among others: what those cost is in the journal."""
    stated, found = figure(statement.get("epsilon")), figure(alone.epsilon)
    doubts = _doubts(statement, alone)
    detail = f"stated {text_of(stated)}; this run alone costs {text_of(found)}, the others are in the journal"
    detail += f"; wrong: {', '.join(doubts)}" if doubts else ""
    return Finding("epsilon", False if doubts else None, detail)


def _doubts(statement: Mapping[str, Any], alone: Statement) -> list[str]:
    """The figures that cannot be of this run and others: below its own cost, or another promise."""
    wrong = []
    others, guarantee = statement.get("other_runs"), statement.get("guarantee")
    if isinstance(others, bool) or not isinstance(others, int) or others < 0:
        wrong.append("other_runs")
    if guarantee not in (alone.guarantee, "none"):
        wrong.append("guarantee")
    if guarantee == "none":
        empty: dict[str, object] = {
            "epsilon": None,
            "epsilons": [],
            "cross_check": None,
            "accountant": None,
            "interval": None,
        }
        return wrong + [key for key, value in empty.items() if statement.get(key) != value]
    if not _at_least(statement.get("epsilon"), alone.epsilon):
        wrong.append("epsilon")
    rows = statement.get("epsilons")
    if not (
        isinstance(rows, list)
        and [row["delta"] for row in rows] == [row["delta"] for row in alone.epsilons]
        and all(_at_least(r["epsilon"], a["epsilon"]) for r, a in zip(rows, alone.epsilons, strict=True))
    ):
        wrong.append("epsilons")
    # null where Renyi accounting does not cover the others; where it does, it bounds this run's cost too
    cross = statement.get("cross_check", "absent")
    floor = alone.epsilon if alone.cross_check is None else alone.cross_check
    if cross is not None and not _at_least(cross, floor):
        wrong.append("cross_check")
    return wrong


def _at_least(stated: object, cost: float | None) -> bool:
    value = figure(stated)
    return value is not None and cost is not None and value >= cost * (1 - SAME)


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


def _read_run(entries: Entries) -> tuple[RunRecord, list[Finding]]:
    """Count what a run released, and hold every line against the run's plan; and what stays open."""
    heads = [entry for entry in entries if entry["type"] == "run"]
    if len(heads) != 1:
        raise JournalError(f"it holds {len(heads)} plans for one run instead of one")
    plan = PrivacyPlan.from_description(heads[0]["plan"])
    if plan.fingerprint() != heads[0]["fingerprint"]:
        raise JournalError("its plan does not have the hash that stands beside it: the plan was edited")
    lines = JournalChecker(plan, heads[0]["data"])
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
    run = RunRecord(
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
