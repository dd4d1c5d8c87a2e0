"""The named data sets: what the command line's ``--data NAME`` knows.

Each row of the table holds a set's *public* facts (number of training records, classes) and the files it
needs. The population is written here, not counted: it is published with the data set. If the files hold
another number of records, loading fails, since then they are not the set they claim to be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from equipoise._files import PathLike
from equipoise.data.readers.cifar import load_cifar
from equipoise.data.readers.digits import load_digits
from equipoise.data.readers.files import DataFileError, MissingDataError, find_file
from equipoise.data.readers.idx import IDX_FILES, load_idx_pair
from equipoise.data.readers.medmnist import load_medmnist
from equipoise.data.readers.tables import Label, Table, Text, place_of, read_libsvm, read_table, rows_of_file
from equipoise.data.readers.text import HashingTokenizer
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
        files: the file names it needs (each plain or with ``.gz``); empty for a set that needs no folder.
        read: folder -> (train, test); a set without files gets an empty path, which it has no use for.
        class_names: a name for each class.
        vocabulary_size: for token inputs.
        numeric_columns: see `DataSet`.
    """

    population: int
    num_classes: int
    description: str
    files: tuple[str, ...]
    read: Callable[[PathLike], TrainAndTest]
    class_names: tuple[str, ...] = ()
    vocabulary_size: int | None = None
    numeric_columns: tuple[int, ...] = ()


TrainAndTest = tuple[Records, Records]
_TOKENIZER = HashingTokenizer()


def _idx(name: str) -> Callable[[PathLike], TrainAndTest]:
    return lambda folder: (
        load_idx_pair(folder, "train", name=name),
        load_idx_pair(folder, "test", name=name),
    )


def _cifar(num_classes: int) -> Callable[[PathLike], TrainAndTest]:
    return lambda folder: (
        load_cifar(folder, "train", num_classes=num_classes),
        load_cifar(folder, "test", num_classes=num_classes),
    )


def _medmnist(name: str, num_classes: int) -> Callable[[PathLike], TrainAndTest]:
    return lambda folder: (
        load_medmnist(folder, "train", name=name, num_classes=num_classes),
        load_medmnist(folder, "test", name=name, num_classes=num_classes),
    )


def _declared(folder: PathLike, name: str, file: str) -> Records:
    """The rows of a file by the schema of the set."""
    from equipoise.data.readers.schema import named_table  # pydantic is imported where a schema is read

    return read_table(find_file(folder, file, subfolders=[name]), named_table(name))


def _adult(folder: PathLike) -> TrainAndTest:
    return _declared(folder, "adult", "adult.data"), _declared(folder, "adult", "adult.test")


def _a9a(folder: PathLike) -> TrainAndTest:
    train, test = (find_file(folder, name, subfolders=["a9a"]) for name in ("a9a", "a9a.t"))
    return read_libsvm(train, 123), read_libsvm(test, 123)


def _mushroom(folder: PathLike) -> TrainAndTest:
    # there is no published split; this one is fixed and depends only on the published number of rows
    return _declared(folder, "mushroom", "agaricus-lepiota.data").split(0.8, seed=0)


def _glue(folder: PathLike) -> TrainAndTest:
    # the published test file of GLUE has no labels, so the development part is the test set, as is usual
    train, test = (find_file(folder, name, subfolders=["sst2"]) for name in ("train.tsv", "dev.tsv"))
    form = Table(
        (Text("sentence", _TOKENIZER), Label("label", ("0", "1"))), delimiter="\t", header=True, quotes=False
    )
    return read_table(train, form), read_table(test, form)


def _sentences(folder: PathLike) -> TrainAndTest:
    train, test = (
        _sentences_of(find_file(folder, f"stsa.binary.{part}", subfolders=["sst2"]))
        for part in ("train", "test")
    )
    return train, test


def _sentences_of(path: PathLike) -> Records:
    """A line is a label, a space and a sentence."""
    labels, texts = [], []
    for number, cells in rows_of_file(path, delimiter="\t", quotes=False):
        label, _, text = cells[0].partition(" ")
        if label not in ("0", "1") or len(cells) > 1:
            raise DataFileError(f"{place_of(path, number)}: the line is no label, 0 or 1, and a sentence.")
        labels.append(int(label))
        texts.append(text)
    return Records({"input": _TOKENIZER(texts), "label": torch.tensor(labels)}, num_classes=2)


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
_CIFAR10 = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")

NAMED: dict[str, NamedSet] = {
    "digits": NamedSet(
        1_437,
        10,
        "8 x 8 grey images of handwritten digits",
        (),
        lambda folder: load_digits(),
        _DIGITS,
    ),
    "mnist": NamedSet(60_000, 10, "28 x 28 grey images of handwritten digits", _IDX, _idx("mnist"), _DIGITS),
    "fashion-mnist": NamedSet(
        60_000, 10, "28 x 28 grey images of clothes", _IDX, _idx("fashion-mnist"), _CLOTHES
    ),
    "cifar10": NamedSet(50_000, 10, "32 x 32 colour images of things", _CIFAR10, _cifar(10), _THINGS),
    "cifar100": NamedSet(
        50_000, 100, "32 x 32 colour images of things", ("train.bin", "test.bin"), _cifar(100)
    ),
    "adult": NamedSet(
        32_561,
        2,
        "answers to a census form, one-hot and scaled",
        ("adult.data", "adult.test"),
        _adult,
        ("<=50K", ">50K"),
        numeric_columns=(0, 25, 60, 61, 62),
    ),
    "a9a": NamedSet(
        32_561, 2, "123 binary features of the same census form", ("a9a", "a9a.t"), _a9a, ("<=50K", ">50K")
    ),
    "mushroom": NamedSet(
        6_499,
        2,
        "22 attributes of a mushroom, one-hot",
        ("agaricus-lepiota.data",),
        _mushroom,
        ("edible", "poisonous"),
    ),
    "sst2": NamedSet(
        67_349,
        2,
        "phrases of film reviews, hashed tokens",
        ("train.tsv", "dev.tsv"),
        _glue,
        ("negative", "positive"),
        _TOKENIZER.vocabulary_size,
    ),
    "sst2-sentences": NamedSet(
        6_920,
        2,
        "sentences of film reviews, hashed tokens",
        ("stsa.binary.train", "stsa.binary.test"),
        _sentences,
        ("negative", "positive"),
        _TOKENIZER.vocabulary_size,
    ),
    "pneumoniamnist": NamedSet(
        4_708,
        2,
        "28 x 28 chest X-rays",
        ("pneumoniamnist.npz",),
        _medmnist("pneumoniamnist", 2),
        ("normal", "pneumonia"),
    ),
    "breastmnist": NamedSet(
        546,
        2,
        "28 x 28 breast ultrasound images",
        ("breastmnist.npz",),
        _medmnist("breastmnist", 2),
        ("malignant", "normal or benign"),
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
            f"name={name!r} is not a known data set. Known: {', '.join(NAMED)}. For data of your own pass "
            "package.module:function, a function that returns a DataSet."
        )
    entry = NAMED[name]
    if folder is None and entry.files:
        raise MissingDataError(
            f"{name!r} needs a folder (folder=..., --data-dir or EQUIPOISE_DATA) that holds "
            f"{', '.join(entry.files)} (each plain or .gz), either itself or in a subfolder called {name!r}."
        )
    train, test = entry.read(folder or "")
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
        num_classes=entry.num_classes,
        description=entry.description,
        class_names=entry.class_names,
        vocabulary_size=entry.vocabulary_size,
        numeric_columns=entry.numeric_columns,
    )
