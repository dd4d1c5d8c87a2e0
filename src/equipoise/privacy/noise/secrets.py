"""Secrets: the key of the operating system, and the generators of noise and sampling that follow from it.

Every release has its own streams of noise and every draw its own generator, keyed by

    SHAKE-256(key, purpose, index).

A resumed run gets the same stream for the same index whatever happened before, and two indices share nothing.
Where the key is private the purpose also holds all that is asked (`bound`). The stream is then a pseudorandom
function of the whole question, as nonces of deterministic signatures are (RFC 6979). So two questions get
independent noise even where a folder was put back from an older copy and the index comes again.

Noise is a `NormalStream` (AES-256 in counter mode, or ChaCha20). Sampling takes a torch generator, a Mersenne
twister. `manual_seed` would fill it from 32 bits only, so all 624 words of its state are filled from the
hash. Which records were drawn is never released, so nobody sees the twister's outputs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from equipoise._files import PathLike
from equipoise.privacy.noise.streams import ReleaseStreams
from equipoise.privacy.private import Draw

# The state of the Mersenne Twister, and the fields before it in what PyTorch's generators give and take (see
# `_twister`). With other sizes the words would lie elsewhere, and part of the state would not follow the key.
_WORDS = 624
_SEED_BYTES, _LEFT_BYTES = 8, 4  # the second twice: left, and seeded

# The state of a fresh generator: no cached normals, and the next number asks for a new block.
_FRESH = torch.Generator().manual_seed(0).get_state()


class Secrets:
    """A 32-byte key and the generators that it keys.

    Args:
        directory: folder of the run; the key lives in `directory/private/key` with mode 0600 and is read
            back when the run resumes. None keeps it in memory.
        existing: the directory holds the key of a run that goes on; none is made.
        reproducible_seed: derive the key from this public number. Two runs then agree bit by bit, and
            nothing is private: the statement says NOT PRIVATE.
        secret_seed: secret bytes that the key follows from, in place of a random one: whoever keeps them can
            repeat the run. It is as private as they are secret.

    Raises:
        RuntimeError: `existing`, and the key is not there; or its file is damaged.

    Example:
        >>> secrets = Secrets(reproducible_seed=1)
        >>> secrets.stream_key(0, "noise") == Secrets(reproducible_seed=1).stream_key(0, "noise")
        True
        >>> secrets.is_private
        False
    """

    def __init__(
        self,
        directory: PathLike | None = None,
        reproducible_seed: int | None = None,
        *,
        existing: bool = False,
        secret_seed: bytes | None = None,
    ) -> None:
        self.is_private = reproducible_seed is None
        # Two runs of one seed that ask other questions share no noise: streams are bound to the question.
        made = os.urandom(32) if secret_seed is None else hashlib.sha256(b"equipoise " + secret_seed).digest()
        self.path: Path | None = None
        if reproducible_seed is not None:
            if isinstance(reproducible_seed, bool) or not isinstance(reproducible_seed, int):
                raise TypeError(f"reproducible_seed must be an integer or None, got {reproducible_seed!r}")
            self._key: bytes | None = hashlib.sha256(
                f"equipoise reproducible {reproducible_seed}".encode()
            ).digest()
        elif directory is None:
            self._key = made
        else:
            self.path = Path(directory) / "private" / "key"
            self._key = _read_key(self.path) if existing else _make_or_read_key(self.path, made)

    @property
    def key(self) -> bytes:
        """The key.

        Raises:
            RuntimeError: after `delete`.
        """
        if self._key is None:
            raise RuntimeError(
                "this run has ended, and its key was deleted: nothing more can be released. Start a new run, "
                "with the same journal, Run(journal=...), which adds up what both cost"
            )
        return self._key

    @property
    def identity(self) -> str:
        """A public name of the key (a hash): runs with the same key are the same run in a journal."""
        return hashlib.sha256(b"equipoise key identity" + self.key).hexdigest()[:16]

    def delete(self) -> None:
        """Forget the key and overwrite and remove its file. Later releases are impossible."""
        if self.path is not None:
            delete_key(self.path)
        self._key = None

    def __repr__(self) -> str:
        return f"Secrets(identity={self.identity!r}, is_private={self.is_private})"

    def __reduce_ex__(self, protocol: object) -> str:
        raise TypeError(
            "Secrets cannot be pickled: the key must not be copied into checkpoints; reopen "
            "Secrets(directory)"
        )

    def stream_key(self, index: int, purpose: str) -> bytes:
        """32 bytes for a stream of release `index`."""
        return bytes(self._hash(purpose, index).digest(32))

    def streams(self, index: int, *question: object) -> ReleaseStreams:
        """The streams of release `index` for this question (see `bound`)."""

        return ReleaseStreams(lambda purpose: self.stream_key(index, self.bound(purpose, *question)))

    def bound(self, purpose: str, *question: object) -> str:
        """The purpose of a stream that serves only this question.

        With a public seed it is the purpose itself. Reproducible runs that differ by rounding alone, in the
        size of micro-batches say, must agree, and nothing is private there.

        Args:
            purpose: what the stream is for.
            question: plain values that tell this question from every other; nothing for a stream that serves
                all of them.
        """
        return f"{purpose} {json.dumps(question)}" if self.is_private and any(question) else purpose

    def sampling_generator(self, index: int, question: str = "") -> torch.Generator:
        """The generator of the records of draw `index` for this question; always on the CPU."""
        return self.generator(self.bound("sampling", question), index)

    def generator(self, purpose: str, index: int) -> torch.Generator:
        """A fresh CPU generator keyed by (key, purpose, index)."""
        return _twister(self._hash(purpose, index).digest(4 * _WORDS))

    def draw_secret(self, index: int, question: str = "") -> bytes:
        """The secret bytes of draw `index` for this question (`Draw.secret`)."""
        # This word, and that of `Draw.secret_bytes`, key bits that runs have used: they stay.
        return bytes(self._hash(self.bound("coins", question), index).digest(32))

    def _hash(self, purpose: str, index: int) -> Any:
        if isinstance(index, bool) or not isinstance(index, int) or index < 0:
            raise ValueError(f"index must be a non-negative integer, got {index!r}")
        # Lengths are fixed or written down: no two (purpose, index) make the same message.
        message = b"equipoise generator" + self.key + len(purpose).to_bytes(8, "big") + purpose.encode()
        return hashlib.shake_256(message + index.to_bytes(16, "big"))


def delete_key(path: Path) -> None:
    """Overwrite and remove the file of a key, if it is there."""
    if path.exists():
        with contextlib.suppress(OSError):
            path.write_bytes(b"\0" * 32)
        path.unlink()


def secret_generator(draw: Draw, *purpose: object) -> torch.Generator:
    """A fresh CPU generator keyed by the draw's secret bytes and a purpose; the whole state is keyed."""
    return _twister(draw.secret_bytes(4 * _WORDS, *purpose))


