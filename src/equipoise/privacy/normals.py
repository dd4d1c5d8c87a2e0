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

__all__ = ["NormalStream"]

_CHUNK = 1 << 18  # numbers made at once: large enough for several threads, small enough for the cache


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
            std: at least 0; 0 gives zeros.
            dtype: torch.float32 or torch.float64.
        """
        out = torch.empty(count, dtype=dtype, device=self._device)
        if std == 0:
            return out.zero_()
        if self._device.type != "cpu":
            return out.normal_(0.0, std, generator=self._generator)
        for start in range(0, count, _CHUNK):
            self._fill(out[start : start + _CHUNK], std)
        return out

    def _fill(self, out: torch.Tensor, std: float) -> None:
        half = (len(out) + 1) // 2
        single = out.dtype == torch.float32
        integer, scale = (torch.int32, 2.0**-31) if single else (torch.int64, 2.0**-63)
        size = 2 * half * (4 if single else 8)
        buffer = bytearray(size + 16)  # the cipher asks for room for one more block
        self._cipher.update_into(bytes(size), buffer)
        bits = torch.frombuffer(buffer, dtype=integer, count=2 * half)
        # |a| / 2^31 keeps all bits where u is small, and with it the tail; half a unit keeps log(u) finite.
        radius = bits[:half].to(out.dtype).mul_(scale).abs_().add_(scale / 4)
        radius.log_().mul_(-2.0 * std * std).clamp_(min=0.0).sqrt_()
        angle = bits[half:].to(out.dtype).mul_(math.pi * scale)
        torch.mul(angle.cos(), radius, out=out[:half])
        rest = len(out) - half
        torch.mul(angle.sin_()[:rest], radius[:rest], out=out[half:])
