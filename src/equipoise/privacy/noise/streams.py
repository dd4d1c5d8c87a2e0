"""Normal noise from a keyed stream of random bits.

The bits are AES-256 in counter mode on the CPU, and ChaCha20 on other devices, where AES would need look-ups
in tables. As far as these ciphers hold, no observer of any number of outputs can tell them from random bits
or predict others. Box and Muller's transform makes normals of pairs of them:

    sqrt(-2 log u) cos(2 pi v),  sqrt(-2 log u) sin(2 pi v)

with u in (0, 1] from 64 bits, and v in [-1/2, 1/2) from 32 (64 for float64). The largest radius is 9.49
standard deviations, beyond which a pair of normals goes once in 4 * 10^19; what that adds to delta is in
`accounting/noise_tail.py`. With 32 bits it would be 6.76. A torch generator is no cipher: the CPU's is a
twister, which also takes longer, and a GPU's is Philox with 63 bits of seed.

On CUDA devices one kernel does all this for float32 if Triton is there; on other devices, and for float64,
operations on tensors do. Functions of float32 are those of `polynomials` on all devices but the CPU, so that
both ways make the same bits.

What no such stream mends: a floating-point sum of data and noise has holes that a patient observer of exact
bits could use (Mironov 2012).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray
from torch import Tensor

from equipoise._dtensor import ranges_of, with_part
from equipoise.privacy.noise.chacha20 import BLOCK_WORDS, key_stream
from equipoise.privacy.noise.polynomials import box_muller
from equipoise.privacy.private import add_exact, exact_values

Ranges = Sequence[tuple[int, int]] | Tensor
"""[start, stop) after [start, stop)."""

Stream = TypeVar("Stream")
_WriteNormals = Callable[[Tensor, int, tuple[bytes, bytes], float], None]

#: The purpose of the stream that most mechanisms take their noise from.
NOISE = "noise"


# Numbers whose pairs lie among them: enough for several threads, and small enough for the cache. The bits of
# the noise follow from it: with another, a run that goes on would not get the noise that it had.
_BLOCK = 1 << 18
_ROOM = 16  # bytes: the cipher asks for room for one more block than it writes
_ZEROS = memoryview(bytes(_BLOCK * 8))  # what the cipher encrypts to give its key stream


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
    """A stream of normal numbers. It has one place, whatever devices make its numbers.

    Args:
        key: 32 bytes, used only for this stream.

    Example:
        >>> a, b = NormalStream(bytes(32)), NormalStream(bytes(32))
        >>> bool((a.draw(5, 1.0) == b.draw(5, 1.0)).all())
        True
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != 32:
            raise ValueError(f"key has {len(key)} bytes; a stream takes 32")
        self._key = key
        self._bytes = 0  # of the stream, passed

    def draw(
        self,
        count: int,
        std: float,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """The next `count` independent normal numbers of mean 0 and standard deviation `std`.

        Args:
            count: how many; the stream moves on by an even number.
            std: at least 0; 0 gives zeros. `carries` tells which others the type can hold.
            dtype: torch.float32 or torch.float64.
            device: where they are made.
        """
        return self.draw_ranges(count, std, [(0, count)], dtype, device)

    def draw_ranges(
        self,
        count: int,
        std: float,
        ranges: Ranges,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Some of the numbers that `draw(count, std, dtype, device)` gives, bit for bit.

        Several processes that hold a part of a sum each so draw the noise of one. Only blocks in which some
        are wanted are made. The stream moves on as if all had been drawn.

        Args:
            count: how many there are in all.
            std: their standard deviation.
            ranges: [start, stop) of those that are wanted; they are returned one after another.
            dtype: of all numbers.
            device: where they are made.

        Example:
            >>> whole = NormalStream(bytes(32)).draw(9, 1.0)
            >>> parts = NormalStream(bytes(32)).draw_ranges(9, 1.0, [(7, 9), (1, 4)])
            >>> torch.equal(parts, torch.cat([whole[7:9], whole[1:4]]))
            True
        """
        (drawn,) = self.draw_on(count, std, {torch.device(device): ranges}, dtype).values()
        return drawn

    def draw_on(
        self,
        count: int,
        std: float,
        ranges: Mapping[torch.device, Ranges],
        dtype: torch.dtype,
    ) -> dict[torch.device, Tensor]:
        """As `draw_ranges`, where each device makes ranges of its own."""
        out = {device: self._ranges(count, std, wanted, dtype, device) for device, wanted in ranges.items()}
        if std != 0:
            self._bytes += (count + count % 2) * dtype.itemsize
        return out

    def _ranges(
        self,
        count: int,
        std: float,
        ranges: Ranges,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        kind = partial(_Aes) if device.type == "cpu" else partial(_ChaCha, device=device)
        cipher, lower = kind(self._key), kind(hashlib.sha256(b"equipoise radius" + self._key).digest())
        pairs, room = _joined(ranges), _ROOM // dtype.itemsize
        size = int((pairs[:, 1] - pairs[:, 0]).sum())
        # One more for the last number of an odd count.
        out = torch.empty(size + 1 + room, dtype=dtype, device=device)
        if std == 0:
            return out.zero_()[:size]
        even, at, place = count + count % 2, 0, 0
        # The numbers in `values`: one range took a part of them, and the next may take another.
        held, values = range(0), out
        while place < len(pairs):
            start, stop = pairs[place].tolist()
            while start < stop:
                if start not in held:
                    span = _span(start, stop, even, cipher.blocks_at_once)
                    if span.start == start and min(span.stop, count) <= stop:
                        # All of it is wanted, so it is made where it belongs. What is written beyond its end
                        # is written over by what follows.
                        self._fill(cipher, lower, out[at:], span, std)
                        taken = min(span.stop, count) - start
                        at, start = at + taken, start + taken
                        continue
                    held, values = span, torch.empty(len(span) + room, dtype=dtype, device=device)
                    self._fill(cipher, lower, values, span, std)
                end = min(stop, held.stop)
                out[at : at + end - start] = values[start - held.start : end - held.start]
                at, start = at + end - start, end
            place += 1
            # Those that follow in `values`, all at once: of a matrix cut by columns each row is a range.
            number = _alike(pairs[place : place + len(held)], held)
            if number > 1:
                (start, stop), (following, _) = pairs[place : place + 2].tolist()
                shape = (number, stop - start)
                rows = values.as_strided(shape, (following - start, 1), start - held.start)
                out[at : at + rows.numel()].view(shape).copy_(rows)
                at, place = at + rows.numel(), place + number
        return out[:size]

    def _fill(
        self, cipher: _Aes | _ChaCha, lower: _Aes | _ChaCha, memory: Tensor, span: range, std: float
    ) -> None:
        """Make these numbers of the stream at the beginning of the memory, which is longer by `_ROOM`."""
        place = self._bytes + span.start * memory.element_size()
        write = _kernel(memory.device)[0] if memory.dtype == torch.float32 else None
        if write is None:
            _write(cipher, lower, memory, len(span), place, std)
        else:
            write(memory[: len(span)].view(-1, min(_BLOCK, len(span))), place, (cipher.key, lower.key), std)


def _write(
    cipher: _Aes | _ChaCha, lower: _Aes | _ChaCha, memory: Tensor, count: int, place: int, std: float
) -> None:
    """Make so many numbers from this byte of the stream on, at the beginning of the memory."""
    cipher.write(memory, count, place)
    blocks, low = memory[:count].view(-1, min(_BLOCK, count)), None
    if memory.dtype == torch.float32:  # the lower 32 bits of each radius, one for two numbers
        low = torch.empty(count // 2 + _ROOM // 4, dtype=memory.dtype, device=memory.device)
        lower.write(low, count // 2, place // 2)
        low = low[: count // 2].view(len(blocks), -1)
    if low is None or not isinstance(cipher, _ChaCha):
        _transform(blocks, low, std)
    else:
        radius, angle = blocks.view(torch.int32).chunk(2, dim=-1)
        torch.cat(box_muller(radius, low.view(torch.int32), angle, std), dim=-1, out=blocks)


def way_of_noise(device: torch.device) -> str:
    """How a device other than the CPU makes float32 noise, in words: "" for the CPU."""
    return "" if device.type == "cpu" else _kernel(device)[1]


@cache
def _kernel(device: torch.device) -> tuple[_WriteNormals | None, str]:
    """What makes float32 noise on a device at once, None if nothing does, and the words for it."""
    if device.type != "cuda":
        return None, f"tensor operations, since there is no kernel for {device.type}"
    try:
        from equipoise.privacy.noise.chacha_kernel import write_normals

        if _makes_the_same(write_normals, device):
            return write_normals, "one kernel (Triton)"
        return None, "tensor operations, since the kernel's numbers differ from theirs"
    except Exception as error:  # no Triton, or no C compiler, which it needs: a training goes without
        return None, f"tensor operations, since Triton cannot be used: {error}"


def _makes_the_same(write_normals: _WriteNormals, device: torch.device) -> bool:
    """Whether it makes the numbers of tensor operations: another compiler could join roundings."""
    cipher, lower = _ChaCha(bytes(32), device), _ChaCha(b"r" * 32, device)
    for count, place in ((1024, 0), (1000, 24)):  # whole blocks of the cipher, and parts
        got, expected = torch.empty(2, 1, count + _ROOM, device=device)
        write_normals(got[:, :count], place, (cipher.key, lower.key), 1.5)
        _write(cipher, lower, expected[0], count, place, 1.5)
        if not torch.equal(got[:, :count], expected[:, :count]):
            return False
    return True


def _span(start: int, stop: int, even: int, at_once: int) -> range:
    """The numbers to make together for those from `start` on: whole blocks, or the last, shorter one."""
    first, whole = start // _BLOCK * _BLOCK, even // _BLOCK * _BLOCK
    if first == whole:
        return range(first, even)
    return range(first, min(first + at_once * _BLOCK, -(-stop // _BLOCK) * _BLOCK, whole))


def _joined(ranges: Ranges) -> NDArray[np.int64]:
    """The same ranges, [n, 2], those that follow each other as one: a whole draw is one range."""
    pairs = np.asarray(ranges, np.int64).reshape(-1, 2)
    if len(pairs) == 1:
        return pairs
    begins = np.ones(len(pairs) + 1, np.bool_)
    begins[1:-1] = pairs[1:, 0] != pairs[:-1, 1]
    return np.stack([pairs[begins[:-1], 0], pairs[begins[1:], 1]], axis=1)


def _alike(pairs: NDArray[np.int64], held: range) -> int:
    """How many of these ranges, [n, 2], lie in `held`, are equally long and follow at equal distances."""
    if len(pairs) < 2:
        return 0
    starts, stops = pairs.T
    lengths, steps = stops - starts, np.diff(starts)
    inside = (starts >= held.start) & (stops <= held.stop) & (lengths == lengths[0])
    inside[1:] &= (steps == steps[0]) & (steps[0] >= 0)
    return int(np.logical_and.accumulate(inside).sum())


class _Aes:
    """AES-256 in counter mode, on the CPU; its counter starts at zero, since a key serves one stream."""

    blocks_at_once = 1  # goes through the cache once

    def __init__(self, key: bytes) -> None:
        self.key = key

    def write(self, memory: Tensor, count: int, place: int) -> None:
        """Random bits for `count` numbers at the memory's beginning, from this byte of the stream on."""
        block, within = divmod(place, 16)
        cipher = Cipher(algorithms.AES(self.key), modes.CTR(block.to_bytes(16, "big"))).encryptor()
        cipher.update(_ZEROS[:within])
        size = count * memory.element_size()
        cipher.update_into(_ZEROS[:size], memory.view(torch.uint8).numpy().data[: size + _ROOM])


class _ChaCha:
    """ChaCha20, in operations on tensors."""

    blocks_at_once = 64  # some hundred operations each, so that starting them takes little of the time

    def __init__(self, key: bytes, device: torch.device) -> None:
        # A key of its own: no two ciphers ever have the same one.
        self.key = hashlib.sha256(b"equipoise ChaCha20" + key).digest()
        self._device = device

    def write(self, memory: Tensor, count: int, place: int) -> None:
        """Random bits for `count` numbers at the memory's beginning, from this byte of the stream on."""
        first, words = place // 4, count * memory.element_size() // 4
        block, skipped = divmod(first, BLOCK_WORDS)
        stream = key_stream(self.key, block, -(-(skipped + words) // BLOCK_WORDS), self._device)
        memory[:count].view(torch.int32).copy_(stream[skipped : skipped + words])


def _transform(blocks: Tensor, low: Tensor | None, std: float) -> None:
    """Box and Muller's transform in place, [blocks, an even number]: random bits become normal numbers.

    Numbers i and i + half of a block are a pair. `low`, [blocks, half], are further bits of the radius.
    """
    integer, scale = (torch.int32, 2.0**-31) if blocks.dtype == torch.float32 else (torch.int64, 2.0**-63)
    blocks.copy_(blocks.view(integer))
    radius, angle = blocks.chunk(2, dim=-1)
    # u = |a| / 2^63 + 2^-65 of a whole number a of 64 bits with a sign: floats keep all its bits where u is
    # small, and with them the tail, and the last term keeps log(u) finite. It is rounded to at most 1, so
    # that log(u) is never above zero.
    radius.mul_(scale)
    if low is not None:
        radius.add_(low.copy_(low.view(integer)), alpha=2.0**-63)
    radius.abs_().add_(2.0**-65)
    # NumPy's functions of float32 take half the time of PyTorch's, those of float64 three times as long.
    r, a = (radius.numpy(), angle.numpy()) if low is not None else (radius, angle)
    of: Any = np if low is not None else torch
    of.log(r, out=r)
    # std comes after the root: its square would leave the range of floats long before it does.
    radius.mul_(-2.0).sqrt_().mul_(std)
    angle.mul_(math.pi * scale)
    cosine = of.cos(a)
    of.sin(a, out=a)
    angle.mul_(radius)
    radius.mul_(torch.as_tensor(cosine))


class ReleaseStreams:
    """The streams of one release. Each begins once; whatever asks again goes on where the last one stopped.

    So two tensors, or two sums, of one release never share a number, in whatever order a mechanism asks.

    Args:
        key_of: from a stream's purpose to its 32 secret bytes.
    """

    def __init__(self, key_of: Callable[[str], bytes]) -> None:
        self.key = key_of
        self._begun: dict[str, Any] = {}

    @staticmethod
    def under(key: bytes) -> ReleaseStreams:
        """Streams that follow from 32 secret bytes: those of an earlier release, whose noise is had again."""

        def key_of(purpose: str) -> bytes:
            return hashlib.shake_256(b"equipoise stream" + key + f"{purpose} ".encode()).digest(32)

        return ReleaseStreams(key_of)

    def get(self, purpose: str, make: Callable[[bytes], Stream]) -> Stream:
        """The stream of this purpose, made from its key when it is asked for first."""
        if purpose not in self._begun:
            self._begun[purpose] = make(self.key(purpose))
        stream: Stream = self._begun[purpose]
        return stream

    def normal(self, purpose: str = NOISE) -> NormalStream:
        """The stream of normal numbers."""
        return self.get(purpose, NormalStream)


def released_type(tensor: Tensor) -> torch.dtype:
    """The type that a tensor is released in: float32 at least."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def names_by_released_type(tensors: Mapping[str, Tensor]) -> dict[torch.dtype, list[str]]:
    """The names of the tensors that are released in each type."""
    found: dict[torch.dtype, list[str]] = {}
    for name, tensor in tensors.items():
        kind = torch.float64 if tensor.dtype == torch.float64 else torch.float32  # as `released_type`
        found.setdefault(kind, []).append(name)
    return found


def normals(
    streams: ReleaseStreams, like: Mapping[str, Tensor], std: float, purpose: str = NOISE
) -> dict[str, Tensor]:
    """Independent normal numbers in the shapes of the named tensors, raw or `Private`.

    All tensors of one type share one piece of the stream, in the order of `like`, wherever they lie. Of
    tensors that several processes hold, each makes its own part; joined, they are what one process makes.
    """
    raws = exact_values(like)
    out = {}
    for dtype, names in names_by_released_type(like).items():
        count, here = 0, 0
        begins: dict[torch.device, dict[str, int]] = {}  # by device, of the tensors there
        parts = {name: getattr(raws[name], "_local_tensor", raws[name]) for name in names}
        for name, part in parts.items():
            begins.setdefault(part.device, {})[name] = count
            count += raws[name].numel()
            here += part.numel()
        ranges: dict[torch.device, Ranges] = {
            device: [(0, count)]
            if len(begins) == 1 and here == count
            else torch.cat([ranges_of(raws[name]) + begin for name, begin in there.items()])
            for device, there in begins.items()
        }
        drawn = streams.normal(purpose).draw_on(count, std, ranges, dtype)
        for device, there in begins.items():
            pieces = torch.split(drawn[device], [parts[name].numel() for name in there])
            for name, piece in zip(there, pieces, strict=True):
                raw, part = raws[name], parts[name]
                out[name] = piece.view(part.shape) if part is raw else with_part(piece.view(part.shape), raw)
    return out


def add_normals(
    streams: ReleaseStreams, value: Mapping[str, Tensor], std: float, purpose: str = NOISE
) -> dict[str, Tensor]:
    """The named tensors, raw or `Private`, with independent normal noise of this standard deviation."""
    # Sorted: which numbers a tensor gets must not follow from the order in which a method names them.
    noise = normals(streams, {name: value[name] for name in sorted(value)}, std, purpose)
    # The noise's memory becomes the result: a sum may be as large as the model.
    return add_exact(noise, value)
