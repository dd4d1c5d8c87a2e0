"""Whose the records are, where the unit of privacy is the user.

`Owners` knows the user of each record. Where users are drawn, `UserSource` gives them by number as
`RecordSource` gives records, and `joined_over_users` makes one loss of those of a user's records: all that
follows treats a user as a record.

Each user's records stand in a secret order (`Owners.choose`). Of a user who owns more than
`records_per_user` those beyond are in no draw. So the cap holds whatever the data hold, no run stops over a
user with many records, and which records count is secret. The order follows from the run's key, the user's
name, and how many records of the user stand before each, so that a user more or less changes nothing for the
others, also while a run is interrupted.

Samplings that assign records to draws (`Sampling.takes_turns`) assign users by their names. Records that are
drawn by themselves are assigned by the user's name and their place in that order. A record that takes a place
that another one of the user has left then has its draws, too, so that a user is in an epoch as often as the
cap says whatever is withdrawn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equipoise import _validate
from equipoise.data.records import Records
from equipoise.gradients.engine_inputs import Loss, map_records, num_records, record_leaves
from equipoise.privacy import Unit, digest
from equipoise.privacy.noise.uniform import KEYS, keyed_integers, occurrences
from equipoise.training.randomness import Randomness
from equipoise.training.record_source import DataError, RecordSource


class Owners:
    """The user of each record.

    Args:
        owner: one number or text per record, [n], or a row of whole numbers, [n, k]: a tensor, an array or a
            list.
        unit: the cap on a user's records, and what is drawn.

    Attributes:
        users: of each record, numbered from 0 on, LongTensor [n].
        names: a number for the name of each user, int64 [count].
        count: of users.

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
        self.users, self.names = _numbered("owner", owner)
        self.count = len(self.names)
        self.choose(bytes(32))  # for trials, until the ledger gives the run's key

    def __len__(self) -> int:
        """How many records have an owner."""
        return len(self.users)

    def choose(self, key: bytes) -> None:
        """Choose the records of each user that draws may hold.

        Args:
            key: 32 secret bytes of the run, which serve nothing else.
        """
        self._place = places = self._places(key)
        self._used = places < self.unit.records
        used = self._used.nonzero().flatten()
        self._counts = torch.bincount(self.users[used], minlength=self.count)
        self._starts = self._counts.cumsum(0) - self._counts
        self._by_user = torch.empty_like(used)  # user by user
        self._by_user[self._starts[self.users[used]] + places[used]] = used

    def keys(self, key: bytes) -> Tensor:
        """What names each of those that are drawn, users or records, for the whole run, int64 [n].

        Args:
            key: 32 secret bytes of the run, which serve nothing else.
        """
        if self.unit.joined is not None:
            return self.names
        return keyed_integers(KEYS, torch.stack([self.names[self.users], self._place], 1), key)

    def used(self, ids: Tensor) -> Tensor:
        """Those of the records that draws may hold."""
        return ids[self._used[ids]]

    def records_of(self, users: Tensor) -> tuple[Tensor, Tensor]:
        """The records of users, [b, G], in which each one's own come again in places beyond; who counts."""
        places, counts = torch.arange(self.unit.records), self._counts[users][:, None]
        return self._by_user[self._starts[users][:, None] + places % counts], places < counts

    def users_of(self, records: Tensor) -> Tensor:
        """The users of these records, each once."""
        return self.users[records].unique()  # type: ignore[no-untyped-call]

    def all_of(self, user: int) -> tuple[int, ...]:
        """The numbers of all records of one user, whether draws may hold them or not."""
        return tuple((self.users == user).nonzero().flatten().tolist())

    def with_newcomers(self, sizes: Sequence[int]) -> Owners:
        """The same, and users more, who own so many records each behind those that are there."""
        numbers = torch.arange(self.count, self.count + len(sizes))
        return Owners(torch.cat([self.users, numbers.repeat_interleave(torch.tensor(sizes))]), self.unit)

    def fingerprint(self, records: str) -> str:
        """A digest of who owns which record, and of the records' own digest."""
        return digest({"records": records, "users": self.users})

    def partition(self) -> str:
        """How many records there are, and a digest of which of them have one owner, whatever it is called."""
        records = torch.arange(len(self))
        first = torch.full((self.count,), len(self)).scatter_reduce(0, self.users, records, "amin")
        return f"{len(self)}:{digest({'users': first[self.users]})}"  # by the first record of each user

    def _places(self, key: bytes) -> Tensor:
        """The place of every record among those of its user, LongTensor [n]."""
        owned = torch.stack([self.names[self.users], occurrences(self.users)], 1)
        order = keyed_integers(KEYS, owned, key).argsort()
        places = torch.empty_like(order)
        places[order] = occurrences(self.users[order])
        return places


def keys_of_ids(ids: Any, count: int) -> Tensor:
    """What names each record for the whole run, int64 [n].

    Args:
        ids: one number or text per record.
        count: of the records.

    Raises:
        DataError: they do not name each record by itself.
    """
    numbers, names = _numbered("ids", ids)
    if len(numbers) != count:
        raise DataError("ids has another length than data: it names each record, in the order of data")
    if len(names) < count:
        raise DataError(
            "ids names two records alike, so that they would always be drawn together: give each record one "
            "of its own, the same for the whole run. Where a person owns several records, protect the "
            "person: unit=Users(owner=..., records_per_user=...)"
        )
    return names[numbers]


