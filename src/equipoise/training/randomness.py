"""The randomness of a training that is not noise or sampling, by purpose, so that everything replays.

What concerns no private record follows the public seed: initial subspaces, public batches, random schedules.
What is random about private records (dropout masks, augmentation, transforms of a data set) follows secret
randomness of their draw, whether it asks torch, NumPy or Python for its random numbers.
The bound of a clipped sum says how far one record moves it while the others stay as they are. Public
randomness is assigned by place in the batch, so a record that enters would change everybody else's. Secret
randomness is independent and identically distributed, so the proof can tie each share to its record.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial

import torch

from equipoise.privacy import Draw, secret_generator

Randomness = Callable[[str], torch.Generator]
"""From what random numbers are for ("dropout", "augmentation") to a fresh CPU generator."""


def derive_seed(seed: int, *purpose: object) -> int:
    """A 63-bit number that follows from the seed and the purpose.

    Example:
        >>> derive_seed(0, "dropout", 3, 1) == derive_seed(0, "dropout", 3, 1)
        True
        >>> derive_seed(0, "dropout", 3, 1) == derive_seed(0, "dropout", 3, 2)
        False
    """
    text = "/".join(["equipoise", str(seed), *map(str, purpose)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def generator(seed: int, *purpose: object) -> torch.Generator:
    """A CPU generator that follows from the seed and the purpose."""
    return torch.Generator().manual_seed(derive_seed(seed, *purpose))


def public_randomness(seed: int, *purpose: object) -> Randomness:
    """Generators that follow the public seed, for records that nobody protects."""
    return lambda kind: generator(seed, kind, *purpose)


def secret_randomness(draw: Draw, *place: object) -> Randomness:
    """Secret generators of the micro-batch at this place of a draw; worker processes can be given them."""
    return partial(_secret_generator, draw, place)


def _secret_generator(draw: Draw, place: tuple[object, ...], kind: str) -> torch.Generator:
    return secret_generator(draw, kind, *place)
