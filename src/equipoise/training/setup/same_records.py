"""The same records in every process.

A draw is a list of numbers, which every process looks up in its own data. Where two processes had data in
another order, one person's record could be drawn twice.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from equipoise._tree import leaves
from equipoise.privacy import digest
from equipoise.training.distributed import Processes
from equipoise.training.owners import Owners
from equipoise.training.record_source import RecordSource

__all__ = ["COMPARED", "check_same_records"]

COMPARED = 4
"""Of how many records each process is asked, where they are read on demand."""


def check_same_records(processes: Processes, source: RecordSource, owners: Owners | None) -> None:
    """Refuse processes that look different records up under the same numbers.

    Tensors in memory are compared as a whole, records that are read on demand by a few of them.

    Args:
        processes: each with its own data.
        source: the records here.
        owners: whose they are, or None.

    Raises:
        RuntimeError: they differ.
    """
    if processes.count == 1:
        return
    try:
        read: Any = leaves(source.take(source.spread(COMPARED)))
    except Exception:  # in all processes, or they differ
        read = []
    few = {"records": [leaf for leaf in read if isinstance(leaf, Tensor)], "count": len(source)}
    found = processes.all_of((digest(few), source.fingerprint()))
    if owners is not None:
        processes.same("owner", owners.partition())
    wholes = {whole for _, whole in found if whole}
    if len({first for first, _ in found}) > 1 or len(wholes) > 1:
        raise RuntimeError(
            "the processes do not agree on the records of data, so that one could be drawn twice: give every "
            "process the same data in the same order (shuffle it by a fixed seed). Nothing was spent."
        )
