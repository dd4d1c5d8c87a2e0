"""Fixed feature extractors, computed once and cached on disk.

An extractor maps each record's input to features without looking at any other record and without fitted
parameters, so
extraction costs no privacy: a model trained privately on the features of the records is private for the
records.

The cache holds private data in another form: it is written for its owner alone (mode 0600), and belongs where
the data are. Features are kept as float16 on disk; the rounding (relative 5e-4) is part of the features, so
that a first run and a run from the cache see the same numbers.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from equipoise._files import PathLike, write_atomically
from equipoise.data.records import DataSet, Records

FeatureProgress = Callable[[int, int], None]


class FeatureExtractor(Protocol):
    """What :func:`extract` needs: a call on a batch of inputs, and a description of its constants."""

    def __call__(self, inputs: Tensor) -> Tensor:
        """Features ``[k, ...]`` of inputs ``[k, ...]``; row i depends only on input i."""

    def config(self) -> dict[str, object]:
        """Name, version and constants, as JSON can hold them: equal configurations compute equal features."""


def extract(
    records: Records,
    extractor: FeatureExtractor,
    cache: PathLike | None = None,
    *,
    progress: FeatureProgress | None = None,
) -> Records:
    """The records with their inputs replaced by features (float16 precision, held as float32).

    Args:
        records: the field ``input`` is read, all others are kept.
        extractor: see :class:`FeatureExtractor`. Its attribute ``chunk`` says how many records a call takes;
            32 by default, with which images of MNIST stay within a processor's cache.
        cache: a folder where features are kept, and read again by a hash of the extractor's configuration and
            of the inputs: other data or other constants never meet an old file. A damaged one is computed
            anew.
        progress: called with (done, total) before the first chunk and after each.

    Raises:
        OSError: the cache cannot be written; nothing half-written is left behind.

    >>> records = Records({"input": torch.randn(5, 1, 8, 8), "label": torch.arange(5)})
    >>> extract(records, lambda images: images.flatten(1)).fields["input"].shape
    torch.Size([5, 64])
    """
    inputs, path, key = records.fields["input"], None, ""
    if cache is not None:
        fingerprint = Records({"input": inputs}, check_finite=False).fingerprint()
        described = json.dumps([extractor.config(), fingerprint], sort_keys=True)
        key = hashlib.sha256(described.encode()).hexdigest()
        path = Path(cache) / f"features-{key[:32]}.safetensors"
    features = None if path is None else _read_cache(path, key, len(records))
    if features is None:
        features = _compute(inputs, extractor, progress)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            about = {"key": key, "crc32": _checksum(features)}
            write_atomically(path, save({"features": features}, metadata=about))
    fields = {**records.fields, "input": features.to(torch.float32)}
    return Records(fields, num_classes=records.num_classes)


def features_of(
    dataset: DataSet,
    extractor: FeatureExtractor,
    cache: PathLike | None = None,
    *,
    progress: FeatureProgress | None = None,
) -> DataSet:
    """The data set with train and test inputs replaced by features; population, classes and labels stay.

    Args:
        dataset: what to transform.
        extractor: see :class:`FeatureExtractor`.
        cache: folder for the cache; None computes every time.
        progress: called with (done, total) for each part in turn.
    """

    train, test = (
        extract(part, extractor, cache, progress=progress) for part in (dataset.train, dataset.test)
    )
    described = f"{extractor.config().get('extractor', 'fixed')} features of: {dataset.description}"
    return replace(dataset, train=train, test=test, description=described, numeric_columns=())


def _compute(inputs: Tensor, extractor: FeatureExtractor, progress: FeatureProgress | None) -> Tensor:
    size: int = getattr(extractor, "chunk", 32)
    report = progress or (lambda done, total: None)
    report(0, len(inputs))  # before the first call, which may fit the features
    parts = []
    with torch.no_grad():
        for part in torch.split(inputs, size):
            parts.append(extractor(part).half())
            report(min(len(parts) * size, len(inputs)), len(inputs))
    return torch.cat(parts)


def _checksum(features: Tensor) -> str:
    return f"{zlib.crc32(features.view(torch.uint8).numpy().data):08x}"


def _read_cache(path: Path, key: str, length: int) -> Tensor | None:
    """The cached features, or None where there are none that can be trusted."""
    if not path.is_file():
        return None
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            features: Tensor = file.get_tensor("features")
    except (SafetensorError, OSError, ValueError):
        return None
    if metadata.get("key") != key or len(features) != length or metadata.get("crc32") != _checksum(features):
        return None
    return features
