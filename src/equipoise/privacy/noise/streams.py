"""Normal noise from a keyed stream of random bits.

On the CPU the bits are AES-256 in counter mode under a key of their own. As far as AES holds, no observer of
any number of outputs can tell them from random bits or predict others. Box and Muller's transform makes
normals of pairs of them:

    sqrt(-2 log u) cos(2 pi v),  sqrt(-2 log u) sin(2 pi v)

with u in (0, 1] and v in [-1/2, 1/2) from 32 bits each (64 for float64). With 32 bits the largest value is
6.76 standard deviations, beyond which a normal goes once in 7 * 10^10. A torch generator's twister is not a
cryptographic generator and takes longer. Other devices use torch's own generator there (Philox), seeded with
63 bits of the key.

What no such stream mends: a floating-point sum of data and noise has holes that a patient observer of exact
bits could use (Mironov 2012).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

from equipoise._dtensor import is_dtensor, local_part, range_of, with_part
from equipoise.privacy.private import unwrap

__all__ = ["NOISE", "NormalStream", "ReleaseStreams", "add_normals", "carries", "normals", "released_type"]

Stream = TypeVar("Stream")

#: The purpose of the stream that most mechanisms take their noise from.
NOISE = "noise"


_CHUNK = 1 << 18  # numbers made at once: large enough for several threads, small enough for the cache
_ROOM = 16  # bytes: the cipher asks for room for one more block than it writes


def carries(dtype: torch.dtype, std: float) -> bool:
    """Whether normal numbers of this standard deviation are as good in `dtype` as others.

    Too small, they reach the denormals before they are small compared with `std`, and devices that flush
    these make zeros of them. Too large, their tail is infinite.

    Example:
        >>> carries(torch.float32, 1e-30), carries(torch.float32, 1e-40), carries(torch.float64, 1e-40)
        (True, False, True)
    """
    range_of = torch.finfo(dtype)
    return range_of.tiny * 2.0**24 <= std <= range_of.max / 16


class NormalStream:
    """A stream of normal numbers.

    Args:
        key: 32 bytes, used only for this stream.
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
            # The counter starts at zero: safe, since a key serves one stream.
            self._key, self._bytes, self._cipher = key, 0, _cipher_at(key, 0)
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

    def draw_ranges(
        self,
        count: int,
        std: float,
        ranges: Sequence[tuple[int, int]],
        dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        """Some of the numbers that `draw(count, std, dtype)` gives, bit for bit, without making the others.

        Several processes that hold a part of a sum each so draw the noise of one. The stream moves on as if
        all had been drawn.

        Args:
            count: how many there are in all.
            std: their standard deviation.
            ranges: [start, stop) of those that are wanted; they are returned one after another.
            dtype: of all numbers.

        Raises:
            NotImplementedError: on another device than the CPU, whose generator cannot begin anywhere.

        Example:
            >>> whole = NormalStream(bytes(32)).draw(9, 1.0)
            >>> parts = NormalStream(bytes(32)).draw_ranges(9, 1.0, [(7, 9), (1, 4)])
            >>> torch.equal(parts, torch.cat([whole[7:9], whole[1:4]]))
            True
        """
        if self._device.type != "cpu":
            raise NotImplementedError(
                f"the generator of {self._device} cannot begin in the middle of its stream: draw ranges on "
                "the CPU"
            )
        if std == 0:
            return torch.zeros(sum(stop - start for start, stop in ranges), dtype=dtype)
        even = count + count % 2
        parts = []
        for start, stop in ranges:
            for block in range(start // _CHUNK * _CHUNK, stop, _CHUNK):
                half = min(_CHUNK, even - block) // 2
                # Number i of a block pairs with number i + half.
                for low, first in ((block, True), (block + half, False)):
                    begin, end = max(start, low), min(stop, low + half)
                    if begin < end:
                        parts.append(self._pairs(block, half, begin - low, end - low, std, dtype, first))
        self._move_on(even * dtype.itemsize)
        return torch.cat(parts) if parts else torch.empty(0, dtype=dtype)

    def _pairs(
        self, block: int, half: int, begin: int, end: int, std: float, dtype: torch.dtype, first: bool
    ) -> torch.Tensor:
        """The first or the second numbers of the pairs [begin, end) of a block."""
        size = end - begin
        bits = torch.empty(2 * size + _ROOM // dtype.itemsize, dtype=dtype)
        memory = bits.view(torch.uint8).numpy().data
        for place, number in ((0, block + begin), (size, block + half + begin)):
            cipher = _cipher_at(self._key, self._bytes + number * dtype.itemsize)
            low, length = place * dtype.itemsize, size * dtype.itemsize
            cipher.update_into(bytes(length), memory[low : low + length + _ROOM])
        _transform(bits[: 2 * size], std, torch.empty(size, dtype=dtype))
        return bits[:size] if first else bits[size : 2 * size]

    def _move_on(self, size: int) -> None:
        """Pass over as many bytes of the stream."""
        self._bytes += size
        self._cipher = _cipher_at(self._key, self._bytes)

    def _draw_here(self, count: int, std: float, dtype: torch.dtype) -> torch.Tensor:
        """Bits are written where the numbers will be: a chunk goes through the cache once."""
        even = count + count % 2
        self._bytes += even * dtype.itemsize
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


def _cipher_at(key: bytes, place: int) -> CipherContext:
    """AES-256 in counter mode from this byte of its stream on."""
    block, within = divmod(place, 16)
    cipher = Cipher(algorithms.AES(key), modes.CTR(block.to_bytes(16, "big"))).encryptor()
    cipher.update(bytes(within))
    return cipher


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


class ReleaseStreams:
    """The streams of one release. Each begins once; whatever asks again goes on where the last one stopped.

    So two tensors, or two sums, of one release never share a number, in whatever order a mechanism asks.

    Args:
        key_of: from a stream's purpose and its device ("" for the CPU) to its 32 secret bytes.
    """

    def __init__(self, key_of: Callable[[str, str], bytes]) -> None:
        self.key_of = key_of
        self._begun: dict[tuple[str, str], Any] = {}

    @staticmethod
    def under(key: bytes) -> ReleaseStreams:
        """Streams that follow from 32 secret bytes: those of an earlier release, whose noise is had again."""

        def key_of(purpose: str, device: str) -> bytes:
            return hashlib.shake_256(b"equipoise stream" + key + f"{purpose} {device}".encode()).digest(32)

        return ReleaseStreams(key_of)

    def key(self, purpose: str) -> bytes:
        """32 secret bytes of this release and purpose."""
        return self.key_of(purpose, "")

    def get(self, purpose: str, make: Callable[[bytes], Stream], device: str = "") -> Stream:
        """The stream of this purpose and device, made from its key when it is asked for first."""
        if (purpose, device) not in self._begun:
            self._begun[purpose, device] = make(self.key_of(purpose, device))
        stream: Stream = self._begun[purpose, device]
        return stream

    def normal(self, device: torch.device, purpose: str = NOISE) -> NormalStream:
        """The stream of normal numbers on this device; two devices have two streams."""
        place = "" if device.type == "cpu" else str(device)
        return self.get(purpose, lambda key: NormalStream(key, device), place)


def released_type(tensor: torch.Tensor) -> torch.dtype:
    """The type that a tensor is released in: float32 at least."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def normals(
    streams: ReleaseStreams, like: Mapping[str, torch.Tensor], std: float, purpose: str = NOISE
) -> dict[str, torch.Tensor]:
    """Independent normal numbers in the shapes of the named tensors, raw or `Private`.

    All tensors of one device and type get one piece of the stream, in the order of `like`. Of tensors that
    several processes hold, each makes its own part; joined, they are what one process makes.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for name, tensor in like.items():
        if hasattr(tensor, "_local_tensor"):  # a DTensor
            return _normals_of_parts(streams, like, std, purpose)
        kinds.setdefault((tensor.device, released_type(tensor)), []).append(name)
    out = {}
    for (device, dtype), names in kinds.items():
        sizes = [like[name].numel() for name in names]
        flat = streams.normal(device, purpose).draw(sum(sizes), std, dtype)
        for name, piece in zip(names, torch.split(flat, sizes), strict=True):
            out[name] = piece.view(like[name].shape)
    return out


def _normals_of_parts(
    streams: ReleaseStreams, like: Mapping[str, torch.Tensor], std: float, purpose: str
) -> dict[str, torch.Tensor]:
    """As `normals` on the CPU, for this process' parts of tensors."""
    kinds: dict[torch.dtype, list[str]] = {}
    for name, tensor in like.items():
        kinds.setdefault(released_type(tensor), []).append(name)
    out = {}
    for dtype, names in kinds.items():
        ranges, parts, start = [], [], 0
        for name in names:
            tensor = unwrap(like[name])
            begin, end = range_of(tensor) if is_dtensor(tensor) else (0, tensor.numel())
            ranges.append((start + begin, start + end))
            parts.append((name, tensor, end - begin))
            start += tensor.numel()
        flat = streams.normal(torch.device("cpu"), purpose).draw_ranges(start, std, ranges, dtype)
        for (name, tensor, _), piece in zip(parts, torch.split(flat, [n for *_, n in parts]), strict=True):
            local = local_part(tensor)
            out[name] = with_part(piece.view(local.shape).to(local.device), tensor)
    return out


def add_normals(
    streams: ReleaseStreams, value: Mapping[str, torch.Tensor], std: float, purpose: str = NOISE
) -> dict[str, torch.Tensor]:
    """The named tensors, raw or `Private`, with independent normal noise of this standard deviation."""
    # Sorted: which numbers a tensor gets must not follow from the order in which a method names them.
    raws = {name: unwrap(value[name]) for name in sorted(value)}
    noise = normals(streams, raws, std, purpose)
    # The noise's memory becomes the result: a sum may be as large as the model.
    return {name: noise[name].add_(raws[name]) for name in value}
