"""The journal of a data set's runs: every release is booked in it before it leaves.

Each line of the file is one entry. Entries are parsed and checked here, where they cross the file boundary;
the rest of the library sees dataclasses. A field that is missing, of another type or not known is a
`JournalError` that names line and field. Several runs over one data set may share a journal: every entry
names its run.

Nothing in the file shows a careful edit: `equipoise.statements` signs. Earlier versions wrote lines of the
type "snapshot" now and then, sums of the lines before; they are passed over.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Self

from equipoise._files import PathLike
from equipoise.privacy.accounting.private_search import PrivateSearch
from equipoise.privacy.draw import Draw
from equipoise.privacy.errors import JournalError
from equipoise.privacy.ledger.write_ahead_log import WriteAheadLog
from equipoise.privacy.plan import PrivacyPlan, published

if TYPE_CHECKING:
    from equipoise.privacy.ledger.run_record import RunRecord


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_positive(value: Any) -> bool:
    # a JSON integer may be beyond every float; NaN fails both comparisons
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < value <= sys.float_info.max


Count = int
Positive = float
FromZero = float
Numbers = Mapping[str, float]
Texts = tuple[str, ...]

#: By the annotation of a field: what it must hold, in words for the error and as a type or a check.
_HOLDS: dict[str, tuple[str, type | Callable[[Any], bool]]] = {
    "str": ("a text", str),
    "str | None": ("a text or null", lambda value: value is None or isinstance(value, str)),
    "bool": ("true or false", bool),
    "Count": ("a count from 0", _is_count),
    "FromZero": ("a number from 0", lambda value: value is not False and (value == 0 or _is_positive(value))),
    "Positive | None": ("a positive number or null", lambda value: value is None or _is_positive(value)),
    "Numbers": (
        "positive numbers by release name",
        lambda value: isinstance(value, dict) and all(map(_is_positive, value.values())),
    ),
    "Texts": (
        "a list of texts",
        lambda value: isinstance(value, (list, tuple)) and {str}.issuperset(map(type, value)),
    ),
    "PrivacyPlan": ("an object", dict),
    "PrivateSearch": ("an object", dict),
}


def _error(line: int, field: str, reason: str) -> JournalError:
    return JournalError(
        f"line {line} of the journal was not written by this library ({field} {reason}): the file was "
        "edited, or it is another file. Nothing more can be released under it; restore it from a copy"
    )


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

    index: Count
    name: str
    ordinal: Count
    digest: str
    data: str

    @classmethod
    def of(cls, draw: Draw, data: str) -> Self:
        return cls(index=draw.index, name=draw.name, ordinal=draw.ordinal, digest=draw.parameters, data=data)


#: What the parts of a draw are called in a line.
_OF_DRAW = {"index": "index", "draw": "name", "ordinal": "ordinal", "hash": "digest", "data": "data"}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of the journal: `kind` stands under "type", the fields under their names, those of a draw too.

    A field that has its default value is left out.

    Example:
        >>> Entry.from_json(CloseEntry(run="a1").to_json(), line=1)
        CloseEntry(run='a1', stop_fixed_beforehand=False)
        >>> Entry.from_json({"type": "close", "run": 3}, line=7)
        Traceback (most recent call last):
        ...
        equipoise.privacy.errors.JournalError: line 7 of the journal ... (run must be a text, but is 3)...
    """

    kind: ClassVar[str]
    #: Further fields of a line, which follow from the others.
    derived: ClassVar[tuple[str, ...]] = ()
    #: Further fields of a line, which are the same in all of this kind.
    constants: ClassVar[dict[str, str]] = {}
    run: str

    def __init_subclass__(cls) -> None:
        if "kind" in vars(cls):  # the room that owns a kind of line says so by defining it
            _KINDS[cls.kind] = cls

    def fitting(self, record: RunRecord) -> RunRecord:
        """The run's record, as it must be to take this line in."""
        return record

    def to_json(self) -> dict[str, Any]:
        """The line's content as plain values."""
        found: dict[str, Any] = {"type": self.kind}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "draw":
                found |= {} if value is None else {n: getattr(value, of) for n, of in _OF_DRAW.items()}
            elif field.default is MISSING or value != field.default:
                found[field.name] = value.describe() if hasattr(value, "describe") else value
        return found | {name: getattr(self, name) for name in self.derived} | self.constants

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
        if isinstance(kind, str) and kind not in _KINDS:
            published.Hole  # noqa: B018 - that room has kinds of its own, which its import defines
        if not isinstance(kind, str) or kind not in _KINDS:
            raise _error(line, "type", f"is of the unknown type {kind!r:.60}")
        return _KINDS[kind]._of_row(values, line)

    @classmethod
    def _of_row(cls, row: Mapping[str, Any], line: int) -> Entry:
        """The entry of a line: every field is there and holds what it must, and there is no other.

        Every release passes here twice, before it is written and when the journal is read. So a field that
        shows in its type costs no call.
        """
        found: dict[str, Any] = {}
        for name, (what, fits), is_needed, read in _checks_of(cls.kind):
            if name in row:
                value = found[name] = row[name]
                if not (isinstance(value, fits) if isinstance(fits, type) else fits(value)):
                    raise _error(line, name, f"must be {what}, but is {value!r:.60}")
                if read is not None:
                    try:
                        found[name] = read(value)
                    except _MALFORMED as error:
                        said = f"cannot be read: {type(error).__name__}: {error!s:.200}"
                        raise _error(line, name, said) from error
            elif is_needed or (name in _OF_DRAW and not _OF_DRAW.keys().isdisjoint(row)):
                raise _error(line, name, "is missing")
        if len(row) > len(found) + 1:
            further = min(row.keys() - found.keys() - {"type"})
            raise _error(line, f"{further!r:.60}", "is not a field of such an entry")
        if "index" in found and "draw" in found:
            found["draw"] = BookedDraw(**{of: found.pop(name) for name, of in _OF_DRAW.items()})
        further_fields = [(name, found.pop(name)) for name in (*cls.constants, *cls.derived)]
        made = cls(**found)
        # They cover the plan as it is read, so that no field can be edited by itself.
        for name, said in further_fields[len(cls.constants) :]:
            if said != getattr(made, name):
                wanted = getattr(made, name)
                raise _error(line, name, f"is {said!r:.80}, but the rest of the line gives {wanted!r}")
        return made


