"""Does a statement agree with the method of config.json, and with the last row of metrics.jsonl?

The statement's own figures are computed again in `equipoise.statements.verify_journal`; here stands what the
two files beside it tell that a statement made up in itself would have to contradict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from equipoise.methods import METHODS, Method
from equipoise.methods.card import GUARANTEES
from equipoise.statements import Finding
from equipoise.statements.recompute import figure
from equipoise.training.setup import rebuild_method

__all__ = ["check_method", "check_metrics", "may_plan_fewer_steps", "nested"]

Object = Mapping[str, Any]
PROGRESS = 0.03
"""How far a row's epsilon, which is computed coarsely, may be from the statement's, relatively."""


def nested(described: Any) -> list[Object]:
    """A described method and those inside it; the last one releases."""
    found: list[Object] = []
    while isinstance(described, Mapping) and len(found) < 10:
        found.append(described)
        described = described.get("inner", described.get("method"))
    return found


def may_plan_fewer_steps(config: Object) -> bool:
    """Whether a method of config.json takes steps that draw no private record, so that no plan holds them."""
    kinds = [METHODS.get(str(one.get("name"))) for one in nested(config.get("method"))]
    return any(kind is not None and kind.has_public_steps for kind in kinds)


def check_method(statement: Object, config: Object) -> list[Finding]:
    """Whether guarantee, recipe and noise are those of the method that config.json describes."""
    methods = nested(config.get("method"))
    if not methods:
        return []
    described = methods[-1]
    kind = METHODS.get(str(described.get("name")))
    if kind is None:
        name = repr(described.get("name"))[:60]
        detail = f"config.json names {name}, no method known here: its settings were held to nothing"
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


def _other_noise(statement: Object, described: Object, arguments: Mapping[str, str]) -> list[str]:
    rows = statement.get("releases")
    named = {row.get("name"): row for row in rows or () if isinstance(row, Mapping)}
    wrong = []

    def noise_of(release: str) -> object:
        return named.get(release, {}).get("mechanism", {}).get("noise_multiplier")

    for argument, release in arguments.items():
        given, planned = described.get(argument), noise_of(release)
        if given is not None and planned is not None and given != planned:
            wrong.append(f"{argument} is {given!r}, that of {release!r} {planned!r}"[:120])
    threshold = described.get("clip_norm")
    if described.get("name") == "dp-sgd" and isinstance(threshold, Mapping):
        bound = named.get("gradient", {}).get("max_bound")
        if threshold.get("kind") == "Fixed" and threshold.get("clip_norm") != bound:
            wrong.append(f"clip_norm is {threshold.get('clip_norm')!r}, the bound {bound!r}"[:120])
    return wrong


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
