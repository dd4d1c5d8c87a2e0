"""The journal of a data set's runs: every release is booked in it before it leaves.

Each line of the file is one entry. Entries are parsed and checked here, where they cross the file boundary;
the rest of the library sees dataclasses. A field that is missing, of another type or not known is a
`JournalError` that names line and field. Several runs over one data set may share a journal: every entry
names its run.

Nothing in the file shows a careful edit: `equipoise.statements` signs. Earlier versions wrote lines of the
type "snapshot" now and then, sums of the lines before; they are passed over.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, ClassVar, Self

from equipoise._files import PathLike
from equipoise.privacy.accounting.private_search import PrivateSearch
from equipoise.privacy.draw import Draw
from equipoise.privacy.errors import JournalError
from equipoise.privacy.ledger.write_ahead_log import WriteAheadLog
from equipoise.privacy.plan import PrivacyPlan


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_positive(value: Any) -> bool:
    # a JSON integer may be beyond every float; NaN fails both comparisons
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < value <= sys.float_info.max


def _are_positive(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_positive, value.values()))


def _are_texts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and {str}.issuperset(map(type, value))


_Fields = Mapping[str, tuple[str, type | UnionType | Callable[[Any], bool]]]
"""The fields of a line: what each must hold, in words for the error and as a type or a check."""

_TEXT = ("a text", str)
_COUNT = ("a count from 0", _is_count)
_NUMBERS = ("positive numbers by release name", _are_positive)
_OBJECT = ("an object", dict)
_DRAW: _Fields = {"index": _COUNT, "draw": _TEXT, "ordinal": _COUNT, "hash": _TEXT, "data": _TEXT}


def _error(line: int, field: str, reason: str) -> JournalError:
    return JournalError(
        f"line {line} of the journal was not written by this library ({field} {reason}): the file was "
        "edited, or it is another file. Nothing more can be released under it; restore it from a copy"
    )


def _check(row: Mapping[str, Any], fields: _Fields, line: int) -> None:
    """Every field is there and holds what it must, and there is no other.

    Every release passes here twice, before it is written and when the journal is read. So a field that is
    told by its type costs no call.
    """
    for name, (what, fits) in fields.items():
        if name not in row:
            raise _error(line, name, "is missing")
        value = row[name]
        if not (isinstance(value, fits) if isinstance(fits, (type, UnionType)) else fits(value)):
            raise _error(line, name, f"must be {what}, but is {value!r:.60}")
    if len(row) > len(fields):
        further = min(row.keys() - fields.keys())
        raise _error(line, f"{further!r:.60}", "is not a field of such an entry")


@dataclass(frozen=True, kw_only=True, slots=True)
class BookedDraw:
    """The draw that an entry belongs to.

    Attributes:
        index: number of the draw in its run; it keys records and noise.
        name: the draw name of the plan.
        ordinal: how many draws of this name came before.
        digest: of everything that the release depends on, except the records.
        data: digest of the records.
    """

    index: int
    name: str
    ordinal: int
    digest: str
    data: str

    @classmethod
    def of(cls, draw: Draw, data: str) -> Self:
        return cls(index=draw.index, name=draw.name, ordinal=draw.ordinal, digest=draw.parameters, data=data)

    def fields(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "draw": self.name,
            "ordinal": self.ordinal,
            "hash": self.digest,
            "data": self.data,
        }

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Self:
        return cls(
            index=row["index"],
            name=row["draw"],
            ordinal=row["ordinal"],
            digest=row["hash"],
            data=row["data"],
        )


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of the journal.

    `kind` is what stands under "type", and `FIELDS` are the line's other fields, except "run".

    Example:
        >>> Entry.from_json(CloseEntry(run="a1").to_json(), line=1)
        CloseEntry(run='a1', stop_fixed_beforehand=False)
        >>> Entry.from_json({"type": "close", "run": 3}, line=7)
        Traceback (most recent call last):
        ...
        equipoise.privacy.errors.JournalError: line 7 of the journal ... (run must be a text, but is 3)...
    """

    kind: ClassVar[str]
    FIELDS: ClassVar[_Fields] = {}
    run: str

    def to_json(self) -> dict[str, Any]:
        """The line's content as plain values."""
        draw = getattr(self, "draw", None)
        booked = {} if draw is None else draw.fields()
        own = {name: getattr(self, name) for name in self.FIELDS if name not in booked}
        return {"type": self.kind, "run": self.run, **booked, **own}

    @staticmethod
    def from_json(values: Mapping[str, Any], line: int) -> Entry:
        """The entry that `to_json` wrote.

        Args:
            values: content of the line.
            line: its number in the file, for the error.

        Raises:
            JournalError: naming the line and the field that is not as this library writes it.
        """
        if "type" not in values:
            raise _error(line, "type", "is missing")
        kind = values["type"]
        if not isinstance(kind, str) or kind not in _KINDS:
            raise _error(line, "type", f"is of the unknown type {kind!r:.60}")
        entry, fields = _KINDS[kind], _FIELDS_OF[kind]
        # A value may be disclosed that comes from no open draw.
        if entry is DisclosureEntry and "index" in values:
            fields = {**fields, **_DRAW}
        if entry is RunEntry and "owners" in values:
            fields = {**fields, "owners": _TEXT}
        if entry is CloseEntry and "stop_fixed_beforehand" in values:
            fields = {**fields, "stop_fixed_beforehand": ("true or false", bool)}
        _check(values, fields, line)
        return entry._of_row(values, line)

    @classmethod
    def _of_row(cls, row: Mapping[str, Any], line: int) -> Entry:
        """The entry of a line whose fields were checked."""
        if "ordinal" not in cls.FIELDS:
            return cls(run=row["run"], **{name: row[name] for name in cls.FIELDS})
        own = {name: row[name] for name in cls.FIELDS if name not in _DRAW}
        return cls(run=row["run"], draw=BookedDraw.of_row(row), **own)  # type: ignore[call-arg]


