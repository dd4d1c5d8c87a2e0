"""The data sets of the bench, and features for them, beside the sets that the package knows by name.

From a checkout they are data of one's own, with the published number of records as population:

    equipoise train --data benchmarks.data:a9a --population 32561 --data-dir DIR --epsilon 3

Each function takes the folder that holds the files, plain or with `.gz`, itself or in a subfolder of the
set's name.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.scattering import PooledScattering, ScatteringFeatures, TokenBags
from equipoise._files import PathLike
from equipoise.app.data_loading import cache_folder
from equipoise.data import DataFileError, DataSet, MissingDataError, Records, load
from equipoise.data.features.extractors import features_of
from equipoise.data.readers.cifar import PIXELS, cifar_records, read_cifar_binary
from equipoise.data.readers.files import find_file, read_bytes, read_text
from equipoise.data.readers.images import standardise_each
from equipoise.data.readers.schema import read_rows, read_schema, table_of
from equipoise.data.readers.text import HashingTokenizer

TOKENIZER = HashingTokenizer(8192)
"""Of the figures of texts by other models than `hashed-words`."""


# ---- tables


def a9a(folder: PathLike = "data") -> DataSet:
    """123 binary features of Adult's census form, from libsvm files."""
    train, test = (read_libsvm(find_file(folder, name, subfolders=["a9a"]), 123) for name in ("a9a", "a9a.t"))
    return DataSet("a9a", train, test, 32_561, 2, class_names=("<=50K", ">50K"))


def read_libsvm(path: PathLike, num_features: int) -> Records:
    """A libsvm file of two classes, -1 and +1, as dense rows."""
    from sklearn.datasets import load_svmlight_file

    rows, labels = load_svmlight_file(io.BytesIO(read_bytes(path)), n_features=num_features, zero_based=False)
    if not np.isin(labels, (-1, 1)).all():
        raise DataFileError(f"The file {str(path)!r} has a label which is not one of -1 and +1.")
    fields = {"input": torch.from_numpy(rows.toarray()).float(), "label": torch.from_numpy(labels > 0).long()}
    return Records(fields, num_classes=2)


def mushroom(folder: PathLike = "data") -> DataSet:
    """22 attributes of a mushroom, one-hot. No split is published; this one follows from their number."""
    schema = table_of(read_schema(Path(__file__).with_name("mushroom.schema.toml")))
    rows = read_rows(find_file(folder, "agaricus-lepiota.data", subfolders=["mushroom"]), schema)
    train, test = rows.split(0.8, seed=0)
    return DataSet("mushroom", train, test, 6_499, 2, class_names=("edible", "poisonous"))


# ---- texts


def sst2(folder: PathLike = "data", tokenizer: HashingTokenizer = TOKENIZER) -> DataSet:
    """Phrases of film reviews. GLUE's test file has no labels, so its development part is the test set."""
    parts = (find_file(folder, name, subfolders=["sst2"]) for name in ("train.tsv", "dev.tsv"))
    lines = [read_text(path).split("\n")[1:] for path in parts]
    pairs = [[line.strip().rpartition("\t")[::2] for line in part if line] for part in lines]
    return _reviews("sst2", 67_349, *pairs, tokenizer=tokenizer)


def sst2_words(folder: PathLike = "data") -> DataSet:
    """The same with so many token ids that few words share one, for `--model hashed-words`."""
    return sst2(folder, HashingTokenizer())


def sst2_sentences(folder: PathLike = "data") -> DataSet:
    """Whole sentences of the same reviews: a line is a label, a space and a sentence."""
    parts = (find_file(folder, f"stsa.binary.{part}", subfolders=["sst2"]) for part in ("train", "test"))
    lines = [read_text(path).split("\n") for path in parts]
    return _reviews(
        "sst2-sentences", 6_920, *([line.partition(" ")[::-2] for line in part if line] for part in lines)
    )


def _reviews(
    name: str, population: int, *parts: list[tuple[str, str]], tokenizer: HashingTokenizer = TOKENIZER
) -> DataSet:
    """Of (text, label) pairs, with labels 0 and 1."""
    train, test = (
        Records(
            {
                "input": tokenizer(text.strip() for text, _ in part),
                "label": torch.tensor([int(label) for _, label in part]),
            },
            num_classes=2,
        )
        for part in parts
    )
    names, size = ("negative", "positive"), tokenizer.vocabulary_size
    return DataSet(name, train, test, population, 2, class_names=names, vocabulary_size=size)


# ---- images


def pneumoniamnist(folder: PathLike = "data") -> DataSet:
    """Chest X-rays of 28 x 28."""
    return _medmnist(folder, "pneumoniamnist", 4_708, ("normal", "pneumonia"))


def breastmnist(folder: PathLike = "data") -> DataSet:
    """Breast ultrasound images of 28 x 28."""
    return _medmnist(folder, "breastmnist", 546, ("malignant", "normal or benign"))


