"""The journal of a data set's runs: every release is booked in it before it leaves.

Each line of the file is one entry. Entries are parsed and checked here, where they cross the file boundary;
the rest of the library sees dataclasses. A field that is missing, of another type or not known is a
`JournalError` that names line and field. Several runs over one data set may share a journal: every entry
names its run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from equipoise.privacy.accounting.private_search import PrivateSearch
from equipoise.privacy.draw import Draw
from equipoise.privacy.errors import JournalError
from equipoise.privacy.ledger.write_ahead_log import WriteAheadLog
from equipoise.privacy.plan import PrivacyPlan

NOISES = ("floating_point", "grid")


class _Row:
    """The fields of one line; each is checked when it is taken, and all must be taken."""

    def __init__(self, values: Mapping[str, Any], line: int) -> None:
        self.left = dict(values)
        self.line = line

    def error(self, field: str, reason: str) -> JournalError:
        return JournalError(
            f"line {self.line} of the journal was not written by this library ({field} {reason}): the file "
            "was edited, or it is another file. Nothing more can be released under it; restore it from a copy"
        )

    def take(self, field: str, what: str, fits: Callable[[Any], bool]) -> Any:
        if field not in self.left:
            raise self.error(field, "is missing")
        value = self.left.pop(field)
        if not fits(value):
            raise self.error(field, f"must be {what}, but is {value!r:.60}")
        return value

    def text(self, field: str) -> str:
        return str(self.take(field, "a text", lambda v: isinstance(v, str)))

    def text_or_none(self, field: str) -> str | None:
        value = self.take(field, "a text or null", lambda v: v is None or isinstance(v, str))
        return None if value is None else str(value)

    def flag(self, field: str) -> bool:
        return bool(self.take(field, "true or false", lambda v: isinstance(v, bool)))

    def count(self, field: str) -> int:
        whole = self.take(field, "a count from 0", lambda v: isinstance(v, int) and not isinstance(v, bool))
        if whole < 0:
            raise self.error(field, f"must be a count from 0, but is {whole!r:.60}")
        return int(whole)

    def texts(self, field: str) -> tuple[str, ...]:
        def fits(value: Any) -> bool:
            return isinstance(value, list) and all(isinstance(item, str) for item in value)

        return tuple(self.take(field, "a list of texts", fits))

    def numbers(self, field: str) -> dict[str, float]:
        def fits(value: Any) -> bool:
            return isinstance(value, dict) and all(map(_is_positive, value.values()))

        values = self.take(field, "positive numbers by release name", fits)
        return {name: float(value) for name, value in values.items()}

    def end(self) -> None:
        if self.left:
            raise self.error(f"{min(self.left)!r:.60}", "is not a field of such an entry")


def _is_positive(value: Any) -> bool:
    # a JSON integer may be beyond every float
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < value <= sys.float_info.max


def _is_zero(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == 0


@dataclass(frozen=True, kw_only=True)
class BookedDraw:
    """The draw that an entry belongs to.

    Attributes:
        index: number of the draw in its run; it keys records and noise.
        name: the draw name of the plan.
        ordinal: how many draws of this name came before.
        digest: of everything besides the records that the release depends on.
        data: digest of the records.
    """

    index: int
    name: str
    ordinal: int
    digest: str
    data: str

    @classmethod
    def of(cls, draw: Draw, data: str) -> Self:
        """How an open draw is booked."""
        return cls(index=draw.index, name=draw.name, ordinal=draw.ordinal, digest=draw.parameters, data=data)

    def fields(self) -> dict[str, Any]:
        """The draw's fields of an entry."""
        return {
            "index": self.index,
            "draw": self.name,
            "ordinal": self.ordinal,
            "hash": self.digest,
            "data": self.data,
        }

    @classmethod
    def take(cls, row: _Row) -> Self:
        """The draw that `fields` wrote."""
        return cls(
            index=row.count("index"),
            name=row.text("draw"),
            ordinal=row.count("ordinal"),
            digest=row.text("hash"),
            data=row.text("data"),
        )


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of the journal. `kind` is what stands under "type".

    Example:
        >>> Entry.from_json(CloseEntry(run="a1").to_json(), line=1)
        CloseEntry(run='a1')
        >>> Entry.from_json({"type": "close", "run": 3}, line=7)
        Traceback (most recent call last):
        ...
        equipoise.privacy.errors.JournalError: line 7 of the journal ... (run must be a text, but is 3)...
    """

    kind: ClassVar[str]
    run: str

    def to_json(self) -> dict[str, Any]:
        """The line's content as plain values."""
        return {"type": self.kind, "run": self.run, **self._fields()}

    @staticmethod
    def from_json(values: Mapping[str, Any], line: int) -> Entry:
        """The entry that `to_json` wrote.

        Args:
            values: content of the line.
            line: its number in the file, for the error.

        Raises:
            JournalError: naming the line and the field that is not as this library writes it.
        """
        row = _Row(values, line)
        kind = row.text("type")
        if kind not in _KINDS:
            raise row.error("type", f"is of the unknown type {kind!r:.60}")
        entry = _KINDS[kind]._take(row, row.text("run"))
        row.end()
        return entry

    def _fields(self) -> dict[str, Any]:
        return {}

    @classmethod
    def _take(cls, row: _Row, run: str) -> Entry:
        return cls(run=run)


