"""Does a statement say what the journal says? Everything is computed again; nothing of it is believed.

Two kinds of readers ask. The keeper of the data has the journal: what the run released is counted from its
lines, each line is held against the plan, and epsilon follows. A stranger has the published files alone: the
statement's own plan and counts must then hash to the plan's name and give its epsilon, so that no figure of
the statement can be edited by itself; whether the run released what the statement counts is the journal's
knowledge and the issuer's word, which a signature ties to the issuer (see `signatures`).
"""

from __future__ import annotations

import sys
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
ON_TRUST = ("recipe", "epsilon_claimed", "facts", "versions")
# Relative differences of a figure: rounding, and how much looser another version of the accountants may be.
SAME, OTHER_VERSIONS = 1e-6, 1e-2
EXACT = (0.0, 0.0)
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
        # A shared journal goes on after the statement: any state of the others since then will do.
        best = min(candidates, key=lambda again: len(_differences(statement, again)))
        compared = _compared(statement, best)
    except JournalError as error:
        return [Finding("journal", False, str(error))]
    except _MALFORMED as error:
        return [Finding("journal", False, f"it is not what this library writes ({_name(error)})")]
    lines = sum(1 for entry in entries if entry.get("run") == run)
    return [
        Finding("journal", True, f"{lines} lines of run {run}; each release fits the plan"),
        *compared,
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


# The lines by which a run's own cost changes: a statement of all of them was made after the last one.
_OWN_COSTS = ("run", "release", "unproven", "hole", "search")


def _views(entries: Entries, run: str) -> Iterable[dict[str, dp_accounting.DpEvent]]:
    """What the other runs cost, at every moment from the run's last costly line to the journal's end."""
    own = [i for i, e in enumerate(entries) if e.get("run") == run and e["type"] in _OWN_COSTS]
    relation = next(entries[i] for i in own if entries[i]["type"] == "run")["plan"]["relation"]
    others: list[Mapping[str, Any]] = [entry for entry in entries[: own[-1]] if entry.get("run") != run]
    yield accounts.other_runs(others, relation)
    for entry in entries[own[-1] + 1 :]:
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


def check_published(statement: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> list[Finding]:
    """Hold a statement against itself: its plan against the plan's hash, its epsilon against its counts.

    Args:
        statement: as `statement.json` holds it.
        config: as `config.json` holds it, if there is one; what it says must be what the statement says.
    """
    try:
        delta = _delta(statement)
        own = _published_run(statement)
        again = _restated(own, str(statement["run"]), delta, {})
        findings = _compared(statement, again, without_others=bool(statement.get("other_runs")))
    except _MALFORMED as error:
        return [Finding("statement", False, f"it is not what this library writes ({_name(error)})")]
    findings += _check_config(statement, own.plan.fingerprint(), config or {})
    findings.append(
        Finding(
            "releases",
            None,
            "that the run released what is counted here is known to the keeper's journal alone",
        )
    )
    return findings


def _check_config(statement: Mapping[str, Any], plan: str, config: Mapping[str, Any]) -> list[Finding]:
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
        found["sampling"] = statement["sampling"], config["sampling"]
    if isinstance(budget, Mapping) and "delta" in budget:
        found["delta"] = statement["delta"], budget["delta"]
    wrong = [f"{key} is {told!r}"[:80] for key, (stated, told) in found.items() if stated != told]
    if wrong:
        detail = f"config.json says otherwise than the statement: {', '.join(wrong)}"
        return [Finding("configuration", False, detail)]
    if "plan" not in config:
        return []
    return [Finding("configuration", True, "config.json names the same plan")]


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
    limits = _limits(statement, again)
    found = []
    for key in [*computed, *(k for k in statement if k not in computed)]:
        if key in ON_TRUST:
            continue
        if key == "assumptions":
            given = statement.get(key)
            same = isinstance(given, list) and all(text in given for text in computed[key])
        else:
            allowed = limits.get(key, EXACT)
            same = key in statement and key in computed and _close(statement[key], computed[key], allowed)
        if not same:
            found.append(key)
    return found


Limits = tuple[float, float]  # how far below and above a figure may lie, relatively


def _limits(statement: Mapping[str, Any], again: Statement) -> dict[str, Limits]:
    """Of the figures that an accountant computes; whatever else is a number is compared exactly.

    Other versions may have had a looser bound, which is one too. A tighter one cannot be confirmed here.
    """
    looser = SAME if statement.get("versions") == again.versions else OTHER_VERSIONS
    limits = dict.fromkeys(("epsilon", "epsilons", "cross_check"), (SAME, looser))
    return limits | {"interval": (looser, looser), "holes": (SAME, SAME)}


def _close(given: Any, computed: Any, allowed: Limits) -> bool:
    """Whether plain values are equal, numbers but deltas up to relative differences."""
    if isinstance(computed, float) and isinstance(given, (int, float)) and not isinstance(given, bool):
        below, above = allowed
        return computed * (1 - below) <= given <= computed * (1 + above)
    if isinstance(computed, dict):
        return (
            isinstance(given, dict)
            and set(given) == set(computed)
            and all(
                _close(given[key], value, EXACT if key == "delta" else allowed)
                for key, value in computed.items()
            )
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
    stated, found = figure(statement.get("epsilon")), figure(again.epsilon)
    if without_others:
        doubts = _doubts(statement, again)
        detail = f"stated {_text(stated)}; this run alone costs {_text(found)}, the others are in the journal"
        detail += f"; wrong: {', '.join(doubts)}" if doubts else ""
        findings.append(Finding("epsilon", False if doubts else None, detail))
        wrong = [key for key in wrong if key not in figures | {"other_runs"}]
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


def figure(value: object) -> float | None:
    """A finite number of a file; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    # an integer of JSON may be beyond every float
    return float(value) if -sys.float_info.max <= value <= sys.float_info.max else None


def _text(value: float | None) -> str:
    return "no value" if value is None else f"{value:.6g}"