_KINDS: dict[str, type[Entry]] = {}
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
#: By the annotation of a field: what makes its value of what a line holds.
_READ: dict[str, Callable[[Any], Any]] = {
    "PrivacyPlan": PrivacyPlan.from_description,
    "PrivateSearch": PrivateSearch.from_description,
    "Texts": tuple,
}
_Check = tuple[str, tuple[str, Any], bool, Callable[[Any], Any] | None]


@functools.cache
def _checks_of(kind: str) -> list[_Check]:
    """The fields of a line of this kind, what each must hold, whether it must be there, and its reader."""
    entry = _KINDS[kind]
    found: list[_Check] = [(name, _HOLDS["str"], True, None) for name in entry.derived]
    found += [
        (name, (repr(value), functools.partial(operator.eq, value)), True, None)
        for name, value in entry.constants.items()
    ]
    for field in fields(entry):
        needed = field.default is MISSING
        if field.name == "draw":
            types = {one.name: str(one.type) for one in fields(BookedDraw)}
            found += [(name, _HOLDS[types[of]], needed, None) for name, of in _OF_DRAW.items()]
        else:
            kind_of = str(field.type)
            found.append((field.name, _HOLDS[kind_of], needed, _READ.get(kind_of)))
    return found


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
    derived = ("fingerprint", "noise")
    plan: PrivacyPlan
    data: str
    private: bool
    owners: str = ""

    def fitting(self, record: RunRecord) -> RunRecord:
        return self.plan.fitting(record)

    @property
    def fingerprint(self) -> str:
        """The name of the plan."""
        return self.plan.fingerprint()

    @property
    def noise(self) -> str:
        """The arithmetic of the plan's noise."""
        return self.plan.arithmetic


@dataclass(frozen=True, kw_only=True)
class ReleaseEntry(Entry):
    """Noised sums of one draw leave, as one event.

    Attributes:
        draw: that the sums are of.
        bounds: add-or-remove bound of every sum, by release name.
        pattern: sorted names of the planned releases that it counts as; it may hold more than left.
        answer: keyed digest of the exact sums.
        joint: identity of the correlated noise, or None.
        multipliers: noise multiplier of every sum.
    """

    kind = "release"
    draw: BookedDraw
    bounds: Numbers
    pattern: Texts
    answer: str
    joint: str | None
    multipliers: Numbers


@dataclass(frozen=True, kw_only=True)
class VoidEntry(Entry):
    """The draw of this index is not repeated any more: its question has changed."""

    kind = "void"
    index: Count


@dataclass(frozen=True, kw_only=True)
class CloseEntry(Entry):
    """The run has ended: nothing more is released.

    Attributes:
        stop_fixed_beforehand: whether the number of its releases did not follow from any of them. Then what
            it reserved and did not use is free for others.
    """

    kind = "close"
    stop_fixed_beforehand: bool = False


@dataclass(frozen=True, kw_only=True)
class SearchEntry(Entry):
    """The run was chosen among a random number of runs."""

    kind = "search"
    search: PrivateSearch


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
    with closing(Journal(path, read_only=True)) as journal:
        return journal.entries()
