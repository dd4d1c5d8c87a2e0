"""Gradient rows of a model whose parameters are sharded over processes.

Whole weighted sums exist for some tensors at a time, on the way to the processes that hold the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from equipoise._collectives import BUCKET, reduce_scattered
from equipoise._dtensor import device_of, is_dtensor, local_part, with_part
from equipoise.gradients.numerics import accumulation_dtype
from equipoise.privacy.private import as_sum
from equipoise.privacy.whole_sums import WholeSum


class NotMadeYet(NotImplementedError, AttributeError):
    """What other rows have and these have not, so that `hasattr` says so."""


class ShardedRows:
    """Rows whose weighted sums are those of all processes, each of which gets its part.

    Args:
        rows: of the records of this process.
        params: the parameters by name, DTensors where they are sharded.
        unit: of the whole numbers in which processes add up (`whole_sums`); 0 for sums without a bound.
    """

    def __init__(self, rows: Any, params: Mapping[str, Tensor], unit: float = 0.0) -> None:
        self._rows, self._params, self._unit = rows, params, unit
        self.names, self.shapes, self.num_parameters = rows.names, rows.shapes, rows.num_parameters
        self.num_records, self.dtype, self.device = rows.num_records, rows.dtype, rows.device
        self.losses = rows.losses

    def row_norms(self, groups: Sequence[Sequence[str]] | None = None) -> Tensor:
        """Norms of this process' rows, [B] or [B, m]: each holds whole rows of its own records."""
        found: Tensor = self._rows.row_norms(groups)
        return found

    def weighted_sums(self, weights: Tensor | Mapping[str, Tensor]) -> dict[str, Tensor]:
        """{name: sum}: over all processes where the parameter is sharded, otherwise over this one's rows."""
        out: dict[str, Tensor] = {}
        bucket: list[str] = []
        size = 0
        # As many at a time as are sent at once: whole sums of the others do not exist yet, or any more.
        for name in self.names:
            bucket.append(name)
            size += self.shapes[name].numel()
            if size >= BUCKET or name == self.names[-1]:
                out |= self._sums(bucket, weights)
                bucket, size = [], 0
        return out

    def _sums(self, names: list[str], weights: Tensor | Mapping[str, Tensor]) -> dict[str, Tensor]:
        if isinstance(weights, Mapping):
            weights = {name: weights[name] for name in names}
        sums = self._rows.select(names).weighted_sums(weights)
        # Alike in every process, also in one that has no rows to take a type and a device from.
        found: dict[str, Tensor] = {
            name: total.to(device_of(self._params[name]), accumulation_dtype(self._params[name].dtype))
            for name, total in sums.items()
        }
        sharded = [name for name in names if is_dtensor(self._params[name])]
        types, like = [found[name].dtype for name in sharded], [self._params[name] for name in sharded]
        wholes = [WholeSum.of(found.pop(name), self._unit) for name in sharded]
        # What is lost here, all learn where they exchange it (`added_over_processes`).
        tensors, lost = [one.total for one in wholes], sum([one.lost for one in wholes], torch.zeros(()))
        del wholes

        def of_all(total: Tensor, dtype: torch.dtype) -> Tensor:
            return as_sum(WholeSum(total, self._unit, lost), dtype, None)

        if all(tensor.ndim == one.ndim for tensor, one in zip(tensors, like, strict=True)):
            added = zip(sharded, reduce_scattered(tensors, like), types, strict=True)
            return found | {name: of_all(total, dtype) for name, total, dtype in added}
        # Several sums of each: one after the other, and joined again.
        counts = [len(tensor) for tensor in tensors]
        repeated = [one for one, count in zip(like, counts, strict=True) for _ in range(count)]
        parts = iter(reduce_scattered([one for tensor in tensors for one in tensor], repeated))
        for name, one, count, dtype in zip(sharded, like, counts, types, strict=True):
            whole = with_part(torch.stack([local_part(next(parts)) for _ in range(count)]), one)
            found[name] = of_all(whole, dtype)
        return found

    def summed_in(self, unit: float) -> ShardedRows:
        """The same rows, whose sums are whole numbers of this unit."""
        return ShardedRows(self._rows, self._params, unit)

    def rows(self, index: Tensor | slice) -> ShardedRows:
        """Some of the rows; no process may leave out a sum for want of any."""
        return ShardedRows(self._rows.rows(index), self._params)

    def __sub__(self, other: ShardedRows) -> ShardedRows:
        """Row differences, of this process' records at two points."""
        return ShardedRows(self._rows - other._rows, self._params)

    def __getattr__(self, name: str) -> Any:
        raise NotMadeYet(
            f"{name} of the rows of a sharded model is not made yet: take DPSGD, or train a model that is "
            "not sharded"
        )
