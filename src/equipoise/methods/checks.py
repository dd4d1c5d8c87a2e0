"""What constructors of methods ask of their arguments, in messages that name argument, value and remedy."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

__all__ = ["require_count", "require_one_of", "require_positive", "require_share"]


def require_positive(argument: str, value: Any, remedy: str = "") -> None:
    """Raise a ValueError unless the value is a finite number above zero.

    Args:
        argument, value: what the message names.
        remedy: what else may be given, or what the number means.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and math.isfinite(value) and value > 0):
        also = f", {remedy}" if remedy else ""
        raise ValueError(f"{argument}={value!r}: it must be a finite number above zero{also}")


def require_share(argument: str, value: float) -> None:
    """Raise a ValueError unless the value lies strictly between 0 and 1."""
    if not 0 < value < 1:
        raise ValueError(f"{argument}={value!r} is a share: it must lie strictly between 0 and 1")


def require_count(argument: str, value: int) -> None:
    """Raise a ValueError unless the value is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{argument}={value!r}: it must be a whole number of at least 1")


def require_one_of(argument: str, value: Any, choices: Iterable[str]) -> Any:
    """The value, if it is one of the choices.

    Raises:
        ValueError: it is none of them.

    Example:
        >>> require_one_of("recipe", "library", ("library", "as_published"))
        'library'
    """
    known = tuple(choices)
    if value not in known:
        raise ValueError(f"{argument}={value!r} is unknown; give one of {', '.join(map(repr, known))}")
    return value
