"""Does a statement agree with config.json and metrics.jsonl, which a training writes with it?

The statement's own figures are computed again in `recompute`. Here the statement is compared with the other
two files: settings, recipe, assumptions, steps and the epsilon along the way. Nothing of this keeps off
somebody who makes up all three: the journal does, or the issuer's signature.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from equipoise._relations import ARE_PUBLIC
from equipoise._run_files import finite_number
from equipoise._version import ENGINE, __version__
from equipoise.statements.assumptions import ALLOWED, NAMED, NOT_COMPARED, Assumption, always
from equipoise.statements.recompute import MALFORMED, Finding
from equipoise.statements.statement import OF_THE_LEDGER, claims_of, sampling_assumptions

PROGRESS = 0.04
"""How far a row's epsilon may be above the statement's, relatively: earlier versions computed rows coarsely.

With less their folders fail, which verify today; with more, a statement may be that much below what a run
spent.
"""

SETTINGS = ("reproducible", "hardened", "relation", "unit", "records_per_user", "user_rows")
"""The keys of config.json's settings that are compared."""

Object = Mapping[str, Any]


# ---- config.json


def check_settings(statement: Object, config: Object) -> list[Finding]:
    """Whether plan, sampling, delta, recipe and `SETTINGS` are config.json's; an absent key says nothing."""
    settings, budget = config.get("settings"), config.get("budget")
    settings = settings if isinstance(settings, Mapping) else {}
    configured = {key: settings[key] for key in ("relation", "unit") if key in settings}  # by the statement's
    if config.get("plan") is not None:
        configured["plan"] = config["plan"]
    if "reproducible" in settings:
        configured["private"] = settings["reproducible"] is False
    if "hardened" in settings and (statement.get("releases") or statement.get("unproven")):
        noises = ((True, "grid"), (False, "floating_point"))
        configured["noise"] = next((noise for is_so, noise in noises if settings["hardened"] is is_so), None)
    if settings.get("unit") == "user":
        users = {"records": settings.get("records_per_user"), "rows": settings.get("user_rows")}
        configured["users"] = users
    if "sampling" in config:
        configured["sampling"] = _planned(config, statement.get("sampling"))
    for method in _nested(config.get("method"))[-1:]:
        configured["recipe"] = method.get("recipe", "library")
    if isinstance(budget, Mapping) and "delta" in budget:
        configured["delta"] = budget["delta"]
    wrong = [f"{key} is {value!r}"[:80] for key, value in configured.items() if statement.get(key) != value]
    if wrong:
        detail = f"config.json says otherwise than the statement: {', '.join(wrong)}"
        return [Finding("configuration", False, detail)]
    if "plan" not in config:
        return []
    return [Finding("configuration", True, "config.json names the same plan, sampling and delta")]


def _planned(config: Object, stated: Any) -> Any:
    """The configured sampling, of the stated steps if fewer: with public records some draw these alone."""
    sampling = config["sampling"]
    if _public_counts(config.get("method")) and isinstance(sampling, Mapping) and isinstance(stated, Mapping):
        steps, fewer = finite_number(sampling.get("steps")), finite_number(stated.get("steps"))
        if steps is not None and fewer is not None and fewer <= steps:
            return {**sampling, "steps": stated["steps"]}
    return sampling


def _nested(described: Any) -> list[Object]:
    """A described method and those inside it; the last one releases."""
    found: list[Object] = []
    while isinstance(described, Mapping) and len(found) < 10:
        found.append(described)
        described = described.get("inner")
    return found


