"""Checks of public arguments: one-liners that name the argument, its value, what is wrong, and the remedy.

    positive(clip_norm=clip_norm, noise_multiplier=z)
    count("the number of draws", steps=steps)
    share(residual_share=share)
    one_of(("once", "every_step"), anchor_noise=anchor_noise)

The values are public settings. What somebody gives in their place may be data, so only plain values are
printed. A value of another type than a number raises a `TypeError`, a number out of range a `ValueError`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

NO_NOISE = "or train without noise by equipoise.methods.PlainSGD or ClipSGD"


def author_of(kind: type) -> str | None:
    """Where a class is that is not of this library, as "module:Class"; None for one of the library's.

    >>> author_of(int)
    'builtins:int'
    """
    is_ours = kind.__module__.partition(".")[0] == __name__.partition(".")[0]
    return None if is_ours else f"{kind.__module__}:{kind.__qualname__}"


def by_author(part: object) -> list[str]:
    """What a statement says of an object whose class is not this library's; nothing of the library's own."""
    path = author_of(type(part))
    if path is None:
        return []
    base = next(kind for kind in type(part).__mro__ if author_of(kind) is None)
    return [
        f"the user's own {path}, whose code was not checked, stands in the place of the library's "
        f"{base.__name__}: it does what that one promises"
    ]


def given(name: str, value: Any) -> str:
    """An argument as an error names it: with its value, unless that may hold records.

    >>> given("steps", 0), given("population", [0.3, 0.7])
    ('steps=0', 'population')
    """
    plain = value is None or isinstance(value, (bool, int, float, str, type))
    return f"{name}={value!r}" if plain else name


def _of_numpy(value: Any) -> str:
    """How a scalar of NumPy becomes a number."""
    return ", such as its .item()" if hasattr(value, "item") else ""


def positive(remedy: str = "", /, **named: Any) -> None:
    """Each must be a finite number above zero.

    Args:
        remedy: what the number means, or what else may be given.
        named: the arguments.

    Example:
        >>> positive(clip_norm=1.0)
        >>> positive("a bound on the norm", clip_norm=-1.0)
        Traceback (most recent call last):
        ValueError: clip_norm=-1.0 must be positive and finite: it is a number above zero, a bound on the norm
    """
    for name, value in named.items():
        also = f", {remedy}" if remedy else ""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(
                f"{given(name, value)} must be a number, not {type(value).__name__}: give a finite number "
                f"above zero{_of_numpy(value)}{also}"
            )
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name}={value!r} must be positive and finite: it is a number above zero{also}")


def non_negative(**named: Any) -> None:
    """Each must be a finite number of at least zero.

    Example:
        >>> non_negative(strength=-1.0)
        Traceback (most recent call last):
        ValueError: strength=-1.0 must be a finite number of at least 0
    """
    for name, value in named.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (number and math.isfinite(value) and value >= 0):
            raise (ValueError if number else TypeError)(
                f"{given(name, value)} must be a finite number of at least 0"
            )


def positive_if_given(remedy: str = "", /, **named: Any) -> None:
    """Each that is not None must be a finite number above zero."""
    positive(remedy, **{name: value for name, value in named.items() if value is not None})


def noise_if_given(noise_multiplier: Any) -> None:
    """None, or a finite number above zero; without noise other methods train."""
    positive_if_given(f"or None to calibrate it, {NO_NOISE}", noise_multiplier=noise_multiplier)


def count(meaning: str = "", /, **named: Any) -> None:
    """Each must be a whole number of at least 1.

    Args:
        meaning: what is counted.
        named: the arguments.

    Example:
        >>> count("the number of draws", steps=0)
        Traceback (most recent call last):
        ValueError: steps=0 must be at least 1: it is the number of draws, a whole number
    """
    for name, value in named.items():
        what = f"{meaning}, a whole number" if meaning else "a whole number"
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(
                f"{given(name, value)} must be an integer, not {type(value).__name__}: it is {what}"
                f"{_of_numpy(value)}"
            )
        if value < 1:
            raise ValueError(f"{name}={value!r} must be at least 1: it is {what}")


def share(**named: Any) -> None:
    """Each must lie strictly between 0 and 1.

    Example:
        >>> share(radius_share=1.0)
        Traceback (most recent call last):
        ValueError: radius_share=1.0 is a share: it must lie strictly between 0 and 1
    """
    for name, value in named.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (number and 0 < value < 1):
            raise (ValueError if number else TypeError)(
                f"{given(name, value)} is a share: it must lie strictly between 0 and 1"
            )


def within(interval: str, /, **named: Any) -> None:
    """Each must be a number in an interval, which is written as usual.

    Example:
        >>> within("[0, 1)", decay=0.5)
        >>> within("[0, 1)", decay=1.0)
        Traceback (most recent call last):
        ValueError: decay=1.0 is outside of its range: it is a number in [0, 1)
    """
    low, high = map(float, interval[1:-1].split(","))
    for name, value in named.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        ends = [end for end, mark in ((low, interval[0]), (high, interval[-1])) if mark in "[]"]
        if not (number and (low < value < high or value in ends)):
            raise (ValueError if number else TypeError)(
                f"{given(name, value)} is outside of its range: it is a number in {interval}"
            )


def one_of(choices: Iterable[str], /, **named: Any) -> None:
    """Each must be one of the choices.

    Example:
        >>> one_of(("rbs", "ibs"), split="halves")
        Traceback (most recent call last):
        ValueError: split='halves' is unknown; give one of 'rbs', 'ibs'
    """
    known = tuple(choices)
    for name, value in named.items():
        if value not in known:
            raise ValueError(f"{given(name, value)} is unknown; give one of {', '.join(map(repr, known))}")


def what_is(value: Any) -> str:
    """What an argument is that should be something else, for an error.

    >>> what_is(3), what_is("many"), what_is(dict)
    ('an int', 'a str', 'the class dict itself, not an object of it')
    """
    if isinstance(value, type):
        return f"the class {value.__name__} itself, not an object of it"
    return _with_article(type(value).__name__)


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def instance(kind: type, example: str, /, **named: Any) -> None:
    """Each must be an object of this class.

    Args:
        kind: the class.
        example: what may be given, as one writes it.
        named: the arguments.

    Example:
        >>> instance(int, "3", steps="many")
        Traceback (most recent call last):
        TypeError: steps='many' is a str: give an int, such as 3
    """
    for name, value in named.items():
        if not isinstance(value, kind):
            wanted = _with_article(kind.__name__)
            choices = kind.kinds().values() if hasattr(kind, "kinds") else ()  # of an option of a method
            if len(choices) > 1:
                wanted += f" ({', '.join(choice.__name__ for choice in choices)})"
            raise TypeError(f"{given(name, value)} is {what_is(value)}: give {wanted}, such as {example}")


def suggestion(word: str, names: Iterable[str]) -> str:
    """A question after the name that was probably meant, with a space before it; empty where none is near.

    >>> suggestion("dpsgd", ["dp-sgd", "dp-c4"])
    ' Did you mean dp-sgd?'
    >>> suggestion("resnet", ["linear", "resnet20-gn"]), suggestion("qqq", ["linear"])
    (' Did you mean resnet20-gn?', '')
    """
    known = tuple(names)
    near = get_close_matches(word, known, n=1, cutoff=0.6)
    near = near or [name for name in known if len(word) > 2 and name.startswith(word.lower())][:1]
    return f" Did you mean {near[0]}?" if near else ""


def delta_warning(delta: float, population: int) -> str | None:
    """A sentence if delta would let a whole record leak, None if it is small enough.

    >>> delta_warning(0.1, 1437)
    'delta=0.1 is not below 1/population = 0.000696: a mechanism that publishes one record in full can meet \
it. Give a delta far below that.'
    >>> delta_warning(1e-5, 1437)
    """
    if delta < 1 / population:
        return None
    return (
        f"delta={delta:g} is not below 1/population = {1 / population:.3g}: a mechanism that publishes one "
        "record in full can meet it. Give a delta far below that."
    )
