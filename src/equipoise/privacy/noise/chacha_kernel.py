"""Normal numbers of a device's stream by one kernel: ChaCha20, twice, and Box and Muller's transform.

What `chacha20` and `polynomials` do in hundreds of operations on tensors happens in registers here, with the
same bits. Written in Triton, which comes with PyTorch for CUDA.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import struct
from types import FunctionType

import torch
import triton
import triton.language as tl
from torch import Tensor

from equipoise.privacy.noise import polynomials
from equipoise.privacy.noise.chacha20 import BLOCK_WORDS

_ROWS = 128  # blocks of each cipher in a program: one for each of its threads; it moves time and no bit

# Triton looks names up in a function's globals, and its interpreter looks for `tl` there.
_log_of, _root, _sine, _cosine = (
    triton.jit(FunctionType(function.__code__, globals()))
    for function in (polynomials.log_of, polynomials.root, polynomials.sine, polynomials.cosine)
)


@triton.jit
def _quarter_round(a, b, c, d):
    a += b
    d ^= a
    d = (d << 16) | (d >> 16)
    c += d
    b ^= c
    b = (b << 12) | (b >> 20)
    a += b
    d ^= a
    d = (d << 8) | (d >> 24)
    c += d
    b ^= c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@triton.jit
def _like(word, zero):
    return zero + word.to(tl.uint32)


@triton.jit
def _two(x, y, at, BIT: tl.constexpr, WHOLE: tl.constexpr):
    """Both side by side, or the one that this bit of the place asks for."""
    if WHOLE:
        return tl.join(x, y)
    else:
        return tl.where((at & BIT) != 0, y, x)


@triton.jit
def _words(at, k0, k1, k2, k3, k4, k5, k6, k7, WHOLE: tl.constexpr):
    """The key stream's words at these places; with `WHOLE` those of the blocks that begin there, [n, 16]."""
    low, high = (at >> 4).to(tl.uint32), (at >> 36).to(tl.uint32)
    zero = low * 0
    k0, k1, k2, k3 = _like(k0, zero), _like(k1, zero), _like(k2, zero), _like(k3, zero)
    k4, k5, k6, k7 = _like(k4, zero), _like(k5, zero), _like(k6, zero), _like(k7, zero)
    a0, a1, a2, a3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    b0, b1, b2, b3, c0, c1, c2, c3 = k0, k1, k2, k3, k4, k5, k6, k7
    d0, d1, d2, d3 = low, high, zero, zero
    for _ in range(10):
        a0, b0, c0, d0 = _quarter_round(a0, b0, c0, d0)
        a1, b1, c1, d1 = _quarter_round(a1, b1, c1, d1)
        a2, b2, c2, d2 = _quarter_round(a2, b2, c2, d2)
        a3, b3, c3, d3 = _quarter_round(a3, b3, c3, d3)
        a0, b1, c2, d3 = _quarter_round(a0, b1, c2, d3)
        a1, b2, c3, d0 = _quarter_round(a1, b2, c3, d0)
        a2, b3, c0, d1 = _quarter_round(a2, b3, c0, d1)
        a3, b0, c1, d2 = _quarter_round(a3, b0, c1, d2)
    a0, a1, a2, a3 = a0 + 0x61707865, a1 + 0x3320646E, a2 + 0x79622D32, a3 + 0x6B206574
    # A tree over the bits of a word's number, the highest first.
    ac0, bd0 = _two(a0, c0 + k4, at, 8, WHOLE), _two(b0 + k0, d0 + low, at, 8, WHOLE)
    ac1, bd1 = _two(a1, c1 + k5, at, 8, WHOLE), _two(b1 + k1, d1 + high, at, 8, WHOLE)
    ac2, bd2 = _two(a2, c2 + k6, at, 8, WHOLE), _two(b2 + k2, d2, at, 8, WHOLE)
    ac3, bd3 = _two(a3, c3 + k7, at, 8, WHOLE), _two(b3 + k3, d3, at, 8, WHOLE)
    of0, of1 = _two(ac0, bd0, at, 4, WHOLE), _two(ac1, bd1, at, 4, WHOLE)
    of2, of3 = _two(ac2, bd2, at, 4, WHOLE), _two(ac3, bd3, at, 4, WHOLE)
    words = _two(_two(of0, of2, at, 2, WHOLE), _two(of1, of3, at, 2, WHOLE), at, 1, WHOLE)
    if WHOLE:
        words = tl.reshape(words, (at.shape[0], 16))
    return words.to(tl.int32, bitcast=True)


# A key's words must not be specialised: what is compiled would follow from them.
@triton.jit(do_not_specialize=[*range(1, 21)])
def _normals(
    out, std, first, low_first, half, k0, k1, k2, k3, k4, k5, k6, k7, l0, l1, l2, l3, l4, l5, l6, l7,
    ROWS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1).to(tl.int64)
    if WHOLE:
        at = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)) * 16
        pair = at[:, None] + tl.arange(0, 16)[None, :]
    else:
        at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        pair = at
    begin = block * half * 2
    radius = _words(first + begin + at, k0, k1, k2, k3, k4, k5, k6, k7, WHOLE)
    angle = _words(first + begin + half + at, k0, k1, k2, k3, k4, k5, k6, k7, WHOLE)
    low = _words(low_first + block * half + at, l0, l1, l2, l3, l4, l5, l6, l7, WHOLE)
    # As `polynomials.box_muller`.
    u = tl.abs(radius.to(tl.float32) * 2.0**-31 + low.to(tl.float32) * 2.0**-63) + 2.0**-65
    bits = u.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    f = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    square = _log_of(f, exponent.to(tl.float32)) * -2.0
    inverse = (0x5F3759DF - (square.to(tl.int32, bitcast=True) >> 1)).to(tl.float32, bitcast=True)
    length = _root(square, inverse) * std
    quarter = (angle + 0x20000000) >> 30
    rest = angle - (quarter << 30)
    t = rest.to(tl.float32) * 2.0**-29
    lost = (rest - rest.to(tl.float32).to(tl.int32)).to(tl.float32) * 2.0**-29
    s, c = _sine(t, lost), _cosine(t)
    odd = (quarter & 1) != 0
    x, y = tl.where(odd, s, c), tl.where(odd, c, s)
    x = tl.where(((quarter + 1) & 2) != 0, -x, x)
    y = tl.where((quarter & 2) != 0, -y, y)
    tl.store(out + begin + pair, x * length, mask=pair < half)
    tl.store(out + begin + half + pair, y * length, mask=pair < half)


def write_normals(out: Tensor, place: int, keys: tuple[bytes, bytes], std: float) -> None:
    """Normal numbers of standard deviation `std`.

    Args:
        out: takes them, float32 [blocks, an even number]; numbers i and i + half of a block are a pair.
        place: the first number's, in bytes of the stream.
        keys: of the ciphers for the words of the stream, and for the lower half of each radius.
        std: finite.
    """
    half, first, low_first = out.shape[1] // 2, place // 4, place // 8
    # If no pair's words begin inside a block of a cipher, each block is computed once, and otherwise for each
    # of its words: that is in the last block of a stream, and behind an odd draw.
    whole = first % BLOCK_WORDS == low_first % BLOCK_WORDS == half % BLOCK_WORDS == 0
    grid = (triton.cdiv(half, _ROWS * BLOCK_WORDS if whole else _ROWS), len(out))
    words = [word for key in keys for word in struct.unpack("<8i", key)]
    with torch.cuda.device_of(out):
        _normals[grid](
            out, std, first, low_first, half, *words, ROWS=_ROWS, WHOLE=whole, enable_fp_fusion=False
        )
