"""Normal noise from a keyed stream of random bits.

On the CPU the bits are AES-256 in counter mode under a key of their own, so that no observer of any number of
outputs can tell them from random bits or predict others (as far as AES holds), and Box and Muller's
transform makes normals of pairs of them:

    sqrt(-2 log u) cos(2 pi v),  sqrt(-2 log u) sin(2 pi v)

with u in (0, 1] and v in [-1/2, 1/2) from 32 bits each (64 for float64). With 32 bits the largest value is
6.76 standard deviations, beyond which a normal goes once in 7 * 10^10. A torch generator's twister is not a
cryptographic generator and takes longer. Other devices use torch's own generator there (Philox), seeded with
63 bits of the key.

What no such stream mends: a floating-point sum of data and noise has holes that a patient observer of exact
bits could use (Mironov 2012).
"""

from __future__ import annotations

import math

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

__all__ = ["NormalStream", "carries"]


_CHUNK = 1 << 18  # numbers made at once: large enough for several threads, small enough for the cache


_ROOM = 16  # bytes: the cipher asks for room for one more block than it writes


def carries(dtype: torch.dtype, std: float) -> bool:
    """Whether normal numbers of this standard deviation are as good in `dtype` as others.

    Too small, they reach the denormals before they are small beside `std`, and devices that flush these make
    zeros of them; too large, their tail is infinite.

    Example:
        >>> carries(torch.float32, 1e-30), carries(torch.float32, 1e-40), carries(torch.float64, 1e-40)
        (True, False, True)
    """
    range_of = torch.finfo(dtype)
    return range_of.tiny * 2.0**24 <= std <= range_of.max / 16


class NormalStream:
    """A stream of normal numbers.

    Args:
        key: 32 bytes, used for this stream alone.
        device: where the numbers are made.

    Example:
        >>> a, b = NormalStream(bytes(32)), NormalStream(bytes(32))
        >>> bool((a.draw(5, 1.0) == b.draw(5, 1.0)).all())
        True
    """

    def __init__(self, key: bytes, device: torch.device | str = "cpu") -> None:
        if len(key) != 32:
            raise ValueError(f"key has {len(key)} bytes; a stream takes 32")
        self._device = torch.device(device)
        if self._device.type == "cpu":
            self._cipher = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
        else:
            self._generator = torch.Generator(self._device)
            self._generator.manual_seed(int.from_bytes(key[:8], "little") & (2**63 - 1))

    def draw(self, count: int, std: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The next `count` independent normal numbers of mean 0 and standard deviation `std`.

        Args:
            count: how many; the stream moves on by an even number.
            std: at least 0; 0 gives zeros. `carries` tells which others the type can hold.
            dtype: torch.float32 or torch.float64.
        """
        if self._device.type != "cpu" or std == 0:
            out = torch.empty(count, dtype=dtype, device=self._device)
            return out.zero_() if std == 0 else out.normal_(0.0, std, generator=self._generator)
        return self._draw_here(count, std, dtype)

    def _draw_here(self, count: int, std: float, dtype: torch.dtype) -> torch.Tensor:
        """Bits are written where the numbers will be: a chunk goes through the cache once."""
        even = count + count % 2
        whole = torch.empty(even + _ROOM // dtype.itemsize, dtype=dtype)
        memory = whole.view(torch.uint8).numpy().data
        zeros = memoryview(bytes(min(even, _CHUNK) * dtype.itemsize))
        scratch = torch.empty(min(even, _CHUNK) // 2, dtype=dtype)
        for start in range(0, even, _CHUNK):
            length = min(_CHUNK, even - start)
            first, size = start * dtype.itemsize, length * dtype.itemsize
            self._cipher.update_into(zeros[:size], memory[first : first + size + _ROOM])
            _transform(whole[start : start + length], std, scratch[: length // 2])
        return whole[:count]


def _transform(out: torch.Tensor, std: float, scratch: torch.Tensor) -> None:
    """Box and Muller's transform in place: random bits in an even number of places become normal numbers."""
    integer, scale = (torch.int32, 2.0**-31) if out.dtype == torch.float32 else (torch.int64, 2.0**-63)
    out.copy_(out.view(integer))
    radius, angle = out.chunk(2)
    # |a| / 2^31 keeps all bits where u is small, and with it the tail; half a unit keeps log(u) finite. The
    # sum is rounded to at most 1, so that log(u) is never above zero.
    half_a_unit = torch.full((), scale / 4, dtype=out.dtype)
    torch.add(half_a_unit, radius.abs_(), alpha=scale, out=radius)
    # std comes after the root: its square would leave the range of floats long before it does.
    radius.log_().mul_(-2.0).sqrt_().mul_(std)
    torch.cos(angle.mul_(math.pi * scale), out=scratch)
    angle.sin_().mul_(radius)
    radius.mul_(scratch)