@dataclass(frozen=True, kw_only=True)
class RunEntry(Entry):
    """A run begins and reserves its plan.

    Attributes:
        plan: what the run may release.
        data: digest of the records.
        private: whether the key is secret.
        noise: "floating_point" or "grid".
    """

    kind = "run"
    plan: PrivacyPlan
    data: str
    private: bool
    noise: str

    def _fields(self) -> dict[str, Any]:
        return {
            "plan": self.plan.describe(),
            "fingerprint": self.plan.fingerprint(),
            "data": self.data,
            "private": self.private,
            "noise": self.noise,
        }

    @classmethod
    def _take(cls, row: _Row, run: str) -> Entry:
        described = row.take("plan", "an object", lambda v: isinstance(v, dict))
        try:
            plan = PrivacyPlan.from_description(described)
            fingerprint = plan.fingerprint()
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            raise row.error("plan", f"cannot be read: {type(error).__name__}: {error!s:.200}") from error
        if row.text("fingerprint") != fingerprint:
            raise row.error("plan", "does not have the fingerprint that the line gives: the plan was edited")
        return cls(
            run=run,
            plan=plan,
            data=row.text("data"),
            private=row.flag("private"),
            noise=row.take("noise", f"one of {', '.join(NOISES)}", lambda v: v in NOISES),
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
    draw: BookedDraw
    bounds: Mapping[str, float]
    multipliers: Mapping[str, float]
    pattern: tuple[str, ...]
    answer: str
    joint: str | None

    def _fields(self) -> dict[str, Any]:
        return {
            **self.draw.fields(),
            "bounds": dict(self.bounds),
            "pattern": list(self.pattern),
            "answer": self.answer,
            "joint": self.joint,
            "multipliers": dict(self.multipliers),
        }

    @classmethod
    def _take(cls, row: _Row, run: str) -> Entry:
        return cls(
            run=run,
            draw=BookedDraw.take(row),
            bounds=row.numbers("bounds"),
            multipliers=row.numbers("multipliers"),
            pattern=row.texts("pattern"),
            answer=row.text("answer"),
            joint=row.text_or_none("joint"),
        )


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

    def _fields(self) -> dict[str, Any]:
        return {
            **self.draw.fields(),
            "name": self.name,
            "std": self.std,
            "hole": self.hole,
            "worst_case_multiplier": self.worst_case_multiplier,
            "answer": self.answer,
        }

    @classmethod
    def _take(cls, row: _Row, run: str) -> Entry:
        worst = row.take(
            "worst_case_multiplier", "a positive number or null", lambda v: v is None or _is_positive(v)
        )
        return cls(
            run=run,
            draw=BookedDraw.take(row),
            name=row.text("name"),
            std=float(row.take("std", "a number from 0", lambda v: _is_positive(v) or _is_zero(v))),
            hole=row.text("hole"),
            worst_case_multiplier=None if worst is None else float(worst),
            answer=row.text("answer"),
        )


@dataclass(frozen=True, kw_only=True)
class DisclosureEntry(Entry):
    """A private value leaves as it is.

    Attributes:
        hole: why, in a sentence.
        draw: that the value is of; None where it comes from no open draw.
    """

    kind = "hole"
    hole: str
    draw: BookedDraw | None = None

    def _fields(self) -> dict[str, Any]:
        draw = {} if self.draw is None else self.draw.fields()
        return {**draw, "kind": "disclose", "hole": self.hole}

    @classmethod
    def _take(cls, row: _Row, run: str) -> Entry:
        row.take("kind", "'disclose'", lambda v: v == "disclose")
        draw = BookedDraw.take(row) if "index" in row.left else None
        return cls(run=run, hole=row.text("hole"), draw=draw)


@dataclass(frozen=True, kw_only=True)
class VoidEntry(Entry):
    """The draw of this index is not repeated any more: its question has changed."""

    kind = "void"
    index: int

    def _fields(self) -> dict[str, Any]:
        return {"index": self.index}

    @classmethod
    def _take(cls, row: _Row, run: str) -> Entry:
        return cls(run=run, index=row.count("index"))


@dataclass(frozen=True, kw_only=True)
class CloseEntry(Entry):
    """The run has ended: what it reserved and did not use is free for others."""

    kind = "close"


@dataclass(frozen=True, kw_only=True)
class SearchEntry(Entry):
    """The run was chosen among a random number of runs."""

    kind = "search"
    search: PrivateSearch

    def _fields(self) -> dict[str, Any]:
        return {"search": self.search.describe()}

    @classmethod
    def _take(cls, row: _Row, run: str) -> Entry:
        described = row.take("search", "an object", lambda v: isinstance(v, dict))
        try:
            return cls(run=run, search=PrivateSearch.from_description(described))
        except (KeyError, TypeError, ValueError) as error:
            raise row.error("search", f"cannot be read: {type(error).__name__}: {error!s:.200}") from error


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


class Journal(WriteAheadLog):
    """The entries of one or several runs; arguments as for `WriteAheadLog`.

    Example:
        >>> journal = Journal()
        >>> journal.append(CloseEntry(run="a1"))
        >>> journal.entries()
        [CloseEntry(run='a1')]
    """

    def entries(self) -> list[Entry]:
        """All whole entries.

        Raises:
            JournalError: for a damaged line that is not the last, or one that this library does not write.
        """
        return [Entry.from_json(row, line) for line, row in enumerate(self.read(), start=1)]

    def append(self, entry: Entry) -> None:
        """Write an entry and flush it.

        Raises:
            JournalError: if it cannot be written whole, or not be read again; nothing may leave then.
        """
        values = entry.to_json()
        Entry.from_json(values, line=0)
        self.write(values)


def read_journal(path: str | os.PathLike[str]) -> list[Entry]:
    """All entries of a file, which is only read.

    Raises:
        JournalError: it cannot be read, or this library did not write it.
    """
    journal = Journal(path, read_only=True)
    try:
        return journal.entries()
    finally:
        journal.close()
