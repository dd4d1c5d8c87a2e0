"""Tables: CSV, TSV and Parquet files with typed columns, and libsvm files.

Every column is declared, from public knowledge of the form that was filled in, and encoded row by row:

* a number in a declared range [low, high] becomes 2 (x - low) / (high - low) - 1, in [-1, 1]; values beyond
  the range are moved to its end; on a logarithmic scale x is first replaced by log(1 + x - low), and the
  range likewise; where a sign for "unknown" is declared, a second number says whether it stood there;
* a category becomes a one-hot vector over the declared values, and over one more place for all others where
  that is declared; a declared sign for "unknown" becomes zeros;
* a category whose values nobody knows beforehand is hashed: one-hot over a declared number of places;
* a text becomes token ids by a hash, which needs no vocabulary.

Means, deviations, ranges or lists of categories learnt from the private rows would be unaccounted queries on
them: the appearance of one more column would tell that somebody with a rare category is in the data.

No error shows what a cell holds, not even what stands in the place of a header: messages go to logs.

The declared columns of the named tables, from their published descriptions.

Adult: B. Becker, R. Kohavi, UCI Machine Learning Repository, 1996 (``adult.names``; the ranges of numbers are
those of the questionnaire: ages from 17 to 90, up to 99 hours a week, gains top-coded at 99,999). Mushroom:
UCI Machine Learning Repository, 1987 (``agaricus-lepiota.names``).
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equipoise import _validate
from equipoise._files import PathLike
from equipoise.data.readers.files import DataFileError, MissingDataError, read_bytes, read_text
from equipoise.data.readers.text import HashingTokenizer
from equipoise.data.records import OWNER, Records

__all__ = [
    "ADULT",
    "MUSHROOM",
    "Category",
    "Column",
    "Hashed",
    "Label",
    "Number",
    "Owner",
    "Skip",
    "Table",
    "TargetNumber",
    "Text",
    "is_parquet",
    "other_delimiter",
    "read_libsvm",
    "read_table",
    "rows_of_file",
]

_Signs = str | tuple[str, ...] | None


def _means_unknown(cell: str, unknown: _Signs) -> bool:
    return cell == unknown if isinstance(unknown, str) else unknown is not None and cell in unknown


def _check_range(name: str, low: float, high: float) -> None:
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"column {name!r}: the range low={low} .. high={high} must be finite and not empty.")


def _finite(cell: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DataFileError(
            "the cell is not a finite number. Repair the row, drop it, declare the column a category, or "
            "declare the sign for a missing number: Number(..., unknown=...), or missing = [...] in a schema "
            "file."
        )
    return value


@dataclass(frozen=True)
class Number:
    """A numeric column with its public range; ``unknown`` is the sign (or signs) for a missing number.

    With it the encoding has a second number: 0 where the cell holds a number, and for a missing one 1, after
    the middle of the range.

    >>> Number("age", 0, 100).encode("75"), Number("gain", 0, 1e5, log=True).encode("0")
    ([0.5], [-1.0])
    >>> age = Number("age", 0, 100, unknown="")
    >>> age.encode("75"), age.encode("")
    ([0.5, 0.0], [0.0, 1.0])
    """

    name: str
    low: float
    high: float
    log: bool = False
    unknown: _Signs = None

    def __post_init__(self) -> None:
        _check_range(self.name, self.low, self.high)

    @property
    def width(self) -> int:
        """Numbers in the encoding."""
        return 1 if self.unknown is None else 2

    def encode(self, cell: str) -> list[float]:
        """The encoding of one cell; DataFileError for what is no finite number."""
        if _means_unknown(cell, self.unknown):
            return [0.0, 1.0]
        value, span = min(max(_finite(cell), self.low), self.high) - self.low, self.high - self.low
        if self.log:
            value, span = math.log1p(value), math.log1p(span)
        encoded = 2.0 * value / span - 1.0
        return [encoded] if self.unknown is None else [encoded, 0.0]


@dataclass(frozen=True)
class Category:
    """A column of declared values; ``unknown`` is the sign for a missing one, which is encoded as zeros.

    With ``other`` a value that was not declared goes to one more place; without it, it is an error.

    >>> Category("sex", ("Female", "Male"), unknown="?").encode("Male")
    [0.0, 1.0]
    >>> Category("pet", ("cat", "dog"), other=True).encode("axolotl")
    [0.0, 0.0, 1.0]
    """

    name: str
    values: tuple[str, ...]
    unknown: _Signs = None
    other: bool = False

    def __post_init__(self) -> None:
        _check_values(self.name, self.values)

    @property
    def width(self) -> int:
        """Numbers in the encoding."""
        return len(self.values) + self.other

    def encode(self, cell: str) -> list[float]:
        """The encoding of one cell; DataFileError for a value that was not declared."""
        if _means_unknown(cell, self.unknown):
            return [0.0] * self.width
        found = [float(cell == value) for value in self.values]
        if not any(found) and not self.other:
            raise DataFileError(
                "the cell is not a declared category. Declare it if it is publicly known to occur, take "
                "other=True, or drop the row."
            )
        return [*found, float(not any(found))] if self.other else found


@dataclass(frozen=True)
class Hashed:
    """A column of categories that nobody knows beforehand: one-hot over ``buckets`` places by a public hash.

    The hash is CRC-32 of the value's UTF-8 bytes. Two values may share a place. ``unknown`` is the sign for a
    missing one, which is encoded as zeros.

    >>> Hashed("city", 4).encode("Paris"), Hashed("city", 4, unknown="").encode("")
    ([0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0])
    """

    name: str
    buckets: int
    unknown: _Signs = None

    def __post_init__(self) -> None:
        if not 2 <= self.buckets <= 2**16:
            raise ValueError(
                f"column {self.name!r}: buckets={self.buckets} must be at least 2 and at most {2**16}."
            )

    @property
    def width(self) -> int:
        """Numbers in the encoding."""
        return self.buckets

    def encode(self, cell: str) -> list[float]:
        """The encoding of one cell."""
        found = [0.0] * self.buckets
        if not _means_unknown(cell, self.unknown):
            found[zlib.crc32(cell.encode()) % self.buckets] = 1.0
        return found


@dataclass(frozen=True)
class Text:
    """A column of text, as token ids; it is then the only input."""

    name: str
    tokenizer: HashingTokenizer = field(default_factory=HashingTokenizer)


def _check_values(name: str, values: tuple[str, ...]) -> None:
    if not values or len(set(values)) != len(values):
        raise ValueError(f"column {name!r}: values must be distinct and at least one.")


@dataclass(frozen=True)
class Label:
    """The class: a value's position in ``values`` is its number; ``strip`` is cut from the end."""

    name: str
    values: tuple[str, ...]
    strip: str = ""

    def __post_init__(self) -> None:
        _check_values(self.name, self.values)

    def number(self, cell: str) -> int:
        """The class number of one cell; DataFileError for a value that was not declared."""
        cell = cell.rstrip(self.strip) if self.strip else cell
        if cell not in self.values:
            raise DataFileError("the cell is not a declared class. Repair the row, drop it, or declare it.")
        return self.values.index(cell)


