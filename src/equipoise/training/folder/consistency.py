"""Does a statement agree with config.json and metrics.jsonl, which a training writes with it?

The statement's own figures are computed again in `equipoise.statements`. Here the statement is held against
what the other two files say: settings, method, assumptions, steps and the epsilon along the way. Somebody who
makes up a consistent statement would have to make these up, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from equipoise.methods import Method, find
from equipoise.methods.base import by_author
from equipoise.methods.configuration import NotInFileError
from equipoise.methods.public_records import public_assumption, public_counts
from equipoise.methods.registry import registered
from equipoise.privacy.ledger.run_record import GUARANTEES
from equipoise.statements import Finding
from equipoise.statements.recompute import MALFORMED, finite_number
from equipoise.statements.statement import OF_THE_LEDGER, sampling_assumptions
from equipoise.training.assumptions import ALLOWED, EARLIER, NAMED, NOT_COMPARED, Assumption, always
from equipoise.training.folder.config_file import is_of_this_version, of_another_version, rebuild_method

__all__ = ["check_assumptions", "check_method", "check_metrics", "check_settings", "may_plan_fewer_steps"]

PROGRESS = 0.04
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
    if "hardened" in settings and (statement.get("releases") or statement.get("unproven")):
        hardened = settings["hardened"]
        noise = "grid" if hardened else "floating_point"
        configured["noise"] = noise if isinstance(hardened, bool) else None
    if "relation" in settings:
        configured["relation"] = settings["relation"]
    if "unit" in settings:
        configured["unit"] = settings["unit"]
        if settings["unit"] == "user":
            configured["users"] = {
                "records": settings.get("records_per_user"),
                "rows": settings.get("user_rows"),
            }
    if settings.get("noise_for_cohort") is not None:  # a simulation claims nothing
        configured["guarantee"] = "none"
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
        described = described.get("inner")
    return found


def may_plan_fewer_steps(config: Object) -> bool:
    """Whether a method of config.json takes steps that draw no private record, so that no plan holds them."""
    names = [str(one.get("name")) for one in _nested(config.get("method"))]
    return any("public" in inspect.signature(find(name)).parameters for name in names if name in registered())


def check_method(statement: Object, config: Object) -> list[Finding]:
    """Whether guarantee, recipe and noise are those of the method that config.json describes."""
    methods = _nested(config.get("method"))
    if not methods:
        return []
    described = methods[-1]
    name, recipe = str(described.get("name")), described.get("recipe", "library")
    if name not in registered():
        detail = f"config.json names {name[:60]!r}, no method known here: its settings were not compared"
        return [Finding("method", None, detail)]
    wrong: list[str] = []
    details: list[str] = []
    if recipe != statement.get("recipe"):
        wrong.append(f"the recipe is {recipe!r}, not {statement.get('recipe')!r}"[:120])
    opaque = any(isinstance(value, Mapping) and "opaque" in value for _, value in _settings(described))
    unknown = None
    try:
        kind = find(name, recipe)
        method = None if opaque or public_counts(described) else rebuild_method({"method": described})
        best, stated = kind.card.guarantee if method is None else method.guarantee, statement.get("guarantee")
        if stated in GUARANTEES and GUARANTEES.index(str(stated)) < GUARANTEES.index(best):
            wrong.append(f"the method's guarantee is {best!r} at best, not {stated!r}")
        others = sorted(set(described) - {"name", "recipe", *inspect.signature(kind).parameters})
        details += [of_another_version("method", others)] if others else []
    except NotInFileError as error:  # a class that is not here
        unknown = f"{error}"[:300]
    except ValueError as error:
        details.append(f"{error}"[:300])
    if recipe == "library":
        wrong += _other_noise(statement, described, find(name))
    if wrong:
        details.append(f"config.json says otherwise than the statement: {'; '.join(wrong)}")
    if details:
        return [Finding("method", False, detail) for detail in details]
    if opaque:
        detail = "a setting of the method is a function, which no file holds: the method was not made again"
        return [Finding("method", None, detail)]
    return [] if unknown is None else [Finding("method", None, unknown)]


def _settings(described: Object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The settings of a described method and of its options, by dotted names."""
    for name, value in described.items():
        yield f"{prefix}{name}", value
        if isinstance(value, Mapping):
            yield from _settings(value, f"{prefix}{name}.")


def _other_noise(statement: Object, described: Object, kind: type[Method]) -> list[str]:
    """The noise and the bound that the settings fix and that are not those of any release, as words."""
    rows = [row for row in statement.get("releases") or () if isinstance(row, Mapping)]
    stated = [_noise_of(row) for row in rows]
    found = {n: v for n, v in _settings(described) if n.endswith("noise_multiplier") and v is not None}
    given = {name: value for name, value in found.items() if not isinstance(value, Mapping)}
    wrong = [
        f"{name} is {value!r}, those of the releases {stated!r}"[:120]
        for name, value in given.items()
        if rows and _released(name, value, described, kind, rows) not in [None, *stated]
    ]
    bound = kind.described_bound(described)
    stated_bounds = [row.get("max_bound") for row in rows if row.get("name") == "gradient"]
    if bound is not None and stated_bounds and stated_bounds != [bound]:
        wrong.append(f"clip_norm is {bound!r}, the bound {stated_bounds[0]!r}"[:120])
    return wrong


