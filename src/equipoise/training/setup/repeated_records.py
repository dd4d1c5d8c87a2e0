"""Records that are in the data several times: each place is drawn and clipped by itself.

Who repeats the records of a rare class in place of drawing them more often trains on five records of a
person where epsilon is computed for one. Subsets and chains of torch's data sets say which record stands at
each place. Tensors in memory are compared by a hash of their rows, once.

Rows of different persons may be equal, too. Then most rows that agree in half of their columns are not equal
in all. The numbers are shares of rows that are equal to exactly the rows which they agree with in a half:

| data | as they are | the smaller class twice | five times |
|---|--:|--:|--:|
| Adult: all, without `fnlwgt`, the eight categorical columns | 8%, 5%, 4% | 96%, 37%, 8% | 97%, 47%, 10% |
| a9a | 12% | 36% | 45% |
| phrases of SST-2 | 2% | 81% | 86% |
| iris | 0% | 55% | 58% |
| breast cancer, wine, digits, MNIST, Fashion-MNIST, CIFAR-10 | no equal rows | 100% | 100% |

Sets with copies of their own are E2E (3% of the rows; 97%), Shakespeare's speeches (2%; 55%), PneumoniaMNIST
(0.4%; 100%) and the sentences of SST-2 (0.1%; 95%). Tables of few categories hide what is repeated.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from equipoise._tree import leaves
from equipoise.privacy.noise.uniform import keyed_hash
from equipoise.training.record_source import RecordSource, data_sets

COPIES, EXACT = 0.001, 0.25
"""Copies beyond the first of a record, and rows that are equal where they agree in half: more are repeated.

Adult has copies of 0.07% of its rows, which tell nothing: below that they could be warned of. The second is a
choice (rows that agree in half by chance are seldom equal). Only a warning depends on them.
"""

FEWEST_COPIES, LARGE, EXACT_IF_SMALL = 5, 10_000, 0.5
"""Shares of few rows come of chance: 500 rows of a9a were taken for repeated 14 times of 20, and now 4 times.

With the smaller class twice, 100 to 20,000 rows of Adult, a9a and SST-2 are found 20 times of 20.
"""

FEWEST_COLUMNS = 4
"""A choice: rows of fewer are equal by chance too often, as in a table of ages and a label that follows."""


def warn_of_repeats(source: RecordSource, data: Any, users: Tensor | None, *, stacklevel: int = 2) -> None:
    """Warn where records occur several times; a log may keep it, so it tells no number of them.

    Args:
        source: of the records.
        data: of the user.
        users: of each record, LongTensor [n], or None: each copy of a record may have one and the same.
        stacklevel: as for `warnings.warn`.
    """
    tensors, are_same = leaves(source.batch()) if source.is_scanned else [], False
    are_equal = bool(tensors) and _are_equal(tensors, users)
    if not tensors:
        with suppress(Exception):  # of somebody's own classes
            are_same = _stand_twice(_places(data), users)
    if are_equal or are_same:
        several = "" if users is None else ", with different owners"
        found = "equal records" if are_equal else "records several times"
        warnings.warn(
            f"data holds {found}{several}. If they are those of different persons, nothing is wrong. If not, "
            "epsilon does not cover a person with all copies: leave copies out, or protect them together by "
            "unit=Users(owner=COLUMN, records_per_user=N): the same owner for all copies, of which there are "
            "N at most",
            stacklevel=stacklevel + 1,
        )


def check_apart(data: Any, evaluated: Sequence[Any], name: str) -> None:
    """Refuse data sets of which a record is known, without reading it, to be a private one.

    Args:
        data: the private records, of the user.
        evaluated: data sets whose scores are published.
        name: of the argument that holds them.

    Raises:
        ValueError: a record of theirs stands in `data`, as the same object, place or memory. Copies pass.
    """
    for one in evaluated:
        is_private, bases = one is data, dict[int, int]()
        with suppress(Exception):  # of somebody's own classes
            is_private |= bool(np.isin(_places(data, bases), _places(one, bases)).any())
        if is_private and one is not None:
            raise ValueError(
                f"{name} holds private records that are trained on: what is measured is published, and no "
                "epsilon covers it. Give public records."
            )


def _places(data: Any, bases: dict[int, int] | None = None) -> Tensor:
    """A number for the record at each place, int64 [n]: the same one where it is known to be the same."""
    bases = {} if bases is None else bases
    nest = data.tensors if isinstance(data, TensorDataset) else data
    if isinstance(nest, (Tensor, tuple, dict)):
        of_rows = [leaf for leaf in leaves(nest) if isinstance(leaf, Tensor) and leaf.stride(0)]
        if of_rows:  # by where each row lies; a small tensor may be public, as masks are
            rows = max(of_rows, key=lambda leaf: leaf.nbytes)
            return rows.data_ptr() + rows.stride(0) * rows.element_size() * torch.arange(len(rows))
    if isinstance(data, Subset):
        return _places(data.dataset, bases)[torch.as_tensor(data.indices)]
    if isinstance(data, ConcatDataset):
        return torch.cat([_places(part, bases) for part in data.datasets])
    if isinstance(data, list) and not any(isinstance(item, (str, bytes, int, float)) for item in data):
        return torch.tensor([id(item) for item in data])
    for inner in data_sets(data)[1:]:
        if len(inner) == len(data):  # whose items it transforms
            return _places(inner, bases)
    return bases.setdefault(id(data), -(2**40) * (1 + len(bases))) + torch.arange(len(data))


def _stand_twice(records: Tensor, users: Tensor | None) -> bool:
    """Whether a record has several owners, or places where it has none."""
    pairs = records if users is None else np.unique(torch.stack([records, users], 1), axis=0)
    return len(np.unique(records)) < len(pairs)


def _are_equal(tensors: Sequence[Tensor], users: Tensor | None) -> bool:
    """Whether more rows are equal than chance makes."""
    flat = [leaf.reshape(len(leaf), -1) for leaf in tensors if leaf.layout == torch.strided]
    starts = [0, *accumulate(leaf.shape[1] for leaf in flat)]
    if starts.pop() < FEWEST_COLUMNS:
        return False

    def half(side: int) -> Tensor:
        columns = (leaf[:, (start + side) % 2 :: 2] for start, leaf in zip(starts, flat, strict=True))
        return keyed_hash([part for part in columns if part.shape[1]], secrets.token_bytes(32))

    keys = np.stack([half(0), half(1)], 1)
    if users is not None:  # an owner's equal records count once
        keys = np.unique(np.column_stack([keys, users]), axis=0)[:, :2]
    equal = _alike(keys.sum(1))
    in_half = np.minimum(_alike(keys[:, 0]), _alike(keys[:, 1]))
    count, is_shared = len(equal), in_half > 1
    most, exact = max(COPIES * count, FEWEST_COPIES - 0.5), EXACT if count >= LARGE else EXACT_IF_SMALL
    are_many = (1 - 1 / equal).sum() > most
    return bool(are_many and (equal == in_half)[is_shared].mean() >= exact)


def _alike(keys: np.ndarray) -> np.ndarray:
    """How many have the key of each."""
    _, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
    return counts[inverse]
