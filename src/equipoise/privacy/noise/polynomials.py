"""Logarithm, root, sine and cosine for the normal numbers of devices, with the same bits wherever they run.

A library's functions, its root among them, differ between devices and versions. These are additions and
multiplications of float32 that are rounded one by one, never fused, and the kernel is compiled from the same
lines. The coefficients have the least largest error over their range. In all, a result is within 2 units in
the last place of the true value.
"""

# Triton compiles what has no types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
from torch import Tensor


def log_of(f, exponent):
    """log((1 + f) 2^exponent) for f in [sqrt(1/2) - 1, sqrt(2) - 1) and whole exponents down to -65."""
    square = f * f
    tail = 0.11888162046670914 - f * (0.11675652116537094 - f * 0.06746640056371689)
    tail = 0.14219552278518677 - f * (0.1240558922290802 - f * tail)
    tail = 0.2000211924314499 - f * (0.1666799634695053 - f * tail)
    tail = 0.3333331346511841 - f * (0.25000008940696716 - f * tail)
    # log(2) in two parts, of which the first has 9 bits: its product with an exponent is exact.
    small = f * square * tail - exponent * 2.12194440e-4 - square * 0.5
    return f + small + exponent * 0.693359375


def root(x, inverse):
    """The root of `x`, at least 0, from its inverse to 4%: Newton's steps, the last for the root itself."""
    inverse = inverse * (1.5 - x * 0.5 * inverse * inverse)
    inverse = inverse * (1.5 - x * 0.5 * inverse * inverse)
    found = x * inverse
    return found + inverse * 0.5 * (x - found * found)


def sine(t, lost):
    """sin(pi (t + lost) / 4) for t in [-1, 1], of which rounding lost a part."""
    z = t * t
    tail = z * (0.08074543625116348 - z * (0.00249000103212893 - z * 3.59504520019982e-05))
    # The last of the numbers is what pi / 4 has beyond its float32, and 3 / 4 is the cosine closely enough.
    return t * 0.7853981852531433 - (t * (tail + 2.1855695031547384e-08) - lost * 0.75)


def cosine(t):
    """cos(pi t / 4) for t in [-1, 1]."""
    z = t * t
    return 1.0 - z * (
        0.3084251284599304
        - z * (0.015854327008128166 - z * (0.0003259400837123394 - z * 3.530338062773808e-06))
    )


def box_muller(radius: Tensor, low: Tensor, angle: Tensor, std: float) -> tuple[Tensor, Tensor]:
    """Two normal numbers of standard deviation `std` of each three words, int32, as `streams` says."""
    u = (radius.float() * 2.0**-31 + low.float() * 2.0**-63).abs() + 2.0**-65
    bits = u.view(torch.int32)
    exponent = (bits - 0x3F3504F3) >> 23  # 0x3F3504F3 is sqrt(1/2)
    f = (bits - (exponent << 23)).view(torch.float32) - 1.0
    square = log_of(f, exponent.float()) * -2.0
    # Half the exponent, with the opposite sign: the first guess of an inverse root.
    length = root(square, (0x5F3759DF - (square.view(torch.int32) >> 1)).view(torch.float32)) * std
    # The angle is 2 pi angle / 2^32: a number of quarters, and the rest from the middle of one.
    quarter = (angle + 2**29) >> 30
    rest = angle - (quarter << 30)
    t, lost = rest.float() * 2.0**-29, (rest - rest.float().int()).float() * 2.0**-29
    s, c = sine(t, lost), cosine(t)
    odd = (quarter & 1) != 0
    x, y = torch.where(odd, s, c), torch.where(odd, c, s)
    x = torch.where(((quarter + 1) & 2) != 0, -x, x)
    y = torch.where((quarter & 2) != 0, -y, y)
    return x * length, y * length
