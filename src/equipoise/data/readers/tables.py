"""Tables: CSV and TSV files with typed columns, and libsvm files.

Every column is declared, from public knowledge of the form that was filled in, and encoded row by row:

* a number in a declared range [low, high] becomes 2 (x - low) / (high - low) - 1, in [-1, 1]; values beyond
the range
  are moved to its end; on a logarithmic scale x is first replaced by log(1 + x - low), and the range
  likewise; where a sign for "unknown" is declared, a second number says whether it stood there;
* a category becomes a one-hot vector over the declared values; a declared sign for "unknown" becomes zeros.

Means, deviations, ranges or lists of categories learnt from the private rows would be unaccounted queries on
them: the appearance of one more column would tell that somebody with a rare category is in the data.

The declared columns of the named tables, from their published descriptions.

Adult: B. Becker, R. Kohavi, UCI Machine Learning Repository, 1996 (``adult.names``; the ranges of numbers are
those of
the questionnaire: ages from 17 to 90, up to 99 hours a week, gains top-coded at 99,999). Mushroom: UCI
Machine Learning Repository, 1987 (``agaricus-lepiota.names``).
"""

from __future__ import annotations

import csv
import io
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from equipoise import _validate
from equipoise._files import PathLike
from equipoise.data.readers.files import DataFileError, read_bytes, read_text
from equipoise.data.records import Records

__all__ = [
    "ADULT",
    "MUSHROOM",
    "Category",
    "Column",
    "Label",
    "Number",
    "Skip",
    "Table",
    "read_libsvm",
    "read_table",
]


@dataclass(frozen=True)
class Number:
    """A numeric column with its public range; ``unknown`` is the sign for a missing number, such as "".

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
    unknown: str | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(
                f"column {self.name!r}: the range low={self.low} .. high={self.high} must be finite and not "
                "empty."
            )

    @property
    def width(self) -> int:
        """Numbers in the encoding."""
        return 1 if self.unknown is None else 2

    def encode(self, cell: str) -> list[float]:
        """The encoding of one cell; DataFileError for what is no finite number."""
        if cell == self.unknown:
            return [0.0, 1.0]
        try:
            value = float(cell)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise DataFileError(
                f"{cell!r} is not a finite number. Repair the row, drop it, or declare the sign for a "
                "missing number: Number(..., unknown=...)."
            )
        value, span = min(max(value, self.low), self.high) - self.low, self.high - self.low
        if self.log:
            value, span = math.log1p(value), math.log1p(span)
        encoded = 2.0 * value / span - 1.0
        return [encoded] if self.unknown is None else [encoded, 0.0]


@dataclass(frozen=True)
class Category:
    """A column of declared values; ``unknown`` is the sign for a missing one, which is encoded as zeros.

    >>> Category("sex", ("Female", "Male"), unknown="?").encode("Male")
    [0.0, 1.0]
    """

    name: str
    values: tuple[str, ...]
    unknown: str | None = None

    def __post_init__(self) -> None:
        if not self.values or len(set(self.values)) != len(self.values):
            raise ValueError(f"column {self.name!r}: values must be distinct and at least one.")

    @property
    def width(self) -> int:
        """Numbers in the encoding."""
        return len(self.values)

    def encode(self, cell: str) -> list[float]:
        """The encoding of one cell; DataFileError for a value that was not declared."""
        if cell not in self.values and cell != self.unknown:
            raise DataFileError(
                f"{cell!r} is not a declared category ({', '.join(self.values)}). Declare it if it is "
                "publicly known to occur, or drop the row."
            )
        return [float(cell == value) for value in self.values]


@dataclass(frozen=True)
class Label:
    """The class: a value's position in ``values`` is its number; ``strip`` is cut from the end."""

    name: str
    values: tuple[str, ...]
    strip: str = ""

    def number(self, cell: str) -> int:
        """The class number of one cell; DataFileError for a value that was not declared."""
        cell = cell.rstrip(self.strip) if self.strip else cell
        if cell not in self.values:
            raise DataFileError(f"{cell!r} is not a declared class ({', '.join(self.values)}).")
        return self.values.index(cell)


