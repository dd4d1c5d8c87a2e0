"""Does a statement name what it takes for granted? What always is, and what follows from config.json.

Population and sampling of every draw, and the sentence on searches, are looked for with the figures
(`equipoise.statements.recompute`). A text that nothing here asks for is the issuer's own, and told as such.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from equipoise.methods import METHODS
from equipoise.methods.public_records import public_assumption
from equipoise.privacy.statement import ACCOUNTED_SEARCH, UNACCOUNTED_SEARCH, sampling_assumptions
from equipoise.statements import Finding
from equipoise.statements.recompute import MALFORMED
from equipoise.training.consistency import nested
from equipoise.training.input_checks import ALLOWED, NOT_COMPARED
from equipoise.training.setup import rebuild_method

__all__ = ["SCANNED", "TRUSTED", "check_assumptions"]

SCANNED = "data validated before the mechanism started"
TRUSTED = "data of the user's own, not validated before the mechanism started"

Object = Mapping[str, Any]


def check_assumptions(statement: Object, config: Object) -> list[Finding]:
    """Whether the statement's assumptions are those of its data and of the method in config.json."""
    named = statement.get("assumptions")
    named = [text for text in named if isinstance(text, str)] if isinstance(named, list) else []
    methods, settings = nested(config.get("method")), config.get("settings")
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
