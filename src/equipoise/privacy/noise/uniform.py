"""Uniform draws from a generator, without the bias of a remainder.

`torch.randint` and `torch.randperm` take a number of 32 or 64 bits modulo n, so low results come more often
unless n is a power of two: by 1.7% among 2·10⁸ records. The accounting of a sample assumes that there is no
such bias. Numbers of 63 bits are therefore drawn anew where they lie beyond the last full multiple of n.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

KEYS = 2**62
"""From so many integers, two independent ones are equal with probability 2^-62.

With fewer, two records would have one key more often; more than 2^63 do not fit int64.
"""


def uniform_integers(bound: int, count: int, generator: torch.Generator) -> Tensor:
    """Independent integers, each uniform in [0, bound), int64 [count].

    Args:
        bound: from 1 to 2^63 - 1.
        count: how many.
        generator: a CPU generator, which moves on.
    """
    last = 2**63 - 1 - 2**63 % bound  # of the numbers below the last full multiple
    found = torch.empty(0, dtype=torch.int64)
    while len(found) < count:
        # Without ends, `random_` gives 63 bits of the generator as they are.
        numbers = torch.empty(count - len(found), dtype=torch.int64).random_(generator=generator)
        found = torch.cat([found, numbers[numbers <= last] % bound])
    return found


def keyed_integers(bound: int, numbers: Tensor, key: bytes) -> Tensor:
    """For each number its own integer in [0, bound), int64, the same at every call under one key.

    They are AES of the numbers; the remainder makes some of them more likely by a share of bound / 2^63.

    Args:
        bound: how many integers there are.
        numbers: int64 [n], or pairs [n, 2], such as keys of records; equal ones get equal integers.
        key: 32 secret bytes that serve nothing else.

    Example:
        >>> keyed_integers(1, torch.arange(3), bytes(32))
        tensor([0, 0, 0])
    """
    blocks = np.zeros((len(numbers), 2), np.int64)
    blocks[:, : 1 if numbers.ndim == 1 else 2] = numbers.reshape(len(numbers), -1).numpy()
    # A block per number: as much work as there are numbers, however large they are.
    cipher = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    found = np.frombuffer(cipher.update(blocks.tobytes()), np.int64).reshape(-1, 2)[:, 0]
    return torch.from_numpy((found & (2**63 - 1)) % bound)


def keyed_hash(rows: Sequence[Tensor], key: bytes) -> Tensor:
    """A secret number for what each row of some tensors holds: the same for the same bytes, int64 [n].

    With the 32-bit words w_j of a row and secret a_j, b_j of 64 bits it joins the upper halves of

        sum_j a_j w_j mod 2^64    and    sum_j b_j w_j mod 2^64.

    For two different rows d = sum_j a_j (w_j - w'_j) is uniform over the multiples of some 2^t, t < 32, and
    the upper halves are equal only if |d| < 2^32 mod 2^64. So two rows have one number with probability
    below 2^-61 over the key. Source: Lemire and Kaser 2014, "Strongly universal string hashing is fast".

    Args:
        rows: tensors [n, ...], on any device; a file that is mapped into memory is read in parts.
        key: 32 secret bytes that serve nothing else.
    """
    coefficients = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    total = np.zeros((len(rows[0]), 2), np.uint64)
    for tensor in rows:
        size = tensor[:1].numel() * tensor.element_size()
        if not size:
            continue
        words, together = -(-size // 4), max(1, _HASHED_AT_ONCE // size)
        secret = np.frombuffer(coefficients.update(bytes(16 * words)), np.uint64).reshape(words, 2)
        for first in range(0, len(tensor), together):
            part = tensor[first : first + together].detach().cpu().contiguous()
            known = part.view(torch.int16) if part.dtype == torch.bfloat16 else part  # to NumPy
            raw = known.flatten().numpy().view(np.uint8).reshape(len(part), -1)
            raw = np.pad(raw, ((0, 0), (0, 4 * words - size)))
            total[first : first + together] += raw.view(np.uint32).astype(np.uint64) @ secret
    upper = total >> np.uint64(32)
    return torch.from_numpy((upper[:, 0] << np.uint64(32) | upper[:, 1]).view(np.int64))


_HASHED_AT_ONCE = 2**22  # bytes; as numbers of 64 bits they are in the processor's cache


def occurrences(values: Tensor) -> Tensor:
    """How many equal values stand before each, int64 [n].

    >>> occurrences(torch.tensor([5, 3, 5, 5, 3]))
    tensor([0, 0, 1, 2, 1])
    """
    ordered, order = values.sort(stable=True)
    found = torch.empty_like(order)
    found[order] = torch.arange(len(order)) - torch.searchsorted(ordered, ordered)
    return found


def uniform_subset(population: int, size: int, generator: torch.Generator) -> Tensor:
    """A uniform subset of range(population), sorted, int64 [size].

    Its cost follows the size and not the population.

    Args:
        population: how many there are to choose from.
        size: of the subset, at most the population.
        generator: a CPU generator, which moves on.

    >>> uniform_subset(4, 4, torch.Generator())
    tensor([0, 1, 2, 3])
    """
    if 2 * size > population:  # it is quicker to choose who is left out
        chosen = torch.ones(population, dtype=torch.bool)
        chosen[uniform_subset(population, population - size, generator)] = False
        return chosen.nonzero().flatten()
    # The first `size` different values of independent draws. No round draws more than are missing, so none
    # of them has to be dropped, by which order of theirs might count.
    found = torch.empty(0, dtype=torch.int64)
    while len(found) < size:
        more = uniform_integers(population, size - len(found), generator)
        found = torch.cat([found, more]).unique()  # type: ignore[no-untyped-call]
    return found


def uniform_order(count: int, generator: torch.Generator) -> Tensor:
    """A uniform permutation of range(count), int64 [count].

    Args:
        count: how many.
        generator: a CPU generator, which moves on.
    """
    while True:
        keys, order = torch.empty(count, dtype=torch.int64).random_(generator=generator).sort()
        if not bool((keys[1:] == keys[:-1]).any()):  # the order of equal keys would be the sort's
            return order
