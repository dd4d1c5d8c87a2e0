"""What the end of the noise's tail adds to delta.

A normal number of the library ends at a radius of r = sqrt(130 ln 2) = 9.49 standard deviations, since
its radius is made of 64 random bits (`noise.streams`). An output that the noise reaches with a record
and not without it gives that record away, whatever epsilon. The noise of a release comes in pairs,
uniform in angle, of radius at most r. If a record moves the sum by D standard deviations in all and pair
j by s_j, the pair leaves the disc that the other data set reaches with probability

    f(s_j) = P(|n| <= r, |n + s_j| > r),    sum of s_j^2 = D^2.

One pair that takes all of D has f(D) <= Q(D) = P(|n + D| > r). Of the others each has s_j <= D /
sqrt(2), and f(s) <= g(s) = exp(-(r - s)^2 / 2) - exp(-r^2 / 2). Since g'' grows up to s = r - sqrt(3),
g(s) <= g'(0) s + (s / s_0)^2 g(s_0) for s <= s_0, and the sum of s_j is at most D sqrt(m) for m pairs.
So a release that a record takes part in adds at most

    h(D) = Q(D) + 2 g(D / sqrt(2)) + g'(0) D sqrt(m),

and a run the sum of h over its releases times the probability that a record takes part. On what both data
sets reach, densities are those of normals over the probability of the discs, once per release, which scales
delta. So if exact normals make a run (epsilon, delta)-DP, ours make it (epsilon, delta + beta)-DP, with beta
that sum and what the scaling adds.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from scipy import special

END = math.sqrt(130 * math.log(2))
"""The largest radius of a pair of normal numbers, in standard deviations: P(|n| > END) = 2^-65.

It follows from the bits of a radius in `noise.streams`. Above what noise reaches, delta would be too small.
"""

PAIRS = 2.0**30
"""Of noise in one release (over b steps: in b of them), at most: two billion released numbers.

A choice that nothing checks: of a release of more numbers the tail's part of delta may be too small, by their
ratio at most.
"""

WITHIN = PAIRS * 2.0**-65
"""A bound of the probability that some pair of a release would be beyond the end, were it an exact normal."""


@functools.lru_cache(maxsize=4096)
def leaves(move: float) -> float:
    """h(D), a bound of the probability that a release shows what only one of two data sets can give.

    Args:
        move: D, the distance of the two sums in standard deviations of the noise.

    Example:
        >>> leaves(1.0) < 1e-14, 1e-6 < leaves(5.0) < 1e-5, leaves(20.0)
        (True, True, 1.0)
    """
    spread = move / math.sqrt(2)
    if spread > END - math.sqrt(3):
        return 1.0
    # Of n = (x, y) the part y across the move is integrated over, by the trapezoidal rule.
    across = np.linspace(-END, END, 4001)
    half = np.sqrt(END**2 - across**2)
    beyond = special.ndtr(move - half) + special.ndtr(-move - half)
    density = np.exp(-(across**2) / 2) / math.sqrt(2 * math.pi)
    # 1.001: the rule is exact to a few digits, and this is a bound.
    all_in_one = 1.001 * float(np.trapezoid(density * beyond, across)) + 2 * float(special.ndtr(-END))
    others = 2 * (math.exp(-((END - spread) ** 2) / 2) - math.exp(-(END**2) / 2))
    each = END * math.exp(-(END**2) / 2) * move * math.sqrt(PAIRS)
    return min(1.0, all_in_one + others + each)