def _released(name: str, value: Any, described: Object, kind: type[Method], rows: Iterable[Object]) -> object:
    """The multiplier that a setting gives one of the releases; None if it is for none of them."""
    if not name.startswith("noise_multiplier") or finite_number(value) is None:
        return value
    return kind.released_multiplier(described, value, [str(row.get("name")) for row in rows])


def check_assumptions(statement: Object, config: Object) -> list[Finding]:
    """Whether the statement's assumptions are those of its data and of the method in config.json."""
    named = statement.get("assumptions")
    named = [text for text in named if isinstance(text, str)] if isinstance(named, list) else []
    methods, settings = _nested(config.get("method")), config.get("settings")
    counts = public_counts(config.get("method"))
    every = always(statement.get("unit"))
    wanted = [*(every if is_of_this_version(config) else ()), *(public_assumption(count) for count in counts)]
    wanted += _of_method(methods[-1]) if methods else []
    if counts and isinstance(settings, Mapping) and settings.get("allow_public_duplicates") is True:
        wanted.append(ALLOWED)
    elif counts and Assumption.TRUSTED in named:
        wanted.append(NOT_COMPARED)
    found = config.get("assumptions")  # an edited file may hold the issuer's own words
    found = [text for text in found if isinstance(text, str)] if isinstance(found, list) else []
    wrong = [text for text in dict.fromkeys([*wanted, *found]) if text not in named]
    if (Assumption.SCANNED in named) is (Assumption.TRUSTED in named):
        wrong.insert(0, f"one of {Assumption.SCANNED.value!r} and {Assumption.TRUSTED.value!r}")
    if wrong:
        detail = f"the statement does not name what it rests on: {'; '.join(wrong)}"
        return [Finding("assumptions", False, detail[:300])]
    findings = [Finding("assumptions", True, "data, draws and what config.json tells of are named")]
    if any(text not in named for text in every):
        detail = "another version began the run: the sentences of every statement were not compared"
        findings.append(Finding("assumptions", None, detail))
    try:
        draws = sampling_assumptions([*statement["releases"], *statement["unproven"]])
    except MALFORMED:
        return findings  # the checks of the statement report it
    known = {
        *wanted,
        *every,
        *draws,
        *Assumption,
        *EARLIER,
        *OF_THE_LEDGER,
        *(one for one in found if one.startswith(NAMED)),
    }
    own = [text for text in named if text not in known]
    if own:
        detail = f"the issuer's own words, which no file here bears out: {'; '.join(own)}"
        findings.append(Finding("further assumptions", None, detail[:600]))
    return findings


def _of_method(described: Object) -> list[str]:
    """What a described method assumes, where it can be made without public records."""
    if described.get("name") not in registered() or public_counts(described):
        return []
    try:
        made = rebuild_method({"method": described})
        return [*by_author(made), *made.assumptions()]
    except ValueError:
        return []  # `check_method` reports it


# ---- metrics.jsonl


def check_metrics(statement: Object, config: Object, rows: Iterable[Object]) -> list[Finding]:
    """Whether the steps of metrics.jsonl are among the releases, and their epsilon is the statement's."""
    taken, reported = 0, []
    final: Object = {}
    for row in rows:
        if "learning_rate" in row:
            taken, final = taken + 1, row
            if (value := finite_number(row.get("epsilon"))) is not None:
                reported.append(value)
    if not taken:
        return []
    wrong = []
    sampling = config.get("sampling")
    total = sampling.get("steps") if isinstance(sampling, Mapping) else None
    last = final.get("step")
    if isinstance(total, int) and not (isinstance(last, int) and last <= total):
        wrong.append(f"the last step is {last!r} of {total}"[:80])
    wrong += _fewer_releases(statement, total, taken)
    stated = finite_number(statement.get("epsilon"))
    # Other runs and a search change the figure after the steps were written down.
    no_others = not statement.get("other_runs") and statement.get("search") is None
    if reported and stated is not None:
        at_end = finite_number(final.get("epsilon")) if last == total else None
        if no_others and max(reported) > reported[-1] * (1 + PROGRESS):
            wrong.append(f"an earlier epsilon, {max(reported):.4g}, is above the last, {reported[-1]:.4g}")
        if no_others and max(reported) > stated * (1 + PROGRESS):
            wrong.append(f"epsilon was {max(reported):.4g} on the way, the statement says {stated:.4g}")
        elif no_others and at_end is not None and at_end < stated * (1 - PROGRESS):
            wrong.append(f"epsilon is {at_end:.4g} at the last step, the statement says {stated:.4g}")
    if wrong:
        return [Finding("metrics", False, f"metrics.jsonl says otherwise: {'; '.join(wrong)}")]
    return [Finding("metrics", True, "steps and epsilon of metrics.jsonl are the statement's")]


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


def _noise_of(row: Object) -> object:
    mechanism = row.get("mechanism")
    return mechanism.get("noise_multiplier") if isinstance(mechanism, Mapping) else None
