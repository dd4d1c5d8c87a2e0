"""What the items of a data set were when they were first read, for runs that assign items to draws by number.

Items that are made on demand have no content before they are read, so that a sampling which assigns records
to draws (`Sampling.takes_turns`) goes by their numbers, unless the user names them (`ids`). It rests on every
number standing for one record for the whole run. When a run goes on, the items that it had read are read once
more and compared: one that stands under another number now could be drawn twice in an epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from equipoise._tree import map_leaves
from equipoise.distributed.processes import Processes
from equipoise.gradients.capture.random_numbers import GlobalState, random_numbers_from
from equipoise.privacy.digests import KeyedDigest
from equipoise.privacy.ledger.write_ahead_log import WriteAheadLog


def _digest_of(item: Any, digest: KeyedDigest) -> str | None:
    """A secret digest of an item; None where it holds what cannot be compared."""
    try:
        return digest({"item": map_leaves(_plain, item)}).value()
    except (TypeError, ValueError):
        return None


def _plain(leaf: Any) -> Any:
    """An array, a number of NumPy or a picture as a tensor; anything else as it is."""
    if isinstance(leaf, torch.Tensor) or not (hasattr(leaf, "__array__") or isinstance(leaf, np.generic)):
        return leaf
    array = np.asarray(leaf)
    return torch.tensor(array) if array.dtype.kind in "biufc" else array.tolist()


def are_fixed(source: Any, numbers: Sequence[int]) -> bool:
    """Whether these items of a `RecordSource` are the same whenever they are read, as far as they can be."""
    digest, compared = KeyedDigest(bytes(32), "items that were read"), False
    for number in numbers:
        with suppress(Exception):  # one that cannot be read has weight zero
            with random_numbers_from(0):
                before = GlobalState()
                one, again = (_digest_of(source.read(torch.tensor([number]))[0], digest) for _ in range(2))
                draws = before.moved()
            compared = True
            if one is None or one != again or draws:
                return False
    return compared


class ReadItems:
    """A private file with digests of the items that were read, written before anything of them leaves.

    Args:
        path: of the file, which the first process keeps.
        processes: each reads its own items.
        key: 32 secret bytes of the run, which serve nothing else.
        source: of the items.
        is_compared: whether items are the same whenever they are read. If not, only their count is kept.
    """

    def __init__(self, path: Path, processes: Processes, key: bytes, source: Any, is_compared: bool) -> None:
        self._processes, self._source, self._is_compared = processes, source, is_compared
        self._digest = KeyedDigest(key, "items that were read")
        self._seen = torch.zeros(len(source), dtype=torch.bool)
        self._new = dict[int, str | None]()
        self._log = WriteAheadLog(path, durable=True) if processes.is_first else None
        if self._log is not None and self._log.length == 0:
            self._log.write({"count": len(source)})

    def note(self, numbers: Sequence[int], items: Sequence[Any]) -> None:
        """Remember what these items are, where they are read for the first time."""
        for number, item in zip(numbers, items, strict=True):
            if self._is_compared and not self._seen[number]:
                self._new[number] = _digest_of(item, self._digest)
                self._seen[number] = True

    def write(self) -> None:
        """Put what all processes noted into the file."""
        new = {
            str(number): one for found in self._processes.all_of(self._new) for number, one in found.items()
        }
        if self._log is not None and new:
            self._log.write(new)
        self._new = {}

    def differ(self) -> bool:
        """Whether there are more or fewer items than when the run began, or others where some were read.

        Only the first process can say it.
        """
        assert self._log is not None
        count = len(self._seen)
        for _, row in self._log.rows():
            if row.pop("count", count) != count:
                return True
            for number in map(int, row):
                try:
                    (item,) = self._source.read(torch.tensor([number]))
                except Exception:  # it could be read before
                    return True
                if _digest_of(item, self._digest) != row[str(number)]:
                    return True
                self._seen[number] = True
        return False

    def close(self) -> None:
        """Close the file."""
        if self._log is not None:
            self._log.close()