def _twister(words: bytes) -> torch.Generator:
    """A CPU generator whose twister state is `words` (624 little-endian words of 32 bits)."""
    state = _FRESH.clone()
    # Layout: seed u64, left i32, seeded i32, next u64, then the 624 words, each in a u64 slot.
    start = _SEED_BYTES + 2 * _LEFT_BYTES + 8
    slots = state[start : start + 8 * _WORDS].view(_WORDS, 8)
    fill = torch.frombuffer(bytearray(words), dtype=torch.uint8).view(_WORDS, 4)
    slots[:, :4] = fill
    slots[:, 4:] = 0
    generator = torch.Generator()
    generator.set_state(state)
    return generator


def _read_key(path: Path) -> bytes:
    try:
        key = path.read_bytes()
    except FileNotFoundError:
        raise RuntimeError(
            f"{path} holds no key: the run has ended and its key was deleted, or the file was removed. "
            "Nothing more can be released under it and nothing was spent; read the statement in its folder, "
            "or start a new run, with one journal for both"
        ) from None
    # A key of zeros is one that a killed process was overwriting (`delete_key`).
    if len(key) != 32 or key == b"\0" * 32:
        raise RuntimeError(
            f"the key file {path} is damaged ({len(key)} bytes, 32 expected): the run cannot go on with the "
            "noise it had. Restore the file from a copy, or start a new run and count this one as spent"
        )
    return key


def _make_or_read_key(path: Path, key: bytes) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        # O_EXCL: of two processes that start in one folder, one makes the key and the other reads it.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return _read_key(path)
    with os.fdopen(descriptor, "wb") as file:
        file.write(key)
        file.flush()
        # On the device before the first release: after a loss of power, booked noise must not be lost.
        os.fsync(file.fileno())
    return key
