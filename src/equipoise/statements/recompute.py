"""Compare a given statement with the one that is computed again, key by key."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from equipoise._rounding import plain, rounded_up
from equipoise._run_files import finite_number
from equipoise.privacy.errors import JournalError
from equipoise.statements.assumptions import Assumption
from equipoise.statements.statement import Statement, independence_of

# Keys of a statement that no journal holds: only their form can be checked.
ON_TRUST: dict[str, Callable[[Any], bool]] = {
    "recipe": lambda value: value in ("library", "as_published"),
    "epsilon_claimed": lambda value: value is None or (finite_number(value) or -1.0) >= 0,
    "versions": lambda value: isinstance(value, dict) and all(isinstance(one, str) for one in value.values()),
}
STOP_KEY, USERS_KEY = "stop_fixed_beforehand", "users"
PLAN_KEYS = {"plan", "relation", "sampling", "unproven", "unit", USERS_KEY}
FIGURES = {
    "epsilon",
    "epsilons",
    "cross_check",
    "accountant",
    "interval",
    "warnings",
    "guarantee",
    "noise_tail",
}

Limits = tuple[float, float]  # how far below and above a figure may lie, relatively
ANY_FINITE = sys.float_info.max
EXACT = (0.0, 0.0)  # for all that no accountant computes
# Relative differences of a figure: rounding, and how much looser another version of the accountants may be.
# The second is a choice: with less, statements of other versions fail, and with more, figures pass that are
# too large.
SAME, OTHER_VERSIONS = 1e-6, 1e-2

# What computing with the content of a file that somebody else wrote may raise.
MALFORMED = (
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


def message(error: BaseException) -> str:
    """An error in a few words."""
    text = str(error)
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def delta_of(statement: Mapping[str, Any]) -> float:
    """The delta that a statement names.

    Raises:
        ValueError: it is no number between 0 and 1.
    """
    delta = statement.get("delta")
    if isinstance(delta, bool) or not isinstance(delta, (int, float)) or not 0 < delta < 1:
        raise ValueError(f"delta={delta!r} is not between 0 and 1")
    return float(delta)


def differences(statement: Mapping[str, Any], again: Statement, above: float | None = None) -> list[str]:
    """The keys that are not what they were computed to be.

    Args:
        statement: as given.
        again: as computed.
        above: how far epsilons may lie above, relatively; by default as other versions computed them.
    """
    computed = asdict(again)
    limits = _limits(statement, again, above)
    found = []
    for key in [*computed, *(k for k in statement if k not in computed)]:
        if key in ON_TRUST:
            claimed = key == "epsilon_claimed" and statement.get(key) is not None
            # the library claims what it proves
            own = claimed and statement.get("recipe") == "library"
            if own or key not in statement or not ON_TRUST[key](statement[key]):
                found.append(key)
            continue
        since = key in (STOP_KEY, "noise_tail", "secret_seed") or (key == USERS_KEY and computed[key] is None)
        if since and key not in statement:
            continue  # it was made before there was such a key
        if key in ("independence", "secret_seed"):  # these follow from the sentences
            given = statement.get("assumptions")
            texts = given if isinstance(given, list) else []
            follows = independence_of(texts) if key == "independence" else Assumption.SECRET_SEED in texts
            same = _close(statement.get(key, {}), follows, EXACT)
        elif key == "assumptions":
            given = statement.get(key)
            texts = given if isinstance(given, list) else [None]
            same = all(isinstance(text, str) for text in texts) and set(computed[key]) <= set(texts)
        else:
            allowed = limits.get(key, EXACT)
            same = key in statement and key in computed and _close(statement[key], computed[key], allowed)
        if not same:
            found.append(key)
    return found


def _limits(statement: Mapping[str, Any], again: Statement, above: float | None) -> dict[str, Limits]:
    """Of the figures that an accountant computes; whatever else is a number is compared exactly.

    Other versions may have had a looser bound, which is one too. A tighter one cannot be confirmed here.
    """
    looser = SAME if statement.get("versions") == again.versions else OTHER_VERSIONS
    limits = dict.fromkeys(("epsilon", "epsilons", "cross_check"), (SAME, looser if above is None else above))
    return limits | {"interval": (looser, looser), "noise_tail": (looser, looser), "holes": (SAME, SAME)}


def _close(given: Any, computed: Any, allowed: Limits) -> bool:
    """Whether plain values are equal, numbers but deltas up to relative differences."""
    if isinstance(computed, float) and isinstance(given, (int, float)) and not isinstance(given, bool):
        below, above = allowed
        # with other runs in the figure, one that costs nothing by itself may stand at any finite number
        most = above if above == ANY_FINITE else computed * (1 + above)
        return computed * (1 - below) <= given <= most
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


def compared(statement: Mapping[str, Any], again: Statement, epsilon: Finding | None = None) -> list[Finding]:
    """What a given statement says, against the one computed again.

    Args:
        statement: as `statement.json` holds it.
        again: what it must say.
        epsilon: the finding on its figures, where `again` does not know what the other runs cost.
    """
    wrong = differences(statement, again)
    named = not PLAN_KEYS & set(wrong)
    detail = f"its hash is {again.plan[:16]}..." if named else "the statement names another plan"
    plan = Finding("plan", named, detail)
    figures = epsilon or _epsilon(statement, again, FIGURES & set(wrong))
    settled = PLAN_KEYS | FIGURES | ({"other_runs"} if epsilon else set())
    rest = [key for key in wrong if key not in settled]
    detail = f"these do not agree: {', '.join(rest)}" if rest else "releases, counts and holes agree"
    return [plan, figures, Finding("statement", not rest, detail)]


def _epsilon(statement: Mapping[str, Any], again: Statement, wrong: set[str]) -> Finding:
    stated, found = finite_number(statement.get("epsilon")), finite_number(again.epsilon)
    at = f" at delta {plain(again.delta)}" if again.delta is not None else ""
    # Figures that agree are shown as everywhere else; a difference may lie behind the fourth digit.
    digits = 6 if "epsilon" in wrong else 4
    detail = f"computed again: {text_of(found, digits)}{at}; the statement says {text_of(stated, digits)}"
    others = sorted(wrong - {"epsilon"})
    return Finding("epsilon", not wrong, detail + (f"; wrong: {', '.join(others)}" if others else ""))


def text_of(value: float | None, digits: int) -> str:
    """An upper bound for a sentence."""
    return "no value" if value is None else rounded_up(value, digits)
