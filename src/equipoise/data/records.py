"""Records: the private rows, and data sets made of them.

A record is one training example, the unit of privacy. `Records` holds n of them as a dict of tensors whose
first axis counts records, with the fields ``input`` and (where there is a class) ``label``. A `DataSet` joins
the private training records with a test set and with the *public* numbers that go with them: above all
``population``, which sets the sampling rate and is therefore stated, never counted from the private rows (if
it were counted, adding a record would change the rate, and the privacy proof would not hold).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.data.readers.files import DataFileError

TASK_NAMES = ("classification", "regression", "multi-label")
OWNER = "owner"
"""The field of a data set's training records that says whose they are, where users are protected."""
WEIGHT = "weight"
"""The field that holds what a record's loss is multiplied by, from 0 to 1, where records have weights."""
MEDIAN = "the target is learnt as a logarithm, and a mean of logarithms carried back by exp is a median"
"""What is said of a target with ``target_log``."""
ASIDE = "aside"
"""The field of the rows of a table that says which ones to evaluate on and not to train on."""

Batch = dict[str, Tensor]


class Records:
    """n records: named tensors of equal length, checked once when they are made.

    Args:
        fields: name -> tensor ``[n, ...]``; the field ``label``, if there is one, holds class numbers
            ``[n]``.
        num_classes: labels must lie in ``0 .. num_classes - 1``; None leaves the upper end unchecked.
        check_finite: whether a NaN or an infinity in a floating-point field is an error. To a training it is
            one in any case.

    Raises:
        DataFileError: no fields, no records, unequal lengths, labels that are not integers in range, values
            not finite.

    The tensors are kept, not copied: do not change them in place afterwards, since the fingerprint is
    computed once.

    >>> records = Records({"input": torch.eye(3), "label": torch.tensor([0, 1, 1])}, num_classes=2)
    >>> len(records), records[torch.tensor([2, 0])]["label"].tolist(), records[1]["input"].tolist()
    (3, [1, 0], [0.0, 1.0, 0.0])
    """

    def __init__(
        self, fields: Mapping[str, Tensor], *, num_classes: int | None = None, check_finite: bool = True
    ) -> None:
        for name, value in fields.items():
            if not isinstance(value, Tensor) or value.ndim == 0:
                raise DataFileError(
                    f"fields[{name!r}] is not a tensor whose first axis counts the records. Convert it with "
                    "torch.as_tensor."
                )
        lengths = {name: len(value) for name, value in fields.items()}
        if len(set(lengths.values())) != 1:
            raise DataFileError(
                f"fields have these numbers of records: {lengths}. Give at least the field 'input', and "
                "every field one row per record."
            )
        self._fields = MappingProxyType(dict(fields))
        self._length = next(iter(lengths.values()))
        self.num_classes = num_classes
        self._fingerprint: str | None = None
        if "label" in fields:
            _check_labels(fields["label"], num_classes)
        for name, value in fields.items() if check_finite else ():
            _check_finite(name, value)

    @property
    def fields(self) -> Mapping[str, Tensor]:
        """Name -> tensor ``[n, ...]``, read-only."""
        return self._fields

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int | slice | Tensor) -> Batch:
        """A batch ``{name: [k, ...]}`` for a slice, an index tensor or a boolean mask.

        An int gives one record, without the record axis.
        """
        if isinstance(index, Tensor) and index.dtype == torch.int64 and index.ndim == 1:
            # several times as quick as value[index], which would also take -1 for the last record
            return {name: value.index_select(0, index) for name, value in self._fields.items()}
        return {name: value[index] for name, value in self._fields.items()}

    def __iter__(self) -> Iterator[Batch]:
        return (self[i] for i in range(self._length))

    def __repr__(self) -> str:
        # only shapes and types: a private value must not end up in a log
        inside = ", ".join(f"{name}: {str(v.dtype)[6:]}{list(v.shape)}" for name, v in self._fields.items())
        return f"Records({inside})"

    def subset(self, index: Tensor) -> Records:
        """The records at ``index`` (int64 ``[k]`` or bool ``[n]``), as Records of their own."""
        return Records(self[index], num_classes=self.num_classes, check_finite=False)

    def split(self, fraction: float, seed: int) -> tuple[Records, Records]:
        """Two disjoint parts, the first with ``round(fraction * n)`` records, chosen by a public seed.

        >>> first, second = Records({"input": torch.arange(10.0)}).split(0.8, seed=0)
        >>> len(first), len(second)
        (8, 2)
        """
        size = round(fraction * self._length)
        if size in (0, self._length):
            raise DataFileError(
                f"fraction={fraction} of {self._length} records leaves one part empty. Take a less extreme "
                "one."
            )
        # RandomState's stream is frozen by NumPy's compatibility policy, so a split stays the same for years
        order = torch.from_numpy(np.random.RandomState(seed).permutation(self._length))
        return self.subset(order[:size].sort().values), self.subset(order[size:].sort().values)

    def without(self, name: str) -> Records:
        """The records without one of their fields."""
        fields = {key: value for key, value in self._fields.items() if key != name}
        return Records(fields, num_classes=self.num_classes, check_finite=False)

    def set_aside(self, share: float, seed: int, by: str | None = None) -> tuple[Records, Records]:
        """Two disjoint parts, of which the second holds about ``share`` of the records.

        Where a record goes follows from what it holds, how many equal ones stand before it, and the public
        seed. So one record more or less moves no other one, as `split` would.

        Args:
            share: of the second part.
            seed: public.
            by: a field whose value alone decides, such as that of the user: all records of one go together.

        >>> rest, aside = Records({"input": torch.arange(1000.0)}).set_aside(0.2, seed=0)
        >>> len(rest) + len(aside), 150 < len(aside) < 250
        (1000, True)
        """
        aside = self.which_aside(share, seed, by)
        return self.subset(~aside), self.subset(aside)

    def which_aside(self, share: float, seed: int, by: str | None = None) -> Tensor:
        """For each record, whether `set_aside` puts it into the second part: bool ``[n]``."""
        aside = torch.tensor([number < share * 2**64 for number in self._numbers(seed, by)])
        if bool(aside.all()) or not bool(aside.any()):
            raise DataFileError(f"share={share} leaves one part without records. Take another one.")
        return aside

    def groups(self, count: int, by: str | None = None) -> Tensor:
        """The group of each record, from 0, among so many: int64 ``[n]``; one record moves no other one.

        Args:
            count: of the groups.
            by: a field whose value alone decides: all records of a user go together.
        """
        return torch.tensor([number * count >> 64 for number in self._numbers(1, by)])

    def _numbers(self, seed: int, by: str | None) -> Iterator[int]:
        """A number below 2^64 for each record, which follows from what it holds and how many equal ones are
        before it; or from the field ``by`` alone."""
        flat = [
            self._fields[name].detach().cpu().contiguous().reshape(self._length, -1).view(torch.uint8).numpy()
            for name in (sorted(self._fields) if by is None else [by])
        ]
        seen: dict[bytes, int] = {}
        for i in range(self._length):
            digest = hashlib.blake2b(digest_size=16, key=seed.to_bytes(8, "little", signed=True))
            for rows in flat:
                digest.update(rows[i].data)
            before = seen.get(digest.digest(), 0) if by is None else 0
            seen[digest.digest()] = before + 1
            digest.update(before.to_bytes(8, "little"))
            yield int.from_bytes(digest.digest()[:8], "little")

    def fingerprint(self) -> str:
        """SHA-256 (hexadecimal) of names, types, shapes and content; computed once.

        It goes into private files only: a hash of private data can confirm a guess at them.
        """
        if self._fingerprint is None:
            digest = hashlib.sha256()
            for name in sorted(self._fields):
                value = self._fields[name].detach().cpu().contiguous()
                digest.update(f"{name}|{value.dtype}|{list(value.shape)}|".encode())
                if value.numel():
                    digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
            self._fingerprint = digest.hexdigest()
        return self._fingerprint