@dataclass(frozen=True, kw_only=True)
class RunEntry(Entry):
    """A run begins and reserves its plan.

    Attributes:
        plan: what the run may release.
        data: digest of the records.
        private: whether the key is secret.
        owners: of users, how many records there are and a digest of who owns which; "" for records.
    """

    kind = "run"
    FIELDS: ClassVar[_Fields] = {
        "plan": _OBJECT,
        "fingerprint": _TEXT,
        "data": _TEXT,
        "private": ("true or false", bool),
        "noise": _TEXT,
    }
    plan: PrivacyPlan
    data: str
    private: bool
    owners: str = ""

    @property
    def fingerprint(self) -> str:
        """The name of the plan."""
        return self.plan.fingerprint()

    @property
    def noise(self) -> str:
        """The arithmetic of the plan's noise."""
        return self.plan.arithmetic

    def to_json(self) -> dict[str, Any]:
        return (
            super().to_json()
            | {"plan": self.plan.describe()}
            | ({"owners": self.owners} if self.owners else {})
        )

    @classmethod
    def _of_row(cls, row: Mapping[str, Any], line: int) -> Entry:
        try:
            plan = PrivacyPlan.from_description(row["plan"])
            fingerprint = plan.fingerprint()
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            raise _error(line, "plan", f"cannot be read: {type(error).__name__}: {error!s:.200}") from error
        # The name covers the plan as it is read, so that no field can be edited by itself.
        if row["fingerprint"] != fingerprint:
            raise _error(
                line, "plan", "does not have the fingerprint that the line gives: the plan was edited"
            )
        if row["noise"] != plan.arithmetic:
            raise _error(line, "noise", f"is {row['noise']!r}, but the plan's is {plan.arithmetic!r}")
        return cls(
            run=row["run"],
            plan=plan,
            data=row["data"],
            private=row["private"],
            owners=row.get("owners", ""),
        )


@dataclass(frozen=True, kw_only=True)
class ReleaseEntry(Entry):
    """Noised sums of one draw leave, as one event.

    Attributes:
        draw: that the sums are of.
        bounds: add-or-remove bound of every sum, by release name.
        multipliers: noise multiplier of every sum.
        pattern: sorted names of the planned releases that it counts as; it may hold more than left.
        answer: keyed digest of the exact sums.
        joint: identity of the correlated noise, or None.
    """

    kind = "release"
    FIELDS: ClassVar[_Fields] = {
        **_DRAW,
        "bounds": _NUMBERS,
        "pattern": ("a list of texts", _are_texts),
        "answer": _TEXT,
        "joint": ("a text or null", str | None),
        "multipliers": _NUMBERS,
    }
    draw: BookedDraw
    bounds: Mapping[str, float]
    pattern: tuple[str, ...]
    answer: str
    joint: str | None
    multipliers: Mapping[str, float]

    @classmethod
    def _of_row(cls, row: Mapping[str, Any], line: int) -> Entry:
        return super()._of_row({**row, "pattern": tuple(row["pattern"])}, line)


@dataclass(frozen=True, kw_only=True)
class UnprovenEntry(Entry):
    """A value leaves with noise that no proof covers.

    Attributes:
        draw: that the value is of.
        name: as planned.
        std: standard deviation of the noise.
        hole: what is not proved.
        worst_case_multiplier: std over a proved worst-case change of the value; None without one.
        answer: keyed digest of the exact value.
    """

    kind = "unproven"
    FIELDS: ClassVar[_Fields] = {
        **_DRAW,
        "name": _TEXT,
        "std": ("a number from 0", lambda value: (value == 0 and value is not False) or _is_positive(value)),
        "hole": _TEXT,
        "worst_case_multiplier": (
            "a positive number or null",
            lambda value: value is None or _is_positive(value),
        ),
        "answer": _TEXT,
    }
    draw: BookedDraw
    name: str
    std: float
    hole: str
    worst_case_multiplier: float | None
    answer: str

    @property
    def question(self) -> tuple[float, float | None, str]:
        """What was asked: with anything else, the noise must not be given again."""
        return self.std, self.worst_case_multiplier, self.answer


