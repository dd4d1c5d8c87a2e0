"""Digests of tensors: they tell whether a repeated step is the same step.

The digest of a step is taken twice (what it depends on, and what it would release), over all parameters. So
the keyed digest is Wegman and Carter's. The raw bytes go through a universal hash under a secret key. What
comes out goes, with names, types and shapes, through a keyed BLAKE2b,

    BLAKE2b_k(description, GHASH_h(bytes)).

GHASH is the polynomial hash of AES-GCM, for which processors have instructions (7 GB/s against BLAKE2b's 0.6
on the machine it was chosen on). Two different values of L bytes get one digest with probability at most L /
2^131 over the key. Without the key a digest tells nothing of the value: BLAKE2b hides GHASH's result, which
alone must not be shown.

Tensors on a GPU would have to be copied to the host first. There, each 16 KiB of their bytes b become 16
numbers, which alone are copied, where the digest is read and together with what else is read there.

    c_j = sum_i k_ij b_i,    b_i and the secret k_ij from -128 to 127.

If two runs of bytes differ, in some b_i, each c_j agrees for one value of k_ij at most: all 16 agree with
probability at most 2^-128 over the key. The sums are whole numbers of 29 bits, so their order does not count,
and a GPU has products of whole numbers of 8 bits that read the bytes once, as they lie.

Source: Wegman and Carter 1981, "New hash functions and their use in authentication and set equality".
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import repeat
from typing import Any

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from equipoise._host import Unread
from equipoise.privacy.private import Private, exact

Digestible = str | bytes | Mapping[str, Any] | Callable[[], str | bytes | Mapping[str, Any]] | None


def digest(tensors: Mapping[str, Any]) -> str:
    """BLAKE2b over names, dtypes, shapes and raw bytes of named tensors and plain values, about 1 GB/s.

    Args:
        tensors: named tensors, numbers, strings, or nests of them in mappings and sequences. `Private`
            tensors are allowed: the digest stays in the run's private files and in the journal, which is
            private too.

    Example:
        >>> a = digest({"w": torch.zeros(3)})
        >>> a == digest({"w": torch.zeros(3)}), a == digest({"w": torch.ones(3)})
        (True, False)
    """
    state = hashlib.blake2b(digest_size=16)
    _describe(
        tensors,
        lambda text: state.update(text.encode()),
        lambda raw: state.update(_bytes_of(raw)),
    )
    return state.hexdigest()


def keyed_digest(value: Any, key: bytes, purpose: str) -> str:
    """Digest of named tensors and plain values for who holds `key`: 7 GB/s, and useless to anyone else.

    Args:
        value: as for `digest`.
        key: 32 secret bytes.
        purpose: another purpose gives another, unrelated digest.

    Example:
        >>> a = keyed_digest({"w": torch.zeros(3)}, bytes(32), "example")
        >>> a == keyed_digest({"w": torch.zeros(3)}, bytes(32), "example")
        True
        >>> a == keyed_digest({"w": torch.zeros(3)}, bytes(32), "another")
        False
    """
    return KeyedDigest(key, purpose)(value).value()


class KeyedDigest:
    """Takes keyed digests of one purpose.

    Args:
        key: 32 secret bytes.
        purpose: another purpose gives another, unrelated digest.
    """

    def __init__(self, key: bytes, purpose: str) -> None:
        if len(key) != 32:
            raise ValueError(f"key has {len(key)} bytes; a keyed digest takes 32")
        words = purpose.encode()
        self._weights: dict[torch.device, torch.Tensor] = {}
        self._hashing = hashlib.blake2b(words, key=key, person=b"equipoise ghash").digest()[:32]
        self._bulk = Cipher(algorithms.AES(self._hashing), modes.GCM(bytes(12)))
        self._state = hashlib.blake2b(words + b";", key=key, person=b"equipoise digest", digest_size=16)

    def __call__(self, value: Any, when_read: bool = False) -> Unread[str]:
        """The digest of the value as it is now, without a wait for a device.

        Args:
            value: as for `digest`.
            when_read: as it is when it is read, where it lies on a device: with what else is read then.
        """
        bulk, state = self._bulk.encryptor(), self._state.copy()
        tensors: list[torch.Tensor] = []
        description: list[str] = []
        _describe(value, description.append, tensors.append)
        near: list[torch.Tensor] = []
        places: list[int] = []
        for at, raw in enumerate(tensors):
            if ("cpu" if raw.is_cpu else raw.device.type) in HASHED_WHERE_THEY_ARE:
                places.append(at)
            else:
                near.append(raw.cpu().contiguous())
        _authenticate(bulk, near)
        on_device = [*map(tensors.__getitem__, places)]
        if places:
            description.append(f"hashed where they are: {places};")
        bulk.finalize()
        state.update("".join(description).encode() + bulk.tag)

        def finished(*lines: torch.Tensor) -> str:
            # It changes nothing: an interrupt may end it, and then it is called again.
            whole = state.copy()
            if lines:
                far = self._bulk.encryptor()
                _authenticate(far, [lines[0].contiguous()])
                far.finalize()
                whole.update(far.tag)
            return whole.hexdigest()

        unread = Unread(on_device, finished, self._lines if on_device else None)
        return unread.begin() if on_device and not when_read else unread

    def _lines(self, *tensors: torch.Tensor) -> torch.Tensor:
        device = tensors[0].device
        if device not in self._weights:  # held as long as a graph may read them
            self._weights[device] = weights_of(self._hashing, device)
        lines = [*compressed(tensors, self._weights[device])]
        return lines[0] if len(lines) == 1 else torch.cat(lines)


HASHED_WHERE_THEY_ARE = ("cuda",)
"""Devices that multiply in whole numbers, or in float64."""

HASHED_BYTES, HASH_NUMBERS = 2**14, 16
"""Bytes that become so many numbers: 128 * 128 * 2^14 is below 2^31, so that no sum leaves int32.