@dataclass(frozen=True)
class DataSet:
    """A named data set: private training records, a test set, and the public numbers that go with them.

    Attributes:
        name: how the set is called in statements and file names.
        train: the private records. A field ``weight`` [n], from 0 to 1, multiplies their losses.
        test: records for evaluation, not covered by the guarantee.
        population: the public number of training records, which sets the sampling rate.
        num_classes: labels lie in ``0 .. num_classes - 1``; how many numbers a model answers with, which is 1
            for a regression, and the number of labels of a multi-label set.
        description: what a record's input is, in a line.
        class_names: a name for each class, or empty.
        vocabulary_size: for token inputs, the number of token ids (0 is padding); None otherwise.
        task: ``classification`` by the field ``label``; or by the field ``target`` of floating-point numbers
            ``regression``, ``[n]``, or ``multi-label``, ``[n, num_classes]`` of zeros and ones.
        target_range: of a regression, the public numbers that the targets -1 and 1 stand for.
        target_log: whether a target t stands for low - 1 + (1 + high - low)^((t + 1) / 2) of that range, and
            not for a number as far along it.
        schema: what was declared of a table, as plain values; with it a published model can be used.
        numeric_columns: of an input ``[d]``, those that a declaration makes numbers within [-1, 1]; all
            others of a table are zeros and ones. Empty where nothing is declared.

    >>> rows = Records({"input": torch.zeros(4, 2), "label": torch.tensor([0, 1, 0, 1])})
    >>> DataSet("toy", train=rows, test=rows, population=4, num_classes=2).input_shape
    (2,)
    """

    name: str
    train: Records
    test: Records
    population: int
    num_classes: int
    description: str = ""
    class_names: tuple[str, ...] = ()
    vocabulary_size: int | None = None
    task: str = "classification"
    target_range: tuple[float, float] = (-1.0, 1.0)
    target_log: bool = False
    schema: Mapping[str, Any] | None = None
    numeric_columns: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.population, bool) or not isinstance(self.population, int) or self.population < 1:
            raise DataFileError(
                f"population={self.population!r} must be a positive whole number: the public size of the set."
            )
        if self.task not in TASK_NAMES:
            raise DataFileError(f"task={self.task!r} must be one of {', '.join(TASK_NAMES)}.")
        least = 2 if self.task == "classification" else 1
        if self.num_classes < least or (self.task == "regression" and self.num_classes > 1):
            raise DataFileError(
                f"num_classes={self.num_classes} must be 1 for a regression, at least 1 for labels, and at "
                "least 2 for classes."
            )
        if self.class_names and len(self.class_names) != self.num_classes:
            raise DataFileError(
                f"class_names has {len(self.class_names)} names for num_classes={self.num_classes} classes."
            )
        if not len(self.train):
            raise DataFileError("train holds no records.")
        learnt = "label" if self.task == "classification" else "target"
        for part, records in (("train", self.train), ("test", self.test)):
            missing = {"input", learnt} - set(records.fields)
            if missing:
                raise DataFileError(
                    f"{part} lacks the fields {sorted(missing)}; it has {sorted(records.fields)}."
                )
            weight = records.fields.get(WEIGHT)
            if weight is not None and (weight.ndim != 1 or not bool(((weight >= 0) & (weight <= 1)).all())):
                raise DataFileError(
                    f"the field 'weight' of {part} must be one number from 0 to 1 per record, [n]: weights "
                    "over their public upper bound. Divide them by it."
                )
            if self.task == "classification":
                _check_labels(records.fields["label"], self.num_classes)
                continue
            shape = () if self.task == "regression" else (self.num_classes,)
            target = records.fields["target"]
            if tuple(target.shape[1:]) != shape or not target.is_floating_point():
                raise DataFileError(
                    f"the field 'target' of {part} has type {target.dtype} and shape {list(target.shape)}; a "
                    f"{self.task} takes floating-point numbers [{', '.join(map(str, ('n', *shape)))}]."
                )
        if self.train.fields["input"].shape[1:] != self.test.fields["input"].shape[1:]:
            raise DataFileError(
                f"a train input has shape {self.input_shape}, a test input "
                f"{tuple(self.test.fields['input'].shape[1:])}. Prepare both in the same way."
            )

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one record's input."""
        return tuple(self.train.fields["input"].shape[1:])


