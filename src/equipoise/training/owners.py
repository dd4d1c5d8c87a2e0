"""Whose the records are, where the unit of privacy is the user.

`Owners` knows the user of each record. Where users are drawn, `UserSource` gives them by number as
`RecordSource` gives records, and `joined_over_users` makes one loss of those of a user's records: all that
follows treats a user as a record.

Each user's records stand in an order that the run's key deals (`Owners.choose`). Of a user who owns more
than `records_per_user` those beyond are in no draw. So the cap holds whatever the data hold, no run stops
over a user with many records, and which records count is secret. The order of one user's records follows
from their numbers and the key alone, so that a user more changes nothing for the others but the numbers of
their records, which deal the same law.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equipoise import _validate
from equipoise.data.records import OWNER, Records
from equipoise.gradients.engine_inputs import Loss, map_records, num_records, record_leaves
from equipoise.privacy import Unit, digest
from equipoise.privacy.noise.uniform import keyed_integers
from equipoise.training.randomness import Randomness
from equipoise.training.record_source import DataError, RecordSource

__all__ = [
    "Owners",
    "UserSource",
    "by_user",
    "column_of",
    "flattened",
    "joined_over_users",
    "users_of_one_record",
]

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
        self.choose(bytes(32))  # for trials, until the ledger gives the run's key

    def __len__(self) -> int:
        """How many records have an owner."""
        return len(self._users)

    def choose(self, key: bytes) -> None:
        """Choose the records of each user that draws may hold.

        Args:
            key: 32 secret bytes of the run, which serve nothing else.
        """
        places = self._places(key)
        self._used = places < self.unit.records
        used = self._used.nonzero().flatten()
        self._counts = torch.bincount(self._users[used], minlength=self.count)
        self._starts = self._counts.cumsum(0) - self._counts
        self._by_user = torch.empty_like(used)  # user by user
        self._by_user[self._starts[self._users[used]] + places[used]] = used

    def used(self, ids: Tensor) -> Tensor:
        """Those of the records that draws may hold."""
        return ids[self._used[ids]]

    def records_of(self, users: Tensor) -> tuple[Tensor, Tensor]:
        """The records of users, [b, G], in which each one's own come again in places beyond; who counts."""
        places, counts = torch.arange(self.unit.records), self._counts[users][:, None]
        return self._by_user[self._starts[users][:, None] + places % counts], places < counts

    def users_of(self, records: Tensor) -> Tensor:
        """The users of these records, each once."""
        return self._users[records].unique()  # type: ignore[no-untyped-call]

    def all_of(self, user: int) -> tuple[int, ...]:
        """The numbers of all records of one user, whether draws may hold them or not."""
        return tuple((self._users == user).nonzero().flatten().tolist())

    def with_newcomers(self, sizes: Sequence[int]) -> Owners:
        """The same, and users more, who own so many records each behind those that are there."""
        numbers = torch.arange(self.count, self.count + len(sizes))
        return Owners(torch.cat([self._users, numbers.repeat_interleave(torch.tensor(sizes))]), self.unit)

    def fingerprint(self, records: str) -> str:
        """A digest of who owns which record, and of the records' own digest."""
        return digest({"records": records, "users": self._users})

    def partition(self) -> str:
        """How many records there are, and a digest of which of them have one owner, whatever it is called."""
        records = torch.arange(len(self))
        first = torch.full((self.count,), len(self)).scatter_reduce(0, self._users, records, "amin")
        return f"{len(self)}:{digest({'users': first[self._users]})}"  # by the first record of each user

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
        owner = fields[name]
        if type(data) is Records and name == OWNER and owner.ndim == 2:  # a table's digests of names
            owner = owner.unique(dim=0, return_inverse=True)[1]
        return owner, {key: value for key, value in fields.items() if key != name}
    if name in getattr(data, "column_names", ()) and hasattr(data, "remove_columns"):
        return list(data[name]), data.remove_columns([name])
    raise DataError(
        f"owner={name!r} is no column of data; name a key of a dict of tensors or a column of a table, or "
        "give one number or text per record"
    )


