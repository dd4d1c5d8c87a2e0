"""Numbers as text, the same wherever one is shown: a screen, a page, a statement."""

from __future__ import annotations

import math
from collections.abc import Mapping


def significant(value: float, digits: int = 3) -> str:
    """A number with a few significant digits, zeros of the fraction kept while they mean something.

    >>> [significant(v) for v in (2.9, 0.03456, 1e-5, 1234.5, 12.0)]
    ['2.90', '0.0346', '1e-5', '1,234', '12.0']
    """
    if value == 0 or not math.isfinite(value):
        return plain(value)
    exponent = math.floor(math.log10(abs(value)))
    if -4 <= exponent < 7:
        return f"{value:,.{max(digits - 1 - exponent, 0)}f}"
    return plain(value, digits)


def rounded_up(value: float, digits: int = 4) -> str:
    """An upper bound with a few significant digits, never rounded down.

    >>> rounded_up(2.9931), rounded_up(1.5706)
    ('2.994', '1.571')
    """
    if not (math.isfinite(value) and value > 0):
        return plain(value)
    unit = 10.0 ** (math.floor(math.log10(value)) + 1 - digits)
    return significant(math.ceil(value / unit - 1e-9) * unit, digits)


def plain(value: float, digits: int = 6) -> str:
    """A number with at most so many significant digits and no padding.

    >>> [plain(v) for v in (3.0, 0.5, 1e-5, 7.25)]
    ['3', '0.5', '1e-5', '7.25']
    """
    return f"{value:.{digits}g}".replace("e-0", "e-").replace("e+0", "e+")


def times_in_words(count: object) -> str:
    """How often, for a reader.

    >>> times_in_words(1), times_in_words(7)
    ('once', '7 times')
    """
    return "once" if count == 1 else f"{count} times"


def noise_in_words(mechanism: object, digits: int = 4) -> str:
    """The noise multiplier of a release, how it changes, and by what its noise is correlated over steps.

    Args:
        mechanism: as a statement describes it; what is no description gives "".
        digits: significant ones.

    >>> noise_in_words({"kind": "staged", "noise_multiplier": 2.0, "factors": [1.0, 0.8, 0.5]})
    '2 to 1, in 3 stages'
    >>> noise_in_words({"kind": "banded_gaussian", "noise_multiplier": 0.5, "coefficients": [1, 0.5, 0.4]})
    '0.5, correlated over 3 steps by 1, 0.5, 0.4'
    >>> noise_in_words({"kind": "banded_gaussian", "noise_multiplier": 0.5, "coefficients": [1.0]})
    '0.5, one band: fresh in every step as in dp-sgd'
    """
    if not isinstance(mechanism, Mapping):
        return ""
    multiplier = mechanism.get("noise_multiplier", "")
    if not isinstance(multiplier, int | float):
        return str(multiplier)
    text = plain(multiplier, digits)
    if "by" in mechanism:
        text += f", by its author: {mechanism['by']}"
    factors = mechanism.get("factors")
    if isinstance(factors, list) and factors and isinstance(factors[-1], int | float):
        text += f" to {plain(multiplier * factors[-1], digits)}, in {len(factors)} stages"
    return text + correlation_in_words(mechanism)


def correlation_in_words(mechanism: Mapping[str, object]) -> str:
    """By what noise is correlated over steps, from a comma on; "" where nothing is said of it.

    >>> correlation_in_words({"coefficients": [1, 0.5, 0.375, 0.3125, 0.273]})
    ', correlated over 5 steps by 1, 0.5, 0.375, ...'
    >>> correlation_in_words({"kind": "one_step_gaussian", "decay": 0.925})
    ', of which each step takes back 0.925 of the step before'
    """
    decay = mechanism.get("decay")
    if isinstance(decay, int | float):
        return f", of which each step takes back {plain(decay, 3)} of the step before"
    coefficients = mechanism.get("coefficients")
    if not isinstance(coefficients, list) or not all(isinstance(c, int | float) for c in coefficients):
        return ""
    if len(coefficients) < 2:
        return ", one band: fresh in every step as in dp-sgd"
    first = [plain(c, 3) for c in coefficients[: 4 if len(coefficients) == 4 else 3]]
    more = ", ..." if len(coefficients) > len(first) else ""
    return f", correlated over {len(coefficients)} steps by {', '.join(first)}{more}"