@dataclass(frozen=True)
class TargetNumber:
    """The number that a regression is after, with its public range, which becomes [-1, 1].

    >>> TargetNumber("wage", 0, 100).number("250")
    1.0
    """

    name: str
    low: float
    high: float

    def __post_init__(self) -> None:
        _check_range(self.name, self.low, self.high)

    def number(self, cell: str) -> float:
        """The scaled number of one cell, moved to the range's end beyond it; DataFileError for no number."""
        return 2.0 * (min(max(_finite(cell), self.low), self.high) - self.low) / (self.high - self.low) - 1.0


@dataclass(frozen=True)
class Skip:
    """A column that is not used."""

    name: str


@dataclass(frozen=True)
class Owner:
    """The column that names the user of each row: no input. ``unknown`` are signs that name nobody.

    A cell becomes a digest of 16 bytes, as two whole numbers: the same for the same name, whoever else is
    there.
    """

    name: str
    unknown: _Signs = None

    def digest(self, cell: str) -> bytes:
        """Of one cell; DataFileError where it names nobody."""
        if not cell or _means_unknown(cell, self.unknown):
            raise DataFileError(
                "the cell names no user, and rows of unknown users would count as one user's. Name the user, "
                "or drop the row."
            )
        return hashlib.blake2b(cell.encode(), digest_size=16).digest()


