"""Does a statement agree with config.json and metrics.jsonl, the files that a training writes beside it?

The statement's own figures are computed again in `equipoise.statements`. Here the statement is held against
what the other two files say: settings, method, assumptions, steps and the epsilon along the way. Somebody who
makes up a consistent statement would have to make these up, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from equipoise.methods import METHODS, Method
from equipoise.methods.card import GUARANTEES
from equipoise.methods.public_records import public_assumption
from equipoise.statements import Finding
from equipoise.statements.recompute import MALFORMED, figure
from equipoise.statements.statement import ACCOUNTED_SEARCH, UNACCOUNTED_SEARCH, sampling_assumptions
from equipoise.training.input_checks import ALLOWED, NOT_COMPARED
from equipoise.training.setup import rebuild_method

__all__ = [
    "SCANNED",
    "TRUSTED",
    "check_assumptions",
    "check_method",
    "check_metrics",
    "check_settings",
    "may_plan_fewer_steps",
]

SCANNED = "data validated before the mechanism started"
TRUSTED = "data of the user's own, not validated before the mechanism started"
PROGRESS = 0.03
"""How far a row's epsilon, which is computed coarsely, may be from the statement's, relatively."""

Object = Mapping[str, Any]


# ---- config.json


def check_settings(statement: Object, config: Object) -> list[Finding]:
    """Whether plan, noise, relation, sampling and delta are as in config.json; an absent key says nothing."""
    if config.get("plan") is not None and config["plan"] != statement.get("plan"):
        return [Finding("configuration", False, "config.json names another plan")]
    configured: dict[str, object] = {}  # by key of the statement
    settings, budget = config.get("settings"), config.get("budget")
    settings = settings if isinstance(settings, Mapping) else {}
    # a setting that is neither true nor false agrees with nothing
    if "reproducible" in settings:
        public = settings["reproducible"]
        configured["private"] = not public if isinstance(public, bool) else None
    if "hardened" in settings:
        hardened = settings["hardened"]
        noise = "grid" if hardened else "floating_point"
        configured["noise"] = noise if isinstance(hardened, bool) else None
    if "relation" in settings:
        configured["relation"] = settings["relation"]
    if "sampling" in config:
        sampling = config["sampling"]
        fewer = may_plan_fewer_steps(config)
        configured["sampling"] = _planned(sampling, statement.get("sampling")) if fewer else sampling
    if isinstance(budget, Mapping) and "delta" in budget:
        configured["delta"] = budget["delta"]
    wrong = [f"{key} is {value!r}"[:80] for key, value in configured.items() if statement.get(key) != value]
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


def _nested(described: Any) -> list[Object]:
    """A described method and those inside it; the last one releases."""
    found: list[Object] = []
    while isinstance(described, Mapping) and len(found) < 10:
        found.append(described)
        described = described.get("inner", described.get("method"))
    return found


def may_plan_fewer_steps(config: Object) -> bool:
    """Whether a method of config.json takes steps that draw no private record, so that no plan holds them."""
    kinds = [METHODS.get(str(one.get("name"))) for one in _nested(config.get("method"))]
    return any(kind is not None and kind.has_public_steps for kind in kinds)


def check_method(statement: Object, config: Object) -> list[Finding]:
    """Whether guarantee, recipe and noise are those of the method that config.json describes."""
    methods = _nested(config.get("method"))
    if not methods:
        return []
    described = methods[-1]
    kind = METHODS.get(str(described.get("name")))
    if kind is None:
        name = repr(described.get("name"))[:60]
        detail = f"config.json names {name}, no method known here: its settings were not compared"
        return [Finding("method", None, detail)]
    wrong, recipe = [], described.get("recipe", "library")
    if recipe != statement.get("recipe"):
        wrong.append(f"the recipe is {recipe!r}, not {statement.get('recipe')!r}"[:120])
    best, stated = kind.best_guarantee(described), statement.get("guarantee")
    if stated in GUARANTEES and GUARANTEES.index(str(stated)) < GUARANTEES.index(best):
        wrong.append(f"the method's guarantee is {best!r} at best, not {stated!r}")
    wrong += _other_noise(statement, described, kind.noise_arguments) if recipe == "library" else []
    opaque, misfit = _rebuilt(described, kind)
    wrong += misfit
    if wrong:
        return [
            Finding("method", False, f"config.json says otherwise than the statement: {'; '.join(wrong)}")
        ]
    if opaque:
        detail = "a setting of the method is a function, which no file holds: the method was not made again"
        return [Finding("method", None, detail)]
    return []


def _rebuilt(described: Object, kind: type[Method]) -> tuple[bool, list[str]]:
    """Whether a setting stands for a function, and why no method of this name has such settings."""
    if any(isinstance(value, Mapping) and "opaque" in value for value in described.values()):
        return True, []
    others = set(described) - {"name", *kind.arguments()}
    if others:
        return False, [f"{kind.name!r} has not the settings {', '.join(sorted(map(str, others)))}"[:200]]
    if described.get("public") is None:
        try:
            rebuild_method({"method": described})
        except ValueError as error:
            return False, [f"{error}"[:200]]
    return False, []


def _other_noise(statement: Object, described: Object, arguments: Mapping[str, str]) -> list[str]:
    rows = statement.get("releases")
    named = {row.get("name"): row for row in rows or () if isinstance(row, Mapping)}
    wrong = []
    for argument, release in arguments.items():
        given, planned = described.get(argument), _noise_of(named.get(release, {}))
        if given is not None and planned is not None and given != planned:
            wrong.append(f"{argument} is {given!r}, that of {release!r} {planned!r}"[:120])
    threshold = described.get("clip_norm")
    if described.get("name") == "dp-sgd" and isinstance(threshold, Mapping):
        bound = named.get("gradient", {}).get("max_bound")
        if threshold.get("kind") == "Fixed" and threshold.get("clip_norm") != bound:
            wrong.append(f"clip_norm is {threshold.get('clip_norm')!r}, the bound {bound!r}"[:120])
    return wrong


def check_assumptions(statement: Object, config: Object) -> list[Finding]:
    """Whether the statement's assumptions are those of its data and of the method in config.json."""
    named = statement.get("assumptions")
    named = [text for text in named if isinstance(text, str)] if isinstance(named, list) else []
    methods, settings = _nested(config.get("method")), config.get("settings")
    counts = _public_counts(methods)
    wanted = [public_assumption(count) for count in counts]
    wanted += _of_method(methods[-1]) if methods else []
    if counts and isinstance(settings, Mapping) and settings.get("allow_public_duplicates") is True:
        wanted.append(ALLOWED)
    elif counts and TRUSTED in named:
        wanted.append(NOT_COMPARED)
    wrong = [text for text in wanted if text not in named]
    if (SCANNED in named) is (TRUSTED in named):
        wrong.insert(0, f"one of {SCANNED!r} and {TRUSTED!r}")
    if wrong:
        detail = f"the statement does not name what it rests on: {'; '.join(wrong)}"
        return [Finding("assumptions", False, detail[:300])]
    found = [Finding("assumptions", True, "data, draws and what config.json tells of are named")]
    try:
        draws = sampling_assumptions([*statement["releases"], *statement["unproven"]])
    except MALFORMED:
        return found  # which is found elsewhere
    known = {*wanted, *draws, SCANNED, TRUSTED, ACCOUNTED_SEARCH, UNACCOUNTED_SEARCH}
    own = [text for text in named if text not in known]
    if own:
        detail = f"the issuer's own words, which no file here bears out: {'; '.join(own)}"
        found.append(Finding("further assumptions", None, detail[:600]))
    return found


