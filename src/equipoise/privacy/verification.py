"""Does a statement say what the journal says? Everything is computed again; nothing of it is believed.

Two kinds of readers ask. The keeper of the data has the journal: what the run released is counted from its
lines, each line is held against the plan, and epsilon follows. A stranger has the published files alone: the
statement's own plan and counts must then hash to the plan's name and give its epsilon, so that no figure of
the statement can be edited by itself; whether the run released what the statement counts is the journal's
knowledge and the issuer's word, which a signature ties to the issuer (see `signatures`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import dp_accounting

from . import accounts
from .epochs import Epochs
from .errors import JournalError
from .releases import Pattern, PrivacyPlan
from .statement import Hole, Statement, further_deltas, make_statement

__all__ = ["Finding", "check_published", "check_with_journal", "statement_from_journal"]

# Keys of a statement that no journal holds: what the recipe is called and what was assumed around it.
ON_TRUST = ("recipe", "unit", "epsilon_claimed", "facts", "versions")
SAME, OTHER_VERSIONS = 1e-6, 1e-2  # relative differences of epsilon that are rounding
_ROUNDING = 1 + 1e-6
Entries = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: what, in a word or two.
        ok: whether it is as it must be; None where the files do not tell.
        detail: a sentence.
    """

    subject: str
    ok: bool | None
    detail: str


@dataclass(frozen=True)
class _Run:
    """What a journal tells of one run."""

    plan: PrivacyPlan
    used: dict[Pattern, int]
    epochs: dict[str, int]
    holes: list[Hole]
    private: bool
    search: dict[str, Any] | None
    noise: str

    @property
    def guarantee(self) -> str:
        if any(hole.kind == "disclose" or hole.worst_case is None for hole in self.holes):
            return "none"
        return "worst_case" if self.holes else "proven"

    @property
    def event(self) -> dp_accounting.DpEvent:
        """Of everything that it released; only where the guarantee is not `none`."""
        worst = sum(hole.worst_case or 0.0 for hole in self.holes)
        return accounts.searched(
            accounts.compose([self.plan.event(self.used, self.epochs)], worst), self.search
        )


# ---- with the journal


def check_with_journal(statement: Mapping[str, Any], entries: Entries) -> list[Finding]:
    """Hold a statement against the journal of its run.

    Args:
        statement: as `statement.json` holds it; nothing about it is assumed.
        entries: the whole journal, other runs included.

    Returns:
        One finding a subject; the statement is consistent if none of them is false.
    """
    try:
        delta = _delta(statement)
        run = _run_of(statement, entries)
        own = _read_run([entry for entry in entries if entry.get("run") == run])
        candidates = [_restated(own, run, delta, others) for others in _views(entries, run)]
    except JournalError as error:
        return [Finding("journal", False, str(error))]
    except _MALFORMED as error:
        return [Finding("journal", False, f"it is not what this library writes ({_name(error)})")]
    # A shared journal goes on after the statement: any state of the others since the run began will do.
    best = min(candidates, key=lambda again: len(_differences(statement, again)))
    lines = sum(1 for entry in entries if entry.get("run") == run)
    return [
        Finding("journal", True, f"{lines} lines of run {run}; each release fits the plan"),
        *_compared(statement, best),
    ]


def statement_from_journal(entries: Entries, run: str, delta: float, **facts: Any) -> Statement:
    """The statement of a run, from the whole journal as it is now; `facts` as in `make_statement`.

    Raises:
        JournalError: for a journal that does not hold the run, or whose lines do not fit its plan.
    """
    own = _read_run([entry for entry in entries if entry.get("run") == run])
    others = [entry for entry in entries if entry.get("run") != run]
    return _restated(own, run, delta, accounts.other_runs(others, own.plan.relation), **facts)


def _run_of(statement: Mapping[str, Any], entries: Entries) -> str:
    runs = {str(entry["run"]) for entry in entries if entry.get("type") == "run"}
    run = statement.get("run")
    if run not in runs:
        raise JournalError(f"it holds no run {run!r}, which the statement names; it holds {sorted(runs)}")
    return str(run)


