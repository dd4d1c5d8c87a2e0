"""Does a statement agree with itself? What a stranger can tell, who has the published files alone.

The statement's own plan and counts must hash to the plan's name and give its epsilon, so that no figure of
the statement can be edited by itself; whether the run released what the statement counts is the journal's
knowledge (see `verification.py`) and the issuer's word, which a signature ties to the issuer (see
`signatures.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from equipoise.privacy.ledger.run_record import Epochs, KnownRun
from equipoise.privacy.plan import Pattern, PrivacyPlan
from equipoise.privacy.restatement import (
    MALFORMED,
    SAME,
    Finding,
    compared,
    delta_of,
    figure,
    message,
    text_of,
)
from equipoise.privacy.statement import Hole, Statement

__all__ = ["check_published"]


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


def _published_run(statement: Mapping[str, Any]) -> KnownRun:
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
    return KnownRun(plan, used, epochs, holes, private, statement["search"], statement["noise"])


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