Column = Number | Category | Hashed | Text | Label | TargetNumber | Skip | Owner


@dataclass(frozen=True)
class Table:
    """The declared form of a table file: its columns, and what is learnt of them.

    Its targets are one `Label` (classification), one `TargetNumber` (regression), or several `Label` of two
    values each, of which the second means "has it" (multi-label).

    Attributes:
        columns: of a file without header, one for each column in order.
        delimiter: between cells; blanks around cells are dropped.
        header: whether the first row holds the column names. The declared ones are then found by name, in any
            order, and columns that are not declared are passed over. Parquet files have names always.
        comment: rows that begin with it are passed over.
    """

    columns: tuple[Column, ...]
    delimiter: str = ","
    header: bool = False
    comment: str | None = None

    def __post_init__(self) -> None:
        labels = [column for column in self.targets if isinstance(column, Label)]
        pairs = len(labels) == len(self.targets) and all(len(label.values) == 2 for label in labels)
        if len(self.targets) != 1 and not (self.targets and pairs):
            raise ValueError(
                "columns must hold exactly one Label, one TargetNumber, or several Labels of two values "
                f"each, not {[column.name for column in self.targets]}."
            )
        texts = [column.name for column in self.columns if isinstance(column, Text)]
        if len(texts) + bool(self.num_features) > 1:
            raise ValueError(
                f"columns {texts} hold text, which is then the only input: skip the other columns."
            )
        if self.num_features == 0 and not texts:
            raise ValueError("columns hold no input: there is nothing to learn from.")
        names = [column.name for column in self.columns]
        if len(set(names)) != len(names):
            raise ValueError("columns: their names must be distinct.")

    @property
    def targets(self) -> tuple[Label | TargetNumber, ...]:
        """What is learnt."""
        return tuple(column for column in self.columns if isinstance(column, Label | TargetNumber))

    @property
    def task(self) -> str:
        """``classification``, ``regression`` or ``multi-label``."""
        if len(self.targets) > 1:
            return "multi-label"
        return "classification" if isinstance(self.targets[0], Label) else "regression"

    @property
    def text(self) -> Text | None:
        """The column of text, or None where the inputs are numbers."""
        return next((column for column in self.columns if isinstance(column, Text)), None)

    @property
    def num_features(self) -> int:
        """Numbers in the encoding of a row."""
        return sum(column.width for column in self.columns if isinstance(column, Number | Category | Hashed))

    @property
    def numeric_columns(self) -> tuple[int, ...]:
        """Places of the numbers in the encoding of a row, without those that say that a number is missing."""
        inputs = [column for column in self.columns if isinstance(column, Number | Category | Hashed)]
        starts = accumulate((column.width for column in inputs), initial=0)
        return tuple(at for at, column in zip(starts, inputs, strict=False) if isinstance(column, Number))

    @property
    def num_classes(self) -> int:
        """Declared classes; the number of labels of a multi-label table, 1 of a regression."""
        first = self.targets[0]
        return len(first.values) if len(self.targets) == 1 and isinstance(first, Label) else len(self.targets)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes; the labels of a multi-label table, and none of a regression."""
        first = self.targets[0]
        if len(self.targets) > 1:
            return tuple(column.name for column in self.targets)
        return first.values if isinstance(first, Label) else ()


def is_parquet(path: PathLike) -> bool:
    """Whether a file is read as Parquet, by its name."""
    return Path(path).suffix == ".parquet"


def rows_of_file(
    path: PathLike, *, delimiter: str = ",", comment: str | None = None, columns: Sequence[str] | None = None
) -> Iterator[tuple[str, list[str]]]:
    """The rows of a table file as text: (their place, their cells); the names first where it is Parquet.

    Args:
        path: a CSV or TSV file (plain or ``.gz``), or a Parquet file.
        delimiter, comment: of a text file, as those of `Table`.
        columns: of a Parquet file, the only ones to read; those that it lacks are left out.

    Raises:
        MissingDataError, DataFileError: no such file; one that is broken.
    """
    if is_parquet(path):
        yield from _parquet_rows(path, columns)
        return
    text = io.StringIO(read_text(path), newline="")
    try:
        rows = csv.reader(text, delimiter=delimiter, skipinitialspace=True)
    except (TypeError, ValueError):
        raise DataFileError(
            f"delimiter={delimiter!r} cannot stand between cells. Give one character, such as a semicolon."
        ) from None
    try:
        for row in rows:
            empty = not row or (len(row) == 1 and not row[0].strip())
            if not (empty or (comment and row[0].startswith(comment))):
                yield f"{str(path)!r}, line {rows.line_num}", [cell.strip() for cell in row]
    except csv.Error as error:
        raise DataFileError(f"{str(path)!r}, line {rows.line_num}: {error}.") from None


def _parquet_rows(path: PathLike, columns: Sequence[str] | None) -> Iterator[tuple[str, list[str]]]:
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"the file {str(path)!r} is read by the package pyarrow: pip install pyarrow, or "
            "write the rows as CSV."
        ) from error
    if not Path(path).is_file():
        raise MissingDataError(f"The file {str(path)!r} does not exist. Check the path.")
    try:
        with parquet.ParquetFile(path) as file:
            names = [name for name in file.schema_arrow.names if columns is None or name in columns]
            yield repr(str(path)), names
            number = 0
            for batch in file.iter_batches(columns=names):
                values = [column.to_pylist() for column in batch.columns]
                for row in zip(*values, strict=True):
                    number += 1
                    yield f"{str(path)!r}, row {number}", [_as_text(value) for value in row]
    except ArrowException as error:
        raise DataFileError(
            f"The file {str(path)!r} is no whole Parquet file ({type(error).__name__}). Fetch it again."
        ) from None


def _as_text(value: Any) -> str:
    """A cell of a Parquet file as it would stand in a CSV file; a missing one is empty."""
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value).strip()


def read_table(path: PathLike, table: Table, *, targets: bool = True) -> Records:
    """The rows of a CSV, TSV or Parquet file: input float32 ``[n, num_features]`` and what is learnt.

    Text gives the input int64 ``[n, length]``. What is learnt is ``label`` int64 ``[n]`` of a classification,
    ``target`` float32 ``[n]`` of a regression, in [-1, 1], or ``target`` ``[n, labels]`` of zeros and ones.
    Where a column names users, ``owner`` is int64 ``[n, 2]``.

    Args:
        path: of the file; ``.gz`` is unpacked, ``.parquet`` needs the package pyarrow.
        table: the declared columns.
        targets: False reads the inputs only; the file may then lack the columns of the targets.

    Raises:
        MissingDataError, DataFileError: no such file, a row with too few or too many cells, a cell that does
            not fit its column; the message names file, line and column.

    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "people.csv"
    >>> _ = path.write_text("30, yes, a\\n50, no, b\\n")
    >>> form = Table((Number("age", 0, 100), Category("member", ("no", "yes")), Label("group", ("a", "b"))))
    >>> read_table(path, form).fields["input"].tolist()
    [[-0.4000000059604645, 0.0, 1.0], [0.0, 1.0, 0.0]]
    """
    read = [c for c in table.columns if not isinstance(c, Skip) and (targets or not isinstance(c, _TARGET))]
    named = table.header or is_parquet(path)
    places: list[int] = []
    # a flat array and a memory of cells seen keep large tables fast
    inputs, numbers = array("f"), array("d")
    seen: list[dict[str, list[float]]] = [{} for _ in read]
    texts: list[str] = []
    owners = bytearray()
    width, count = 0, 0
    rows = rows_of_file(
        path, delimiter=table.delimiter, comment=table.comment, columns=[column.name for column in read]
    )
    for place, cells in rows:
        if not width and named:
            width, places = len(cells), _places_by_name(place, cells, read)
            continue
        if not width:
            whole = targets or len(cells) == len(table.columns)
            there = [c for c in table.columns if whole or not isinstance(c, _TARGET)]
            width, places = len(there), [there.index(column) for column in read]
        if len(cells) != width:
            raise DataFileError(f"{place}: {len(cells)} cells where {width} columns are expected.")
        count += 1
        for column, known, at in zip(read, seen, places, strict=True):
            cell = cells[at]
            try:
                if isinstance(column, Label | TargetNumber):
                    numbers.append(column.number(cell))
                elif isinstance(column, Text):
                    texts.append(cell)
                elif isinstance(column, Owner):
                    owners += column.digest(cell)
                else:
                    if cell not in known:
                        known[cell] = column.encode(cell)
                    inputs.extend(known[cell])
            except DataFileError as error:
                raise DataFileError(f"{place}, column {column.name!r}: {error}") from None
    if not count:
        raise DataFileError(f"The file {str(path)!r} holds no rows.")
    fields = _fields(table, count, inputs, texts, numbers if targets else None)
    if owners:
        fields[OWNER] = torch.frombuffer(owners, dtype=torch.int64).reshape(count, 2).clone()
    return Records(fields, num_classes=_classes(table))


_TARGET = (Label, TargetNumber)


def _classes(table: Table) -> int | None:
    return table.num_classes if table.task == "classification" else None


def _places_by_name(place: str, names: list[str], read: Sequence[Column]) -> list[int]:
    """Where the header has the declared columns; its names are not shown, it may be a row of data."""
    missing = [column.name for column in read if column.name not in names]
    twice = [column.name for column in read if names.count(column.name) > 1]
    owner = [column.name for column in read if isinstance(column, Owner)]
    if missing and missing == owner:
        raise DataFileError(
            f"{place}: --owner names {owner[0]!r}, but the header has no such column. Name the column that "
            "says which user a row belongs to."
        )
    if missing or twice:
        other = other_delimiter(names)
        remedy = (
            "Correct the names, or declare that the file has no header: header = false."
            if other is None
            else f"The row is one cell, so another sign stands between cells: declare delimiter = {other}."
        )
        raise DataFileError(
            f"{place}: the header {'lacks' if missing else 'repeats'} the declared columns "
            f"{', '.join(map(repr, missing or twice))}. {remedy}"
        )
    return [names.index(column.name) for column in read]


def other_delimiter(cells: Sequence[str]) -> str | None:
    """The sign that seems to stand between cells where a row was read as one cell, as TOML writes it.

    >>> other_delimiter(["age;wage"]), other_delimiter(["age", "wage"])
    ('";"', None)
    """
    signs = {";": '";"', "\t": '"\\t"', "|": '"|"', ",": '","'}
    return next((word for sign, word in signs.items() if len(cells) == 1 and sign in cells[0]), None)


def _fields(
    table: Table, count: int, inputs: array[float], texts: list[str], numbers: array[float] | None
) -> dict[str, Tensor]:
    if table.text is not None:
        fields = {"input": table.text.tokenizer(texts)}
    else:
        flat = torch.frombuffer(inputs, dtype=torch.float32)
        fields = {"input": flat.reshape(count, table.num_features).clone()}
    if numbers is None:
        return fields
    found = torch.frombuffer(numbers, dtype=torch.float64).reshape(count, len(table.targets)).clone()
    if table.task == "classification":
        return fields | {"label": found[:, 0].long()}
    return fields | {"target": found.float() if table.task == "multi-label" else found[:, 0].float()}


def read_libsvm(
    path: PathLike, num_features: int, classes: Sequence[str] | Mapping[str, int] = ("-1", "+1")
) -> Records:
    """A libsvm file (``label index:value ...``, indices from 1; plain or ``.gz``) as dense float32 ``[n,
    num_features]``.

    Args:
        path: the file.
        num_features: the public number of features; never the largest index found.
        classes: the labels, which are numbers, in the order of their classes, or a map to class numbers.

    Raises:
        MissingDataError, DataFileError: no such file; an unknown label, an index outside 1 .. num_features
            or not increasing, a value that is not finite.

    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "rows"
    >>> _ = path.write_text("+1 1:0.5 3:2\\n-1 2:1\\n")
    >>> read_libsvm(path, 3).fields["input"].tolist()
    [[0.5, 0.0, 2.0], [0.0, 1.0, 0.0]]
    """
    from sklearn.datasets import load_svmlight_file

    known = classes if isinstance(classes, Mapping) else {name: i for i, name in enumerate(classes)}
    numbers = {float(name): number for name, number in known.items()}
    _validate.count("the public number of features", num_features=num_features)
    try:
        rows, labels, queries = load_svmlight_file(
            io.BytesIO(read_bytes(path)), n_features=num_features, zero_based=False, query_id=True
        )
    except (ValueError, OverflowError):
        raise DataFileError(
            f"The file {str(path)!r} is no libsvm file (label index:value ...) whose indices rise within 1 "
            f".. {num_features}."
        ) from None
    # scikit-learn checks the form of each cell, and that indices increase and lie in range. It takes any
    # number for a label, NaN and infinities for values, and qid:NUMBER for a cell, which it then leaves out.
    if len(labels) == 0:
        raise DataFileError(f"The file {str(path)!r} holds no rows.")
    if len(queries):
        raise DataFileError(f"The file {str(path)!r} has qid cells: it is made for ranking, not for classes.")
    unknown = sorted(set(labels.tolist()) - set(numbers), key=str)
    if unknown:
        raise DataFileError(f"The file {str(path)!r} has a label which is not one of {list(known)}.")
    return Records(  # which refuses values that are not finite
        {
            "input": torch.from_numpy(rows.toarray()).float(),
            "label": torch.tensor([numbers[label] for label in labels.tolist()]),
        },
        num_classes=max(numbers.values()) + 1,
    )


def _category(name: str, values: str) -> Category:
    return Category(name, tuple(values.split()), unknown="?")


ADULT = Table(
    (
        Number("age", 17, 90),
        _category(
            "workclass",
            "Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov Without-pay Never-worked",
        ),
        Skip("fnlwgt"),
        _category(
            "education",
            "Bachelors Some-college 11th HS-grad Prof-school Assoc-acdm Assoc-voc 9th 7th-8th 12th Masters "
            "1st-4th 10th Doctorate 5th-6th Preschool",
        ),
        Number("education-num", 1, 16),
        _category(
            "marital-status",
            "Married-civ-spouse Divorced Never-married Separated Widowed Married-spouse-absent "
            "Married-AF-spouse",
        ),
        _category(
            "occupation",
            "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty Handlers-cleaners "
            "Machine-op-inspct Adm-clerical Farming-fishing Transport-moving Priv-house-serv Protective-serv "
            "Armed-Forces",
        ),
        _category("relationship", "Wife Own-child Husband Not-in-family Other-relative Unmarried"),
        _category("race", "White Asian-Pac-Islander Amer-Indian-Eskimo Other Black"),
        _category("sex", "Female Male"),
        Number("capital-gain", 0, 99_999, log=True),
        Number("capital-loss", 0, 4_356, log=True),
        Number("hours-per-week", 1, 99),
        _category(
            "native-country",
            "United-States Cambodia England Puerto-Rico Canada Germany Outlying-US(Guam-USVI-etc) India "
            "Japan Greece South China Cuba Iran Honduras Philippines Italy Poland Jamaica Vietnam Mexico "
            "Portugal Ireland France Dominican-Republic Laos Ecuador Taiwan Haiti Columbia Hungary Guatemala "
            "Nicaragua Scotland Thailand Yugoslavia El-Salvador Trinadad&Tobago Peru Hong Holand-Netherlands",
        ),
        Label("income", ("<=50K", ">50K"), strip="."),
    ),
    comment="|",
)


_LETTERS = {
    "cap-shape": "bcxfks",
    "cap-surface": "fgys",
    "cap-color": "nbcgrpuewy",
    "bruises?": "tf",
    "odor": "alcyfmnps",
    "gill-attachment": "adfn",
    "gill-spacing": "cwd",
    "gill-size": "bn",
    "gill-color": "knbhgropuewy",
    "stalk-shape": "et",
    "stalk-root": "bcuezr",
    "stalk-surface-above-ring": "fyks",
    "stalk-surface-below-ring": "fyks",
    "stalk-color-above-ring": "nbcgopewy",
    "stalk-color-below-ring": "nbcgopewy",
    "veil-type": "pu",
    "veil-color": "nowy",
    "ring-number": "not",
    "ring-type": "ceflnpsz",
    "spore-print-color": "knbhrouwy",
    "population": "acnsvy",
    "habitat": "glmpuwd",
}


MUSHROOM = Table(
    (
        Label("class", ("e", "p")),
        *(Category(name, tuple(letters), unknown="?") for name, letters in _LETTERS.items()),
    )
)
