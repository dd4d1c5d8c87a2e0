"""Digests of tensors: they tell whether a repeated step is the same step.

The digest of a step is taken twice (what it depends on, and what it would release), over all parameters. So
the keyed digest is Wegman and Carter's. The raw bytes go through a universal hash under a secret key. What
comes out goes, with names, types and shapes, through a keyed BLAKE2b,

    BLAKE2b_k(description, GHASH_h(bytes)).

GHASH is the polynomial hash of AES-GCM, for which processors have instructions (7 GB/s against BLAKE2b's 0.6
on the machine it was chosen on). Two different values of L bytes get one digest with probability at most L /
2^131 over the key. Without the key a digest tells nothing of the value: BLAKE2b hides GHASH's result, which
alone must not be shown.

Source: Wegman and Carter 1981, "New hash functions and their use in authentication and set equality".
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from equipoise.privacy.private import unwrap

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
    _update(state, tensors, state.update)
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
    if len(key) != 32:
        raise ValueError(f"key has {len(key)} bytes; a keyed digest takes 32")
    hashing = hashlib.blake2b(purpose.encode(), key=key, person=b"equipoise ghash").digest()[:32]
    bulk = Cipher(algorithms.AES(hashing), modes.GCM(bytes(12))).encryptor()
    state = hashlib.blake2b(purpose.encode() + b";", key=key, person=b"equipoise digest", digest_size=16)
    _update(state, value, bulk.authenticate_additional_data)
    bulk.finalize()
    state.update(bulk.tag)
    return state.hexdigest()


def _update(state: Any, value: Any, take_bytes: Callable[[Any], None]) -> None:
    """Describe `value` to `state`; the raw bytes of its tensors, whose number follows, to `take_bytes`."""
    if isinstance(value, torch.Tensor):
        raw = unwrap(value).detach()
        state.update(f"tensor {raw.dtype} {tuple(raw.shape)};".encode())
        # Of a DTensor, which several processes hold, the part that is here.
        raw = getattr(raw, "_local_tensor", raw).contiguous()
        if raw.numel():
            take_bytes(raw.cpu().reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, Mapping):
        state.update(f"mapping {len(value)};".encode())
        for key in sorted(value, key=str):
            state.update(f"key {key!r};".encode())
            _update(state, value[key], take_bytes)
    elif isinstance(value, (list, tuple)):
        state.update(f"sequence {len(value)};".encode())
        for item in value:
            _update(state, item, take_bytes)
    elif value is None or isinstance(value, (bool, int, float, str, bytes)):
        state.update(f"{type(value).__name__} {value!r};".encode())
    else:
        raise TypeError(f"digest takes tensors, plain values and nests of them, got {type(value).__name__}")


def as_digest(value: Digestible, key: bytes) -> str | None:
    """The digest that `value` is, gives when called, or has under `key`; None stays None."""
    if callable(value):
        value = value()
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.hex()
    return keyed_digest(value, key, "what a draw depends on")