def with_test_records(
    rows: Records, test: Records | None, share: float | None, population: int
) -> tuple[Records, Records, int]:
    """Training records, test records and the public number of training records.

    Args:
        rows: the private records; a field ``aside`` says which ones to set aside.
        test: others to evaluate on, or None.
        share: without them, the share of the private ones to set aside; 0 for none. Every run sets the same
            ones aside, whatever its seed: scores on them are published, so that training on them would
            protect nobody.
        population: the public number of private records.

    Raises:
        DataFileError: neither or both of test and share are given, or a population that is no number above 0.
    """
    if population < 1:
        raise DataFileError(f"population={population} must be positive: it is the public number of records.")
    if (test is None) == (share is None):
        raise DataFileError(
            "the records to evaluate on are missing or named twice. Give one of --test and --test-share. "
            "What the evaluation says of these records is published, and no epsilon covers them."
        )
    if test is not None:
        return rows, test, population
    assert share is not None
    if ASIDE in rows.fields:
        which, rows = rows.fields[ASIDE], rows.without(ASIDE)
        train, aside = rows.subset(~which), rows.subset(which)
    elif share:
        train, aside = rows.set_aside(share, seed=0)
    else:
        train, aside = rows, rows.subset(torch.arange(0))
    if OWNER in aside.fields:
        aside = aside.without(OWNER)
    return train, aside, max(1, round(population * (1 - share)))


def _check_labels(label: Tensor, num_classes: int | None) -> None:
    if label.ndim != 1 or label.is_floating_point() or label.is_complex() or label.dtype == torch.bool:
        raise DataFileError(
            f"label has type {label.dtype} and shape {list(label.shape)}; it must be one whole class number "
            "per record, [n]. Use label.long() or label.squeeze(1)."
        )
    if bool((label < 0).any()) or (num_classes is not None and bool((label >= num_classes).any())):
        bound = "is negative" if num_classes is None else f"lies outside 0 .. {num_classes - 1}"
        raise DataFileError(f"a label {bound}. Recode the classes from 0, or correct num_classes.")


def _check_finite(name: str, value: Tensor) -> None:
    if not (value.is_floating_point() or value.is_complex()):
        return
    # a finite sum proves all values finite and is one fast pass; an overflow of the sum falls through to the
    # exact test
    if bool(value.sum().isfinite()):
        return
    rows = (~value.reshape(len(value), -1).isfinite().all(1)).nonzero().flatten()
    if len(rows):
        raise DataFileError(
            f"fields[{name!r}] has NaN or infinite values in {len(rows)} records (the first is number "
            f"{int(rows[0])}). Repair or drop them before training."
        )
