"""Whose the records are, where the unit of privacy is the user.

Each user's records stand in an order that the run's key deals (`Owners.choose`). Of a user who owns more
than `records_per_user` those beyond are in no draw. So the cap holds whatever the data hold, no run stops
over a user with many records, and which records count is secret. The order of one user's records follows
from their numbers and the key alone, so that a user more changes nothing for the others but the numbers of
their records, which deal the same law.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise import _validate
from equipoise.data.records import Records
from equipoise.privacy import Unit, digest
from equipoise.privacy.noise.uniform import keyed_integers
from equipoise.training.record_source import DataError

__all__ = ["Owners", "column_of"]

_KEYS = (
    2**62
)  # of which no two of a user's records have the same, but with a probability below 2^-60 per pair


class Owners:
    """The user of each record.

    Args:
        owner: one number or text per record, [n]: a tensor, an array or a list.
        unit: the cap on a user's records, and what is drawn.

    Raises:
        DataError: it does not name one user per record.

    Example:
        >>> owners = Owners(["ann", "ben", "ann", "ann"], Unit("user", records=2))
        >>> owners.choose(bytes(32))
        >>> len(owners.used(torch.arange(4))), len(owners)
        (3, 4)
    """

    def __init__(self, owner: Any, unit: Unit) -> None:
        self.unit = unit
        self._users, self.count = _numbered(owner)
        self._used: Tensor | None = None

    def __len__(self) -> int:
        """How many records have an owner."""
        return len(self._users)

    def choose(self, key: bytes) -> None:
        """Choose the records of each user that draws may hold.

        Args:
            key: 32 secret bytes of the run, which serve nothing else.
        """
        self._used = self._places(key) < self.unit.records

    def used(self, ids: Tensor) -> Tensor:
        """Those of the records that draws may hold."""
        assert self._used is not None, "the ledger gives the key of the choice"
        return ids[self._used[ids]]

    def fingerprint(self, records: str) -> str:
        """A digest of who owns which record, and of the records' own digest."""
        return digest({"records": records, "users": self._users})

    def _places(self, key: bytes) -> Tensor:
        """The place of every record among those of its user, LongTensor [n]."""
        keys = keyed_integers(_KEYS, torch.arange(len(self._users)), key)
        order = keys.argsort()
        order = order[self._users[order].argsort(stable=True)]
        users = self._users[order]
        starts = torch.searchsorted(users, users)  # the first place of each one's user
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order)) - starts
        return places


def column_of(data: Any, name: str) -> tuple[Any, Any]:
    """The column of this name, and the data without it.

    Raises:
        DataError: they hold none.
    """
    fields = dict(data.fields) if type(data) is Records else data
    if isinstance(fields, dict) and name in fields:
        return fields[name], {key: value for key, value in fields.items() if key != name}
    if name in getattr(data, "column_names", ()) and hasattr(data, "remove_columns"):
        return list(data[name]), data.remove_columns([name])
    raise DataError(
        f"owner={name!r} is no column of data; name a key of a dict of tensors or a column of a table, or "
        "give one number or text per record"
    )


def _numbered(owner: Any) -> tuple[Tensor, int]:
    """Numbers of users from 0 on, LongTensor [n], and how many users there are."""
    if isinstance(owner, Tensor):
        owner = owner.detach().cpu().numpy()
    remedy = "give one whole number or text per record, such as a tensor of user numbers"
    if not isinstance(owner, np.ndarray) and not (isinstance(owner, Sequence) and not isinstance(owner, str)):
        array_like = getattr(owner, "__array__", None)
        if array_like is None:
            raise DataError(f"owner is {_validate.what_is(owner)}; {remedy}")
    found = np.asarray(owner)
    if found.ndim != 1:
        raise DataError(f"owner has {found.ndim} axes; {remedy}")
    if found.dtype.kind == "O":  # texts of a table
        kinds = {type(value) for value in found.tolist()}
        if kinds != {str}:
            names = sorted(kind.__name__ for kind in kinds)
            raise DataError(f"owner holds values of the types {', '.join(names)}; {remedy}")
        found = found.astype(str)
    if found.dtype.kind not in "iuUS":
        raise DataError(f"owner holds values of type {found.dtype}; {remedy}")
    users, numbers = np.unique(found, return_inverse=True)
    return torch.from_numpy(numbers.astype(np.int64)), len(users)
