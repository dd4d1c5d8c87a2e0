"""The named data sets: what the command line's ``--data NAME`` knows.

Each row of the table holds a set's *public* facts (number of training records, classes) and the files it
needs. The population is written here, not counted: it is published with the data set. If the files hold
another number of records, loading fails, since then they are not the set they claim to be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from equipoise.data.digits import load_digits
from equipoise.data.files import DataError, MissingDataError, PathLike
from equipoise.data.idx import IDX_FILES, load_idx_pair
from equipoise.data.records import DataSet, Records

__all__ = ["NAMED", "NamedSet", "load"]

_IDX = tuple(file for pair in IDX_FILES.values() for file in pair)


@dataclass(frozen=True)
class NamedSet:
    """Public facts about a data set and how to read it.

    Attributes:
        population: the published number of training records.
        num_classes: the number of classes.
        description: what one input is.
        files: the file names it needs (each plain or with ``.gz``); empty if the set comes with a dependency.
        read: folder -> (train, test); None for sets that need no folder.
        class_names: a name for each class.
        vocabulary_size: for token inputs.
    """

    population: int
    num_classes: int
    description: str
    files: tuple[str, ...] = ()
    read: Callable[[PathLike], tuple[Records, Records]] | None = None
    class_names: tuple[str, ...] = ()
    vocabulary_size: int | None = None


def _idx(name: str) -> Callable[[PathLike], tuple[Records, Records]]:
    return lambda folder: (
        load_idx_pair(folder, "train", name=name),
        load_idx_pair(folder, "test", name=name),
    )


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

NAMED: dict[str, NamedSet] = {
    "digits": NamedSet(1_437, 10, "8 x 8 grey images of handwritten digits"),
    "mnist": NamedSet(
        60_000, 10, "28 x 28 grey images of handwritten digits", _IDX, _idx("mnist"), tuple("0123456789")
    ),
    "fashion-mnist": NamedSet(
        60_000, 10, "28 x 28 grey images of clothes", _IDX, _idx("fashion-mnist"), _CLOTHES
    ),
}


def load(name: str, folder: PathLike | None = None) -> DataSet:
    """The data set called ``name``, read from ``folder/name`` or from ``folder`` itself.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
        MissingDataError: no folder is given where one is needed, or a file is missing.
        DataError: a file is corrupt, or holds another number of records than the published set.

    >>> load("digits").population
    1437
    >>> load("mnits")
    Traceback (most recent call last):
        ...
    ValueError: name='mnits' is not a known data set. ...
    """
    if name not in NAMED:
        raise ValueError(
            f"name={name!r} is not a known data set. Known: {', '.join(NAMED)}. "
            "For data of your own pass package.module:function, a function that returns a DataSet."
        )
    entry = NAMED[name]
    if entry.read is None:
        return load_digits()
    if folder is None:
        raise MissingDataError(
            f"folder is needed for {name!r}: a folder that holds {', '.join(entry.files)} (each plain or "
            ".gz), "
            f"either itself or in a subfolder called {name!r}."
        )
    train, test = entry.read(folder)
    if len(train) != entry.population:
        raise DataError(
            f"The files of {name!r} hold {len(train)} training records, but the published set has "
            f"{entry.population}. "
            "Fetch the complete set; for a part of it, build a DataSet with its own public population."
        )
    return DataSet(
        name=name,
        train=train,
        test=test,
        population=entry.population,
        num_classes=entry.num_classes,
        description=entry.description,
        class_names=entry.class_names,
        vocabulary_size=entry.vocabulary_size,
    )