The secret numbers have 8 bits: two values have the same 16 sums with a probability of at most 2^-128; with
fewer sums it is larger.
"""

LINES = 32
"""PyTorch multiplies bytes on a GPU in at least 17 rows; in 17 a version of cuBLAS erred. More pad more."""

HASHED_AT_ONCE = 2**25
"""Bytes that are worked on at a time. A choice between memory (32 MiB, and their copy) and calls."""


def compressed(tensors: Sequence[torch.Tensor], weights: torch.Tensor) -> Iterator[torch.Tensor]:
    """Numbers that tell these tensors from others of their types and shapes, on their device.

    Args:
        tensors: on one device and not empty.
        weights: secret, on the same device.

    Yields:
        Tensors int32 [lines, 16], a line for each 16 KiB of all bytes in their order, and lines of zeros.
    """
    group: list[torch.Tensor] = []
    for tensor in [*tensors, None]:
        size = sum(part.numel() for part in group)
        if size >= HASHED_AT_ONCE or (tensor is None and size):
            rest = weights.new_zeros(-size % (LINES * HASHED_BYTES))
            lines = torch.cat([*group, rest]).view(-1, HASHED_BYTES)
            for some in torch.split(lines, HASHED_AT_ONCE // HASHED_BYTES):
                yield _products(some, weights)
            group = []
        if tensor is not None:
            group.append(tensor.reshape(-1).view(torch.int8))


def weights_of(key: bytes, device: torch.device) -> torch.Tensor:
    """The secret numbers k, int8 [16 KiB, 16], as they lie best for products: the 16 KiB side by side."""
    # Counters that GCM does not use: the weights must not follow from GHASH's key.
    stream = Cipher(algorithms.AES(key), modes.CTR(b"\x80" + bytes(15))).encryptor()
    secret = torch.frombuffer(bytearray(stream.update(bytes(HASHED_BYTES * HASH_NUMBERS))), dtype=torch.int8)
    return secret.view(HASH_NUMBERS, HASHED_BYTES).to(device).t()


def _products(lines: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Matrix product of bytes, int32: in whole numbers, or in float64 where a device gets these wrong."""
    if _multiplies_bytes(lines.device):
        return torch._int_mm(lines, weights)
    return (lines.double() @ weights.double()).int()


@cache
def _multiplies_bytes(device: torch.device) -> bool:
    """Whether products of bytes are right here: older GPUs have none, and a version had wrong ones."""
    numbers = torch.arange(LINES * HASHED_BYTES, device=device)
    left = (numbers * numbers % 251 - 125).to(torch.int8).view(LINES, -1)
    right = (numbers[: HASH_NUMBERS * HASHED_BYTES] * 7 % 253 - 128).to(torch.int8).view(HASH_NUMBERS, -1).t()
    try:
        return torch.equal(torch._int_mm(left, right).double(), left.double() @ right.double())
    except RuntimeError:
        return False


_SMALL = 2**14
"""Bytes that are copied to be hashed with others in one call. A choice: more are copied in vain, of fewer
each tensor takes a call."""


def _authenticate(bulk: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Hash the bytes of contiguous tensors on the host, one after another."""
    small: list[bytes] = []
    for tensor in tensors:
        if tensor.nbytes <= _SMALL:
            small.append(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))
            continue
        bulk.authenticate_additional_data(b"".join(small))
        bulk.authenticate_additional_data(_bytes_of(tensor))
        small = []
    bulk.authenticate_additional_data(b"".join(small))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, as if contiguous, that is not empty, of any type and on any device."""
    host = tensor.cpu().contiguous()
    memory: Any = (ctypes.c_ubyte * host.nbytes).from_address(host.data_ptr())
    memory.of = host  # stays as long as somebody reads it
    return memoryview(memory).cast("B")


def _describe(value: Any, say: Callable[[str], None], take: Callable[[torch.Tensor], None]) -> None:
    """Describe `value` in words; its tensors that are not empty go to `take`."""
    pending = [("", value)]  # and no recursion: every step describes all parameters, three times
    while pending:
        words, value = pending.pop()
        say(words)
        if isinstance(value, torch.Tensor):
            raw = exact(value) if isinstance(value, Private) else value
            say(_said(raw.dtype, raw.shape))
            if type(raw) not in _PLAIN:  # of a DTensor, which several processes hold, the part that is here
                raw = getattr(raw, "_local_tensor", raw)
            if raw.is_conj() or raw.is_neg():
                raw = raw.detach().resolve_conj().resolve_neg()
            if raw.numel():
                take(raw)
        elif isinstance(value, (dict, Mapping)):  # `dict` is known sooner
            say(f"mapping {len(value)};")
            for key in sorted(value, key=str, reverse=True):
                pending.append((f"key {key!r};", value[key]))
        elif isinstance(value, (list, tuple)):
            say(f"sequence {len(value)};")
            pending += zip(repeat(""), reversed(value))
        elif value is None or isinstance(value, (bool, int, float, str, bytes)):
            say(f"{type(value).__name__} {value!r};")
        else:
            raise TypeError(
                f"digest takes tensors, plain values and nests of them, got {type(value).__name__}"
            )


_PLAIN = {torch.Tensor, torch.nn.Parameter}


@lru_cache(maxsize=4096)
def _said(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"tensor {dtype} {tuple(shape)};"


def as_digest(value: Digestible, key: bytes) -> str | None:
    """The digest that `value` is, gives when called, or has under `key`; None stays None."""
    if callable(value):
        value = value()
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.hex()
    return keyed_digest(value, key, "what a draw depends on")
