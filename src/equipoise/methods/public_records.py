"""Public records that a method is given: cut by number, and described without being written down.

They get no protection: what is computed from them is free, and the statement of a run rests on their being
public and on none of them being a private record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from equipoise._relations import ARE_PUBLIC
from equipoise._tree import leaves
from equipoise.gradients.engine_inputs import take_records
from equipoise.privacy.digests import digest


class PublicRecords:
    """A batch of public records.

    Args:
        batch: a tensor, or a nest of dicts, tuples and lists of tensors, whose first axis counts records.

    Raises:
        TypeError: not such a nest.
        ValueError: no records, or tensors of different lengths.

    Example:
        >>> records = PublicRecords({"x": torch.eye(3), "y": torch.arange(3)})
        >>> len(records), records.take(torch.tensor([2]))["y"]
        (3, tensor([2]))
    """

    def __init__(self, batch: Any) -> None:
        tensors = leaves(batch)
        if not tensors or not all(isinstance(leaf, Tensor) and leaf.ndim for leaf in tensors):
            raise TypeError(
                f"public is a {type(batch).__name__} that holds other things than tensors with a record "
                "axis; give a batch as loss(model, batch) takes it: a tensor or a nest of dicts, tuples and "
                "lists of tensors"
            )
        sizes = {leaf.shape[0] for leaf in tensors}
        if len(sizes) > 1 or 0 in sizes:
            raise ValueError(
                f"public holds tensors of {sorted(sizes)} records; all need the same number, at least one"
            )
        self.batch = batch
        self._size: int = sizes.pop()

    def __repr__(self) -> str:
        return f"PublicRecords({len(self)} records)"

    def __len__(self) -> int:
        return self._size

    def take(self, index: Tensor | slice) -> Any:
        """The batch of some of the records."""
        return take_records(self.batch, index)

    def drawn(self, size: int | None, rng: torch.Generator) -> Any:
        """`size` of the records at random, without replacement; all of them, in their order, when None."""
        if size is None or size >= len(self):
            return self.batch  # in their order, and without a copy
        return self.take(torch.randperm(len(self), generator=rng)[:size])

    def drawn_size(self, size: int | None) -> int:
        """How many records `drawn` gives."""
        return len(self) if size is None else min(size, len(self))

    def assumptions(self) -> tuple[str, ...]:
        """What a guarantee assumes of them, as a phrase for the statement."""
        return (f"{len(self)} {ARE_PUBLIC}",)

    def describe(self) -> dict[str, Any]:
        """Their number and a digest, as a configuration holds them."""
        # torch's words for the nest: the digests in the files of runs hold them
        tensors, structure = pytree.tree_flatten(self.batch)
        return {
            "records": len(self),
            "digest": digest({"structure": str(structure), "leaves": tensors}),
        }


class NeedsPublicRecords(ValueError):
    """A method takes public records, and none were given."""


def require_public(
    where: str, described: Mapping[str, Any] | None, public: PublicRecords | None
) -> PublicRecords:
    """The public records given again for a configuration that described them.

    Args:
        where: names the setting in messages.
        described: as `PublicRecords.describe` gives it; None takes whatever records there are.
        public: the records.

    Raises:
        NeedsPublicRecords: none given.
        ValueError: others than described.
    """
    if public is None:
        raise NeedsPublicRecords(
            f"{where} takes public records, which no configuration holds: make the method again with "
            f"{'some' if described is None else described.get('records')} public records and pass it, for "
            "instance method=... to PrivateTraining.resume"
        )
    if described is not None and (found := public.describe()) != dict(described):
        raise ValueError(
            f"public={found} differs from the records that the method was made with, {dict(described)}: give "
            "the same records in the same order"
        )
    return public