@dataclass(frozen=True, kw_only=True)
class DisclosureEntry(Entry):
    """A private value leaves as it is.

    Attributes:
        hole: why, in a sentence.
        draw: that the value is of; None where it comes from no open draw.
    """

    kind = "hole"
    FIELDS: ClassVar[_Fields] = {
        "kind": ("'disclose'", lambda value: value == "disclose"),
        "hole": _TEXT,
    }  # and the draw's, if there is one
    hole: str
    draw: BookedDraw | None = None

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {"kind": "disclose"}

    @classmethod
    def _of_row(cls, row: Mapping[str, Any], line: int) -> Entry:
        draw = BookedDraw.of_row(row) if "index" in row else None
        return cls(run=row["run"], hole=row["hole"], draw=draw)


@dataclass(frozen=True, kw_only=True)
class VoidEntry(Entry):
    """The draw of this index is not repeated any more: its question has changed."""

    kind = "void"
    FIELDS: ClassVar[_Fields] = {"index": _COUNT}
    index: int


@dataclass(frozen=True, kw_only=True)
class CloseEntry(Entry):
    """The run has ended: nothing more is released.

    Attributes:
        stop_fixed_beforehand: whether the number of its releases did not follow from any of them. Then what
            it reserved and did not use is free for others. The line has the key only where it is true.
    """

    kind = "close"
    stop_fixed_beforehand: bool = False

    def to_json(self) -> dict[str, Any]:
        fixed = {"stop_fixed_beforehand": True} if self.stop_fixed_beforehand else {}
        return super().to_json() | fixed

    @classmethod
    def _of_row(cls, row: Mapping[str, Any], line: int) -> Entry:
        return cls(run=row["run"], stop_fixed_beforehand=row.get("stop_fixed_beforehand", False))


@dataclass(frozen=True, kw_only=True)
class SearchEntry(Entry):
    """The run was chosen among a random number of runs."""

    kind = "search"
    FIELDS: ClassVar[_Fields] = {"search": _OBJECT}
    search: PrivateSearch

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {"search": self.search.describe()}

    @classmethod
    def _of_row(cls, row: Mapping[str, Any], line: int) -> Entry:
        try:
            return cls(run=row["run"], search=PrivateSearch.from_description(row["search"]))
        except (KeyError, TypeError, ValueError) as error:
            raise _error(line, "search", f"cannot be read: {type(error).__name__}: {error!s:.200}") from error


_KINDS: dict[str, type[Entry]] = {
    one.kind: one
    for one in (
        RunEntry,
        ReleaseEntry,
        UnprovenEntry,
        DisclosureEntry,
        VoidEntry,
        CloseEntry,
        SearchEntry,
    )
}
_FIELDS_OF: dict[str, _Fields] = {
    kind: {"type": _TEXT, "run": _TEXT, **entry.FIELDS} for kind, entry in _KINDS.items()
}


class Journal(WriteAheadLog):
    """The entries of one or several runs; arguments as for `WriteAheadLog`.

    Example:
        >>> journal = Journal()
        >>> lines = journal.append(CloseEntry(run="a1"))
        >>> journal.entries()
        [CloseEntry(run='a1', stop_fixed_beforehand=False)]
    """

    def entries(self) -> list[Entry]:
        """All whole entries.

        Raises:
            JournalError: for a damaged line that is not the last, or one that this library does not write.
        """
        return list(self)

    def __iter__(self) -> Iterator[Entry]:
        """The entries one by one, so that a long journal need not fit in memory.

        Raises:
            JournalError: as `entries`.
        """
        return (entry for _, entry in self.since())

    def since(self, start: int = 0, lines: int = 0) -> Iterator[tuple[int, Entry]]:
        """The entries behind a `length` of so many lines, each with the length that holds it too."""
        for number, (end, row) in enumerate(self.rows(start), lines + 1):
            if row.get("type") != "snapshot":
                yield end, Entry.from_json(row, number)

    def append(self, entry: Entry) -> int:
        """Write an entry and flush it; the answer is the `length` with it.

        Raises:
            JournalError: if it cannot be written whole, or not be read again; nothing may leave then.
        """
        values = entry.to_json()
        # A line that cannot be read again would lock the whole journal, other runs' charges included.
        Entry.from_json(values, line=0)
        return self.write(values)


def read_journal(path: PathLike) -> list[Entry]:
    """All entries of a file, which is only read.

    Raises:
        JournalError: it cannot be read, or this library did not write it.
    """
    journal = Journal(path, read_only=True)
    try:
        return journal.entries()
    finally:
        journal.close()
