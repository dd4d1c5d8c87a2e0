"""Public randomness of a training, by purpose and step, so that everything replays.

Everything here follows the public `seed`: dropout masks, augmentations, public directions. The noise and
the sampling do not: they come from the secret key (see `equipoise.privacy.Secrets`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["derive", "generator", "replayed"]


def derive(seed: int, *purpose: object) -> int:
    """A 63-bit number that follows from the seed and the purpose.

    Example:
        >>> derive(0, "dropout", 3, 1) == derive(0, "dropout", 3, 1) != derive(0, "dropout", 3, 2)
        True
    """
    text = "/".join(["equipoise", str(seed), *map(str, purpose)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def generator(seed: int, *purpose: object) -> torch.Generator:
    """A CPU generator of its own for this purpose."""
    return torch.Generator().manual_seed(derive(seed, *purpose))


@contextmanager
def replayed(device: torch.device, seed: int, *purpose: object) -> Iterator[None]:
    """Inside, torch's global generators (CPU and `device`) start from the purpose; then they are as before.

    Two entries with the same arguments see the same dropout masks.
    """
    # Not torch.manual_seed and fork_rng, which visit every device of the machine at each call.
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    states = [g.get_state() for g in generators]
    seed = derive(seed, *purpose)
    try:
        for g in generators:
            g.manual_seed(seed)
        yield
    finally:
        for g, state in zip(generators, states, strict=True):
            g.set_state(state)