def _read_run(entries: Entries) -> _Run:
    """Count what a run released, and hold every line against the run's plan."""
    heads = [entry for entry in entries if entry["type"] == "run"]
    if len(heads) != 1:
        raise JournalError(f"it holds {len(heads)} plans for one run instead of one")
    plan = PrivacyPlan.from_description(heads[0]["plan"])
    if plan.fingerprint() != heads[0]["fingerprint"]:
        raise JournalError("its plan does not have the hash that stands beside it: the plan was edited")
    used: dict[Pattern, int] = {}
    epochs = Epochs(plan)
    holes: dict[str, Hole] = {}
    for number, entry in enumerate(entries, start=1):
        kind = entry["type"]
        if kind == "release":
            pattern = _fitting(plan, entry, number)
            used[pattern] = used.get(pattern, 0) + 1
            epochs.add(entry["draw"], entry["ordinal"])
            if used[pattern] > pattern.count:
                raise JournalError(
                    f"it holds more than the {pattern.count} planned releases of {sorted(pattern.names)}"
                )
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
    return _Run(
        plan=plan,
        used=used,
        epochs=epochs.met,
        holes=list(holes.values()),
        private=heads[0]["private"] is True,
        search=accounts.search_of(entries),
        noise=heads[0].get("noise", "floating_point"),
    )


def _fitting(plan: PrivacyPlan, entry: Mapping[str, Any], number: int) -> Pattern:
    """The pattern of a release line, whose noise and bounds are the plan's."""
    pattern = plan.pattern(entry["draw"], entry["pattern"])
    if not set(entry["bounds"]) <= pattern.names:
        raise JournalError(f"line {number} of the run releases what its plan does not hold")
    for name, bound in entry["bounds"].items():
        release = plan[name]
        if entry["multipliers"][name] != release.noise_multiplier:
            raise JournalError(
                f"line {number} of the run has the noise multiplier {entry['multipliers'][name]!r} for "
                f"{name!r}, the plan {release.noise_multiplier!r}"
            )
        if not 0 < bound <= release.max_bound * _ROUNDING:
            raise JournalError(
                f"line {number} of the run has the bound {bound!r} for {name!r}, the plan allows "
                f"{release.max_bound!r}"
            )
    return pattern


def _views(entries: Entries, run: str) -> Iterable[dict[str, dp_accounting.DpEvent]]:
    """What the other runs cost, at every moment from the run's beginning to the journal's end."""
    began = next(i for i, entry in enumerate(entries) if entry.get("run") == run and entry["type"] == "run")
    relation = entries[began]["plan"]["relation"]
    others: list[Mapping[str, Any]] = [entry for entry in entries[:began] if entry.get("run") != run]
    yield accounts.other_runs(others, relation)
    for entry in entries[began + 1 :]:
        if entry.get("run") == run:
            continue
        others.append(entry)
        if entry["type"] in ("run", "close", "search"):  # a release changes nothing until its run is closed
            yield accounts.other_runs(others, relation)
    yield accounts.other_runs(others, relation)


def _restated(
    own: _Run, run: str, delta: float, others: Mapping[str, dp_accounting.DpEvent], **facts: Any
) -> Statement:
    spent, further = None, []
    if own.guarantee != "none":
        event = accounts.compose([own.event, *others.values()])
        spent = accounts.exact(event, delta, own.plan.relation)
        further = [accounts.exact(event, other, own.plan.relation) for other in further_deltas(delta)]
    return make_statement(
        plan=own.plan,
        spent=spent,
        further=further,
        delta=delta,
        guarantee=own.guarantee,
        holes=own.holes,
        private=own.private,
        used=own.used,
        epochs=own.epochs,
        other_runs=len(others),
        run=run,
        search=own.search,
        noise=own.noise,
        **facts,
    )


# ---- with the published files alone


def check_published(statement: Mapping[str, Any], plan: object = None) -> list[Finding]:
    """Hold a statement against itself: its plan against the plan's hash, its epsilon against its counts.

    Args:
        statement: as `statement.json` holds it.
        plan: the plan's hash in `config.json`, if there is one.
    """
    try:
        delta = _delta(statement)
        own = _published_run(statement)
        again = _restated(own, str(statement["run"]), delta, {})
    except _MALFORMED as error:
        return [Finding("statement", False, f"it is not what this library writes ({_name(error)})")]
    findings = _compared(statement, again, without_others=bool(statement.get("other_runs")))
    if plan is not None:
        same = plan == own.plan.fingerprint()
        detail = "config.json names the same plan" if same else "config.json names another plan"
        findings.append(Finding("configuration", same, detail))
    findings.append(
        Finding(
            "releases",
            None,
            "that the run released what is counted here is known to the keeper's journal alone",
        )
    )
    return findings