def _public_counts(methods: Sequence[Object]) -> list[int]:
    """The numbers of public records of described methods."""
    counts = [one["public"].get("records") for one in methods if isinstance(one.get("public"), Mapping)]
    return [count for count in counts if isinstance(count, int)]


def _of_method(described: Object) -> list[str]:
    """What a described method assumes, where it can be made without public records."""
    if described.get("name") not in METHODS or described.get("public") is not None:
        return []
    try:
        return list(rebuild_method({"method": described}).assumptions())
    except ValueError:
        return []  # which `check_method` tells


# ---- metrics.jsonl


def check_metrics(statement: Object, config: Object, rows: Sequence[Any]) -> list[Finding]:
    """Whether the steps of metrics.jsonl are among the releases, and their epsilon is the statement's."""
    steps = [row for row in rows if isinstance(row, Mapping) and "learning_rate" in row]
    if not steps:
        return []
    wrong = []
    sampling = config.get("sampling")
    total = sampling.get("steps") if isinstance(sampling, Mapping) else None
    last = steps[-1].get("step")
    if isinstance(total, int) and not (isinstance(last, int) and last <= total):
        wrong.append(f"the last step is {last!r} of {total}"[:80])
    wrong += _fewer_releases(statement, total, len(steps))
    told = [value for row in steps if (value := figure(row.get("epsilon"))) is not None]
    stated = figure(statement.get("epsilon"))
    # Other runs and a search change the figure after the steps were written down.
    alone = not statement.get("other_runs") and statement.get("search") is None
    if told and stated is not None:
        at_end = figure(steps[-1].get("epsilon")) if last == total else None
        if alone and max(told) > told[-1] * (1 + PROGRESS):
            wrong.append(f"an epsilon of {max(told):.4g} stands before the last, {told[-1]:.4g}")
        if alone and max(told) > stated * (1 + PROGRESS):
            wrong.append(f"epsilon was {max(told):.4g} on the way, the statement says {stated:.4g}")
        elif alone and at_end is not None and at_end < stated * (1 - PROGRESS):
            wrong.append(f"epsilon is {at_end:.4g} at the last step, the statement says {stated:.4g}")
    if wrong:
        return [Finding("metrics", False, f"metrics.jsonl says otherwise: {'; '.join(wrong)}")]
    return [Finding("metrics", True, "steps and epsilon of metrics.jsonl are the statement's")]


def _fewer_releases(statement: Object, total: Any, taken: int) -> list[str]:
    """What is planned once in every step must have left as often as steps were taken, at least."""
    wrong = []
    made = {row["name"]: row for row in statement["releases"] if row["draw"] == "batch"}
    for name, row in made.items():
        if row["count"] == total and row["used"] < taken:
            wrong.append(f"{taken} steps were taken, {name!r} was released {row['used']} times")
    planned = sum(row["count"] for row in statement["unproven"])
    left = sum(hole["count"] for hole in statement["holes"] if hole["kind"] == "release_unproven")
    if planned and planned == total and left < taken:
        wrong.append(f"{taken} steps were taken, {left} releases without a proof are named")
    return wrong


def _noise_of(row: Object) -> object:
    mechanism = row.get("mechanism")
    return mechanism.get("noise_multiplier") if isinstance(mechanism, Mapping) else None