@dataclass(frozen=True)
class Skip:
    """A column that is not used."""

    name: str


Column = Number | Category | Label | Skip


@dataclass(frozen=True)
class Table:
    """The declared form of a table file: its columns in order, exactly one of them a `Label`.

    Attributes:
        columns: one for each column of the file.
        delimiter: between cells; blanks around cells are dropped.
        header: whether the first row holds the column names, which must then agree.
        comment: rows that begin with it are passed over.
    """

    columns: tuple[Column, ...]
    delimiter: str = ","
    header: bool = False
    comment: str | None = None

    def __post_init__(self) -> None:
        labels = [column.name for column in self.columns if isinstance(column, Label)]
        if len(labels) != 1:
            raise ValueError(f"columns must hold exactly one Label, not {len(labels)} {labels}.")
        if self.num_features == 0:
            raise ValueError("columns hold no Number and no Category: there is nothing to learn from.")

    @property
    def num_features(self) -> int:
        """Numbers in the encoding of a row."""
        return sum(column.width for column in self.columns if isinstance(column, Number | Category))

    @property
    def num_classes(self) -> int:
        """Declared classes."""
        return sum(len(column.values) for column in self.columns if isinstance(column, Label))


def read_table(path: PathLike, table: Table) -> Records:
    """The rows of a CSV or TSV file (plain or ``.gz``): input float32 ``[n, num_features]``, label int64
    ``[n]``.

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
    # a flat array and a memory of cells seen keep large tables fast
    inputs = array("f")
    seen: list[dict[str, list[float]]] = [{} for _ in table.columns]
    labels: list[int] = []
    rows = csv.reader(read_text(path).splitlines(), delimiter=table.delimiter, skipinitialspace=True)
    expect_header = table.header
    try:
        for row in rows:
            if (
                not row
                or (len(row) == 1 and not row[0].strip())
                or (table.comment and row[0].startswith(table.comment))
            ):
                continue
            cells = [cell.strip() for cell in row]
            place = f"{str(path)!r}, line {rows.line_num}"
            if len(cells) != len(table.columns):
                raise DataFileError(
                    f"{place}: {len(cells)} cells where {len(table.columns)} columns are declared."
                )
            if expect_header:
                expect_header = False
                names = [column.name for column in table.columns]
                if cells != names:
                    raise DataFileError(f"{place}: the header is {cells}, the declared columns are {names}.")
                continue
            for column, known, cell in zip(table.columns, seen, cells, strict=True):
                try:
                    if isinstance(column, Label):
                        labels.append(column.number(cell))
                    elif not isinstance(column, Skip):
                        if cell not in known:
                            known[cell] = column.encode(cell)
                        inputs.extend(known[cell])
                except DataFileError as error:
                    raise DataFileError(f"{place}, column {column.name!r}: {error}") from None
    except csv.Error as error:
        raise DataFileError(f"{str(path)!r}, line {rows.line_num}: {error}.") from None
    if not labels:
        raise DataFileError(f"The file {str(path)!r} holds no rows.")
    features = torch.frombuffer(inputs, dtype=torch.float32).reshape(len(labels), table.num_features).clone()
    return Records({"input": features, "label": torch.tensor(labels)}, num_classes=table.num_classes)


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
    except (ValueError, OverflowError) as error:
        raise DataFileError(
            f"The file {str(path)!r} is no libsvm file with indices in 1 .. {num_features}: {error}."
        ) from None
    # scikit-learn checks the form of each cell, and that indices increase and lie in range. It takes any
    # number for a label, NaN and infinities for values, and qid:NUMBER for a cell, which it then leaves out.
    if len(labels) == 0:
        raise DataFileError(f"The file {str(path)!r} holds no rows.")
    if len(queries):
        raise DataFileError(f"The file {str(path)!r} has qid cells: it is made for ranking, not for classes.")
    unknown = sorted(set(labels.tolist()) - set(numbers), key=str)
    if unknown:
        raise DataFileError(
            f"The file {str(path)!r} has the label {unknown[0]:g}, which is not one of {list(known)}."
        )
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
