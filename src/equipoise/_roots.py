"""The one root finder: where a falling function comes down to zero.

Budgets and certificates ask for the smallest noise that is enough, or the largest epsilon that is refuted. A
monotone function crosses zero, and the answer must lie on a known side of the crossing. `crossing` grows a
bracket from a first guess, lets `scipy.optimize.brentq` (Brent 1973) narrow it, and returns both sides.

Rising functions are given with the opposite sign. A condition instead of a function (1.0 where it does not
hold yet, else -1.0) works too, at the speed of bisection.
"""

from __future__ import annotations

from collections.abc import Callable

from scipy import optimize

# Brent's method interpolates: beyond, a value tells its sign alone, so that infinities do no harm.
_LARGEST = 1e9
_FINEST = 8.9e-16  # the least relative tolerance that brentq takes
_TINY = 1e-300  # an absolute tolerance of zero is refused


class NoCrossing(ValueError):
    """The function does not come down to zero between the limits.

    Attributes:
        above: whether it is above zero everywhere; else it is below.
    """

    def __init__(self, above: bool, where: float) -> None:
        super().__init__(f"the function is {'above' if above else 'below'} zero up to {where:g}")
        self.above = above


def crossing(
    function: Callable[[float], float],
    start: float,
    step: float,
    *,
    least: float = float("-inf"),
    most: float = float("inf"),
    tolerance: float,
    relative: float = 0.0,
) -> tuple[float, float]:
    """(x, y) with function(x) > 0 >= function(y), x < y and y - x at most about twice the tolerance.

    Args:
        function: falling; may be infinite, and may jump.
        start: first guess.
        step: how far the bracket reaches from there at first; it doubles until it holds the crossing.
        least, most: limits of the bracket.
        tolerance, relative: of the crossing; what is allowed is `tolerance + relative * |x|`.

    Raises:
        NoCrossing: the function does not cross zero between the limits.

    Example:
        >>> x, y = crossing(lambda x: 2 - x * x, 10.0, 1.0, least=0.0, tolerance=1e-9)
        >>> x * x < 2 <= y * y, round(y, 6)
        (True, 1.414214)
    """
    known: dict[float, float] = {}

    def value(x: float) -> float:
        if x not in known:
            known[x] = max(-_LARGEST, min(_LARGEST, function(x)))
        return known[x]

    low = high = start
    if value(start) > 0:
        while value(high) > 0:
            if high >= most:
                raise NoCrossing(True, most)
            low, high, step = high, min(most, high + step), 2 * step
    else:
        while value(low) <= 0:
            if low <= least:
                raise NoCrossing(False, least)
            low, high, step = max(least, low - step), low, 2 * step
    if value(high) == 0:
        root = high
    else:
        root = optimize.brentq(value, low, high, xtol=max(tolerance, _TINY), rtol=max(relative, _FINEST))
    # The root is right to the tolerance and may lie on either side of the crossing.
    width = tolerance + relative * abs(root)
    while value(root) > 0:
        low, root = root, min(high, root + width)
    high = root
    while (root := max(low, root - width)) > low and value(root) <= 0:
        high = root
    return max(low, root), high