def _medmnist(folder: PathLike, name: str, population: int, class_names: tuple[str, ...]) -> DataSet:
    """J. Yang et al., "MedMNIST v2", Scientific Data 10, 2023. The validation part is left aside."""
    with np.load(find_file(folder, f"{name}.npz", subfolders=[name, "medmnist"])) as arrays:
        train, test = (
            Records(
                {
                    "input": standardise_each(torch.from_numpy(arrays[f"{part}_images"]).unsqueeze(1)),
                    "label": torch.from_numpy(arrays[f"{part}_labels"][:, 0].astype(np.int64)),
                },
                num_classes=2,
            )
            for part in ("train", "test")
        )
    return DataSet(name, train, test, population, 2, class_names=class_names)


def cifar100(folder: PathLike = "data") -> DataSet:
    """32 x 32 colour images of 100 classes, in the binary or the Python layout."""
    train, test = (_cifar(folder, [part], 100, "cifar-100") for part in ("train", "test"))
    return DataSet("cifar100", train, test, 50_000, 100)


def cifar10(folder: PathLike = "data") -> DataSet:
    """CIFAR-10 in either layout; the package reads the binary one."""
    names = [f"data_batch_{i}" for i in range(1, 6)], ["test_batch"]
    train, test = (_cifar(folder, part, 10, "cifar-10-batches") for part in names)
    return DataSet("cifar10", train, test, 50_000, 10)


def _cifar(folder: PathLike, names: list[str], num_classes: int, archive: str) -> Records:
    layouts = [(".bin", ("bin", "binary"), read_cifar_binary), ("", ("py", "python"), read_cifar_pickle)]
    for ending, archives, read in layouts:
        inner = [f"{archive}-{kind}" for kind in archives]
        places = [f"cifar{num_classes}/{place}" for place in inner] + [f"cifar{num_classes}", *inner]
        try:
            paths = [find_file(folder, name + ending, subfolders=places) for name in names]
        except MissingDataError:
            if not ending:
                raise
            continue
        return cifar_records([read(path, num_classes) for path in paths], num_classes)
    raise AssertionError


class _ArrayUnpickler(pickle.Unpickler):
    """Rebuilds plain numpy arrays, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return _empty_array
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):
            return _latin1_bytes
        raise DataFileError(
            f"the pickle asks for {module}.{name}, which is not part of a numpy array. It was refused, since "
            "a pickle can run any code. Fetch the file from its publisher, or use the binary layout."
        )


def _empty_array(kind: type, shape: tuple[int, ...], code: bytes | str) -> NDArray[Any]:
    if kind is not np.ndarray or tuple(shape) != (0,):
        raise DataFileError("the pickle holds another object in place of a numpy array. It was refused.")
    return np.ndarray((0,), np.int8)


def _latin1_bytes(text: str, encoding: str) -> bytes:
    # how Python 3 writes bytes in the old protocols
    if encoding != "latin1":
        raise DataFileError(f"the pickle asks for the text encoding {encoding!r}. It was refused.")
    return text.encode("latin1")


def read_cifar_pickle(path: PathLike, num_classes: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images uint8 ``[n, 3, 32, 32]`` and (fine) labels int64 ``[n]`` of a file in the Python layout."""
    batch = _ArrayUnpickler(io.BytesIO(read_bytes(path)), encoding="bytes").load()
    batch = {key.encode() if isinstance(key, str) else key: value for key, value in batch.items()}
    data, labels = batch[b"data"], batch[b"fine_labels" if num_classes == 100 else b"labels"]
    if data.dtype != np.uint8 or data.shape != (len(labels), PIXELS):
        raise DataFileError(f"The file {str(path)!r} is no batch of CIFAR-{num_classes}.")
    return data.reshape(-1, 3, 32, 32), np.array(labels, np.int64)


# ---- features of named sets, to go with --model logistic


def mnist_scattered(folder: PathLike = "data") -> DataSet:
    """Scattering features, 81 x 7 x 7 of an image."""
    return _scattered(load("mnist", folder))


def fashion_mnist_scattered(folder: PathLike = "data") -> DataSet:
    return _scattered(load("fashion-mnist", folder))


def mnist_pooled(folder: PathLike = "data") -> DataSet:
    """Scattering features that are averaged to 4 x 4."""
    return _pooled(load("mnist", folder))


def fashion_mnist_pooled(folder: PathLike = "data") -> DataSet:
    return _pooled(load("fashion-mnist", folder))


def pneumoniamnist_pooled(folder: PathLike = "data") -> DataSet:
    return _pooled(pneumoniamnist(folder))


def cifar10_pooled(folder: PathLike = "data") -> DataSet:
    return _pooled(load("cifar10", folder))


def sst2_signs(folder: PathLike = "data") -> DataSet:
    """Sums of fixed random token vectors."""
    return features_of(sst2(folder), TokenBags(TOKENIZER.vocabulary_size), cache_folder())


def _scattered(found: DataSet) -> DataSet:
    _, height, width = found.input_shape
    return features_of(found, ScatteringFeatures((height, width)), cache_folder())


def _pooled(found: DataSet) -> DataSet:
    _, height, width = found.input_shape
    return features_of(found, PooledScattering((height, width)), cache_folder())