def check_assumptions(statement: Object, config: Object) -> list[Finding]:
    """Whether the statement names what config.json says of its data, draws and processes."""
    named = texts_of(statement.get("assumptions"))
    counts = _public_counts(config.get("method"))
    every = always(statement.get("unit"))
    is_of_this_version = (config.get("version"), config.get("engine")) == (__version__, ENGINE)
    wanted = [*(every if is_of_this_version else ()), *(f"{count} {ARE_PUBLIC}" for count in counts)]
    if counts and Assumption.TRUSTED in named and ALLOWED not in named:
        wanted.append(NOT_COMPARED)
    wanted += texts_of(config.get("conditions"))
    try:
        rows = [*statement["releases"], *statement["unproven"]]
        draws, claims = sampling_assumptions(rows), claims_of(rows)
    except MALFORMED:
        draws, claims = [], []  # the checks of the statement report it
    wanted += claims
    found = texts_of(config.get("assumptions"))  # an edited file may hold the issuer's own words
    wrong = [text for text in dict.fromkeys([*wanted, *found]) if text not in named]
    if (Assumption.SCANNED in named) is (Assumption.TRUSTED in named):
        wrong.insert(0, f"one of {Assumption.SCANNED.value!r} and {Assumption.TRUSTED.value!r}")
    if wrong:
        detail = f"the statement does not name what it rests on: {'; '.join(wrong)}"
        return [Finding("assumptions", False, detail[:300])]
    findings = [Finding("assumptions", True, "the statement names each assumption that config.json asks for")]
    if any(text not in named for text in every):
        detail = "another version began the run: the sentences of every statement were not compared"
        findings.append(Finding("assumptions", None, detail))
    known = {
        *wanted,
        *every,
        *draws,
        *Assumption,
        *OF_THE_LEDGER,
        *(one for one in found if one.startswith(NAMED)),
    }
    own = [text for text in named if text not in known]
    if own:
        detail = f"the issuer's own words, which no file here bears out: {'; '.join(own)}"
        findings.append(Finding("further assumptions", None, detail[:600]))
    return findings


def texts_of(value: Any) -> list[str]:
    """The texts of what should be a list of them."""
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []


def _public_counts(described: Any) -> list[int]:
    """The numbers of the public records that a configuration describes, wherever they stand in it.

    >>> _public_counts({"source": {"records": {"records": 3, "digest": "x"}}})
    [3]
    """
    if not isinstance(described, Mapping):
        return []
    if "digest" in described:
        count = described.get("records")
        return [count] if isinstance(count, int) else []
    return [count for value in described.values() for count in _public_counts(value)]


# ---- metrics.jsonl


def check_metrics(statement: Object, config: Object, rows: Iterable[Object]) -> list[Finding]:
    """Whether the steps of metrics.jsonl are among the releases, and their epsilon is the statement's."""
    taken, largest = 0, 0.0
    for row in rows:
        if "learning_rate" in row:
            taken, largest = taken + 1, max(largest, finite_number(row.get("epsilon")) or 0.0)
    if not taken:
        return []
    sampling = config.get("sampling")
    total = sampling.get("steps") if isinstance(sampling, Mapping) else None
    wrong = _fewer_releases(statement, total, taken)
    if isinstance(total, int) and taken > total:
        wrong.append(f"{taken} steps were taken, {total} are planned")
    stated = finite_number(statement.get("epsilon"))
    # Other runs and a search change the figure after the steps were written down.
    is_alone = not statement.get("other_runs") and statement.get("search") is None
    if is_alone and stated is not None and largest > stated * (1 + PROGRESS):
        wrong.append(f"epsilon was {largest:.4g} on the way, the statement says {stated:.4g}")
    if wrong:
        return [Finding("metrics", False, f"metrics.jsonl says otherwise: {'; '.join(wrong)}")]
    return [Finding("metrics", True, "steps and epsilon of metrics.jsonl are within the statement's")]


def _fewer_releases(statement: Object, total: Any, taken: int) -> list[str]:
    """Releases that are planned once per step, and were made less often than steps were taken."""
    wrong = []
    made = {row["name"]: row for row in statement["releases"] if row["draw"] == "batch"}
    for name, row in made.items():
        if row["count"] == total and row["used"] < taken:
            wrong.append(f"{taken} steps were taken, {name!r} was released {row['used']} times")
    planned = sum(row["count"] for row in statement["unproven"])
    # What a method discloses, as `sgd` does its gradients, leaves no guarantee to overstate.
    left = sum(hole["count"] for hole in statement["holes"])
    if planned and planned == total and left < taken:
        wrong.append(f"{taken} steps were taken, {left} releases without a proof are named")
    return wrong