def _numbered(owner: Any) -> tuple[Tensor, int]:
    """Numbers of users from 0 on, LongTensor [n], and how many users there are."""
    remedy = "give one whole number or text per record, such as a tensor of user numbers"
    if isinstance(owner, Tensor):
        if owner.is_floating_point() or owner.is_complex():
            raise DataError(f"owner holds values of type {str(owner.dtype).removeprefix('torch.')}; {remedy}")
        owner = owner.detach().cpu().numpy()
    is_list = isinstance(owner, Sequence) and not isinstance(owner, (str, bytes))
    if isinstance(owner, np.ma.MaskedArray) or not (is_list or hasattr(owner, "__array__")):
        raise DataError(f"owner is {_validate.what_is(owner)}; {remedy}")
    found = owner if is_list else np.asarray(owner)
    if not is_list and found.ndim != 1:
        raise DataError(
            f"owner has {found.ndim} axes; {remedy}. Where each row names a user, as digests of a table do, "
            "these are owner.unique(dim=0, return_inverse=True)[1]"
        )
    if not is_list and found.dtype.kind in "iuUS":
        users, numbers = np.unique(found, return_inverse=True)
        return torch.from_numpy(numbers.astype(np.int64)), len(users)
    # An array made of a list would take 1 and "1" for one user, and "a" and "a\0".
    values = list(found) if is_list else found.tolist()
    kinds = {int if isinstance(value, (int, np.integer)) else type(value) for value in values}
    if kinds not in ({int}, {str}) or any(isinstance(value, bool) for value in values):
        names = ", ".join(sorted({type(value).__name__ for value in values})) or "nothing"
        raise DataError(f"owner holds values of the types: {names}; {remedy}, all of one type")
    table = {user: number for number, user in enumerate(sorted(set(values)))}
    return torch.tensor([table[value] for value in values]), len(table)


class UserSource(RecordSource):
    """Users by number, in the place of records: each is a row of places with records, some of which count.

    A batch is `{"records": [b, G, ...], "present": [b, G]}`. A user with fewer records than G stands there
    with copies of their own in the other places: nothing but the user's own records decides on their row.

    Args:
        records: of all users.
        owners: whose they are.
    """

    def __init__(self, records: RecordSource, owners: Owners) -> None:
        self._records, self._owners = records, owners

    def __len__(self) -> int:
        return self._owners.count

    @property
    def is_scanned(self) -> bool:
        return self._records.is_scanned

    @property
    def is_elsewhere(self) -> bool:
        return self._records.is_elsewhere

    @property
    def has_rows(self) -> bool:
        return False

    def read(self, ids: Tensor, randomness: Randomness | None = None) -> Any:
        records, present = self._owners.records_of(ids)
        return self._records.read(records.flatten(), randomness), present

    def join(self, read: Any) -> Any:
        records, present = read
        return {"records": by_user(self._records.join(records), present), "present": present}

    def ahead(self, parts: Sequence[Tensor], randomness: Randomness) -> Iterator[None]:
        records = [self._owners.records_of(part)[0].flatten() for part in parts]
        return self._records.ahead(records, randomness)

    def close(self) -> None:
        self._records.close()

    def fingerprint(self) -> str:
        return self._records.fingerprint()

    def batch(self) -> Any:
        return self._records.batch()

    def leaves(self) -> list[Tensor]:
        return self._records.leaves()

    def probes(self, count: int) -> Tensor:
        return self._owners.users_of(self._records.probes(count))

    def marked(self) -> list[int]:
        marked = torch.tensor(self._records.marked(), dtype=torch.long)
        return [int(user) for user in self._owners.users_of(marked)]


def flattened(batch: Any) -> Any:
    """The records of a batch of users one after the other, [b * G, ...]."""
    return map_records(lambda leaf: leaf.flatten(0, 1), batch["records"])


def by_user(records: Any, present: Tensor) -> Any:
    """The inverse of `flattened`, [b, G, ...]."""
    return map_records(lambda leaf: leaf.reshape(*present.shape, *leaf.shape[1:]), records)


def users_of_one_record(batch: Any, places: int) -> Any:
    """Each record as a user of its own, whose other places hold copies that do not count."""
    records = map_records(lambda leaf: leaf[:, None].expand(-1, places, *leaf.shape[1:]), batch)
    present = (torch.arange(places) == 0).expand(num_records(batch), places)
    return {"records": records, "present": present.to(record_leaves(batch)[0].device)}


def joined_over_users(loss: Loss, rows: str | None) -> Loss:
    """The loss of a batch of users: the sum, or the mean, of the losses of each user's records, [b].

    Args:
        loss: of records, [b * G].
        rows: "sum" or "mean"; None where a batch holds records.
    """
    if rows is None:
        return loss

    def joined(model: nn.Module, batch: Any) -> Tensor:
        present = batch["present"]
        losses = loss(model, flattened(batch))
        if not isinstance(losses, Tensor) or losses.shape != (present.numel(),):
            found = tuple(losses.shape) if isinstance(losses, Tensor) else _validate.what_is(losses)
            raise ValueError(
                f"loss gives {found} for {present.numel()} records; it must give one number per record, "
                f"[{present.numel()}]"
            )
        counted = (losses.view(present.shape) * present).sum(1)
        return counted / present.sum(1).clamp(min=1) if rows == "mean" else counted

    return joined