def _published_run(statement: Mapping[str, Any]) -> _Run:
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
    private = statement["private"] is True
    return _Run(plan, used, epochs, holes, private, statement["search"], statement["noise"])


# ---- comparing


_MALFORMED = (
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    IndexError,
    ArithmeticError,
    JournalError,
    RecursionError,
    MemoryError,
)


def _name(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def _delta(statement: Mapping[str, Any]) -> float:
    delta = statement.get("delta")
    if isinstance(delta, bool) or not isinstance(delta, (int, float)) or not 0 < delta < 1:
        raise ValueError(f"delta={delta!r} is not between 0 and 1")
    return float(delta)


def _differences(statement: Mapping[str, Any], again: Statement) -> list[str]:
    """The keys that are not what they were computed to be."""
    computed = asdict(again)
    # numbers agree to rounding, or to 1% where other versions of the packages computed them
    allowed = SAME if statement.get("versions") == again.versions else OTHER_VERSIONS
    found = []
    for key in [*computed, *(k for k in statement if k not in computed)]:
        if key in ON_TRUST:
            continue
        if key == "assumptions":
            given = statement.get(key)
            same = isinstance(given, list) and all(text in given for text in computed[key])
        else:
            same = key in statement and key in computed and _close(statement[key], computed[key], allowed)
        if not same:
            found.append(key)
    return found


def _close(given: Any, computed: Any, allowed: float) -> bool:
    """Whether plain values are equal, numbers up to a relative difference."""
    if isinstance(computed, float) and isinstance(given, (int, float)) and not isinstance(given, bool):
        return math.isclose(given, computed, rel_tol=allowed)
    if isinstance(computed, dict):
        return (
            isinstance(given, dict)
            and set(given) == set(computed)
            and all(_close(given[key], value, allowed) for key, value in computed.items())
        )
    if isinstance(computed, list):
        return (
            isinstance(given, list)
            and len(given) == len(computed)
            and all(_close(g, c, allowed) for g, c in zip(given, computed, strict=True))
        )
    return type(given) is type(computed) and given == computed


def _compared(statement: Mapping[str, Any], again: Statement, without_others: bool = False) -> list[Finding]:
    wrong = _differences(statement, again)
    plan_ok = not {"plan", "relation", "sampling", "unproven"} & set(wrong)
    findings = [
        Finding(
            "plan",
            plan_ok,
            f"its hash is {again.plan[:16]}..." if plan_ok else "the statement names another plan",
        )
    ]
    figures = {"epsilon", "epsilons", "cross_check", "accountant", "interval", "warnings", "guarantee"}
    stated, found = _figure(statement.get("epsilon")), _figure(again.epsilon)
    if without_others:
        # the figure holds other runs too: it must be at least what this one costs by itself
        larger = isinstance(stated, float) and isinstance(found, float) and stated >= found * (1 - SAME)
        ok = None if larger or (stated is None and statement.get("guarantee") == "none") else False
        detail = f"stated {_text(stated)}; this run alone costs {_text(found)}, the others are in the journal"
        findings.append(Finding("epsilon", ok, detail))
        wrong = [key for key in wrong if key not in figures | {"other_runs", "delta"}]
    else:
        ok = not figures & set(wrong)
        at = f" at delta {again.delta:g}" if again.delta is not None else ""
        detail = f"computed again: {_text(found)}{at}; the statement says {_text(stated)}"
        others = sorted((figures & set(wrong)) - {"epsilon"})
        findings.append(Finding("epsilon", ok, detail + (f"; wrong: {', '.join(others)}" if others else "")))
        wrong = [key for key in wrong if key not in figures]
    wrong = [key for key in wrong if key not in ("plan", "relation", "sampling", "unproven")]
    detail = f"these do not agree: {', '.join(wrong)}" if wrong else "releases, counts, holes and facts agree"
    findings.append(Finding("statement", not wrong, detail))
    return findings


def _figure(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _text(value: float | None) -> str:
    return "no value" if value is None else f"{value:.6g}"