def weights_of(given: Any, count: int) -> Tensor:
    """What each record counts after the clip, float32 [n].

    Raises:
        DataError: not one number in [0, 1] for each.
    """
    try:
        weights = torch.as_tensor(given, device="cpu").detach().to(torch.float32)
    except (TypeError, ValueError, RuntimeError):
        weights = torch.zeros(0)
    if weights.shape != (count,):
        raise DataError(
            "weights must hold one number per record, in the order of data, or be the name of a column"
        )
    if not bool(((weights >= 0) & (weights <= 1)).all()):  # nor NaN
        raise DataError(
            "weights holds numbers outside [0, 1], which no bound covers, or NaN: divide by a public number"
        )
    return weights


def column_of(data: Any, name: str, argument: str = "owner") -> tuple[Any, Any]:
    """The column of this name, and the data without it.

    Args:
        data: of a training.
        name: of the column.
        argument: which names it, for the message.

    Raises:
        DataError: they hold none.
    """
    fields = dict(data.fields) if type(data) is Records else data
    if isinstance(fields, dict) and name in fields:
        return fields[name], {key: value for key, value in fields.items() if key != name}
    if name in getattr(data, "column_names", ()) and hasattr(data, "remove_columns"):
        return list(data[name]), data.remove_columns([name])
    if hasattr(data, "iloc"):  # a data frame
        raise DataError(
            "data is a data frame, whose rows no training draws: give a dict of tensors, such as "
            f"{{'input': torch.tensor(frame[[...]].to_numpy())}}, and {argument}=frame[{name!r}]"
        )
    raise DataError(
        f"{argument}={name!r} is no column of data; name a key of a dict of tensors or a column of a table, "
        "or give one number or text per record"
    )


def _numbered(argument: str, given: Any) -> tuple[Tensor, Tensor]:
    """Numbers of names from 0 on, LongTensor [n], and for each name an int64 that follows from it alone.

    Two different names get one number with probability 2^-64 (texts, and numbers beyond 64 bits), or never.
    `BallsInBins` rests on that: records of one number would be drawn together, which shows where each is.
    """
    remedy = "give one whole number or text per record, such as a tensor of numbers"
    if isinstance(given, Tensor):
        if given.is_floating_point():  # bfloat16 has no array
            raise DataError(f"{argument} holds values of type {given.dtype}; {remedy}")
        given = given.detach().cpu().numpy()
    is_list = isinstance(given, Sequence) and not isinstance(given, (str, bytes))
    if isinstance(given, np.ma.MaskedArray) or not (is_list or hasattr(given, "__array__")):
        raise DataError(f"{argument} is {_validate.what_is(given)}; {remedy}")
    found = given if is_list else np.asarray(given)
    if not is_list and found.ndim == 2 and found.dtype.kind in "iu":  # a table's digests of names
        found = np.ascontiguousarray(found).view(f"S{found.shape[1] * found.itemsize}")[:, 0]
    if not is_list and found.ndim != 1:
        raise DataError(f"{argument} has {found.ndim} axes; {remedy}")
    if not is_list and found.dtype.kind in "iu":
        names, numbers = np.unique(found, return_inverse=True)
        return torch.from_numpy(numbers.astype(np.int64)), torch.from_numpy(names.astype(np.int64))
    # An array made of a list would take 1 and "1" for one name, and "a" and "a\0".
    every = [value.item() if isinstance(value, np.generic) else value for value in found]
    kinds = set(map(type, every))
    if kinds not in ({int}, {str}, {bytes}):
        types = ", ".join(sorted(kind.__name__ for kind in kinds)) or "nothing"
        raise DataError(f"{argument} holds values of the types: {types}; {remedy}, all of one type")
    values = sorted(set(every))
    table = {value: number for number, value in enumerate(values)}
    return torch.tensor([table[value] for value in every]), torch.tensor([*map(_name, values)])


def _name(value: int | str | bytes) -> int:
    """A signed number of 64 bits that follows from a name alone, whether it stands in a list or an array."""
    if isinstance(value, int) and -(2**63) <= value < 2**64:
        number = value % 2**64
    else:
        text = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
        number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    return number - 2**64 if number >= 2**63 else number


class UserSource(RecordSource):
    """Users by number, in the place of records: each is a row of places with records, some of which count.

    A batch is `{"records": [b, G, ...], "present": [b, G]}`. A user with fewer records than G stands there
    with copies of their own in the other places: nothing but the user's own records decides on their row.

    Args:
        records: of all users.
        owners: whose they are.
    """

    def __init__(self, records: RecordSource, owners: Owners) -> None:
        vars(self).update(vars(records))
        self._owners = owners
        if self.weights is not None:  # a user's is the mean of those of all their records
            self.weights = torch.bincount(owners.users, self.weights) / torch.bincount(owners.users)

    def __len__(self) -> int:
        return self._owners.count

    @property
    def has_rows(self) -> bool:
        return False

    def read(self, ids: Tensor, randomness: Randomness | None = None) -> Any:
        records, present = self._owners.records_of(ids)
        return self.of_records.read(records.flatten(), randomness), present

    def join(self, read: Any) -> Any:
        records, present = read
        return {"records": by_user(self.of_records.join(records), present), "present": present}

    def ahead(self, parts: Sequence[Tensor], randomness: Randomness) -> Iterator[None]:
        records = [self._owners.records_of(part)[0].flatten() for part in parts]
        return self.of_records.ahead(records, randomness)

    def probes(self, count: int) -> Tensor:
        return self._owners.users_of(self.of_records.probes(count))


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
