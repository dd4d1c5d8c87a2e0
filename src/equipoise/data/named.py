"""The named data sets: what the command line's ``--data NAME`` knows.

Each row of the table holds a set's *public* facts (number of training records, classes) and the files it
needs. The population is written here, not counted: it is published with the data set. If the files hold
another number of records, loading fails, since then they are not the set they claim to be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from equipoise._files import PathLike
from equipoise.data.readers.cifar import CIFAR10_FILES, load_cifar
from equipoise.data.readers.digits import load_digits
from equipoise.data.readers.files import DataFileError, MissingDataError, find_file
from equipoise.data.readers.idx import IDX_FILES, load_idx_pair
from equipoise.data.records import DataSet, Records


@dataclass(frozen=True)
class NamedSet:
    """Public facts about a data set and how to read it.

    Attributes:
        population: the published number of training records.
        class_names: a name for each class.
        description: what one input is.
        files: the file names it needs (each plain or with ``.gz``); empty for a set that needs no folder.
        read: folder, "train" or "test" -> records; a set without files has no use for the folder.
        numeric_columns: see `DataSet`.
    """

    population: int
    class_names: tuple[str, ...]
    description: str
    files: tuple[str, ...]
    read: Callable[[PathLike, str], Records]
    numeric_columns: tuple[int, ...] = ()


def _adult(folder: PathLike, part: str) -> Records:
    """The rows of the census by their schema, which stands beside this module."""
    from equipoise.data.readers.schema import read_rows, read_schema, table_of  # imports pandas and pydantic

    table = table_of(read_schema(Path(__file__).with_name("adult.schema.toml")))
    return read_rows(find_file(folder, _ADULT[part], subfolders=["adult"]), table)


_IDX = tuple(file for pair in IDX_FILES.values() for file in pair)
_ADULT = {"train": "adult.data", "test": "adult.test"}
_DIGITS = tuple("0123456789")
_CLOTHES = (
    "T-shirt/top",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)
_THINGS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def _of_mnist(name: str, class_names: tuple[str, ...], what: str) -> NamedSet:
    """MNIST, or a set of its form."""
    return NamedSet(
        60_000, class_names, f"28 x 28 grey images of {what}", _IDX, partial(load_idx_pair, name=name)
    )


NAMED: dict[str, NamedSet] = {
    "digits": NamedSet(
        1_437,
        _DIGITS,
        "8 x 8 grey images of handwritten digits",
        (),
        lambda folder, part: load_digits()[part == "test"],
    ),
    "mnist": _of_mnist("mnist", _DIGITS, "handwritten digits"),
    "fashion-mnist": _of_mnist("fashion-mnist", _CLOTHES, "clothes"),
    "cifar10": NamedSet(
        50_000,
        _THINGS,
        "32 x 32 colour images of things",
        (*CIFAR10_FILES["train"], *CIFAR10_FILES["test"]),
        load_cifar,
    ),
    "adult": NamedSet(
        32_561,
        ("<=50K", ">50K"),
        "answers to a census form, one-hot and scaled",
        tuple(_ADULT.values()),
        _adult,
        numeric_columns=(0, 25, 60, 61, 62),
    ),
}


def load(name: str, folder: PathLike | None = None) -> DataSet:
    """The data set called ``name``, read from ``folder/name`` or from ``folder`` itself.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
        MissingDataError: no folder is given where one is needed, or a file is missing.
        DataFileError: a file is corrupt, or holds another number of records than the published set.

    >>> load("digits").population
    1437
    >>> load("mnits")
    Traceback (most recent call last):
        ...
    ValueError: name='mnits' is not a known data set. ...
    """
    if name not in NAMED:
        raise ValueError(
            f"name={name!r} is not a known data set. Known: {', '.join(NAMED)}. On the command line data of "
            "your own are package.module:function, a function that returns a DataSet."
        )
    entry = NAMED[name]
    if folder is None and entry.files:
        raise MissingDataError(
            f"{name!r} needs a folder (folder=..., --data-dir or EQUIPOISE_DATA) that holds "
            f"{', '.join(entry.files)} (each plain or .gz), either itself or in a subfolder called {name!r}."
        )
    train, test = (entry.read(folder or "", part) for part in ("train", "test"))
    if len(train) != entry.population:
        raise DataFileError(
            f"The files of {name!r} hold {len(train)} training records, but the published set has "
            f"{entry.population}. Fetch the complete set; for a part of it, build a DataSet with its own "
            "public population."
        )
    return DataSet(
        name=name,
        train=train,
        test=test,
        population=entry.population,
        num_classes=len(entry.class_names),
        description=entry.description,
        class_names=entry.class_names,
        numeric_columns=entry.numeric_columns,
    )
