"""Public records that are private ones as well are found by their bytes.

Every guarantee of a method with public records assumes that none of them is a private record; a split gone
wrong would break it unnoticed. So the rows are compared, in all tensors that a public batch holds. This looks
at private data and can end the training before it begins, as the validation of the data does: the answer goes
to the data owner only, and what is published afterwards speaks of data sets without such copies.

Equal bytes need not be one person's record: short records of different persons agree by chance. Only the data
owner can know, and then says so (`allow_public_duplicates`); the statement repeats it, found or not.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from equipoise._tree import named_leaves
from equipoise.methods import Method
from equipoise.privacy.noise.uniform import keyed_hash
from equipoise.training.assumptions import ALLOWED, NOT_COMPARED
from equipoise.training.record_source import DataError, RecordSource

__all__ = ["check_public", "fields_of", "public_assumptions"]


def check_public(source: RecordSource, method: Method, allowed: bool) -> None:
    """Refuse public records that are private ones.

    Args:
        source: the private records.
        method: whose public records are looked at.
        allowed: equal records are those of different persons; nothing is compared.

    Raises:
        DataError: a public record equals a private one in every byte.
    """
    if allowed or not source.is_scanned:
        return
    for public in method.public_batches():
        found = _copies(public.batch, source.batch())
        if found:
            raise DataError(
                f"{found} of the {len(public)} public records equal private records of data, and a public "
                "record gets no protection. Take them out of data or out of the public ones; if they are "
                "other persons', give allow_public_duplicates=True, which the statement then names."
            )


def public_assumptions(is_scanned: bool, method: Method, allowed: bool) -> list[str]:
    """What the statement says of the comparison; it follows from the settings, not from the records."""
    if not method.public_batches():
        return []
    if allowed:
        return [ALLOWED]
    return [] if is_scanned else [NOT_COMPARED]


def _copies(public: Any, private: Any) -> int:
    """How many public records are among the private ones, in the fields that the public batch has.

    >>> _copies({"x": torch.tensor([1.0, 2.0])}, {"x": torch.tensor([2.0, 3.0]), "y": torch.zeros(2)})
    1
    """
    there, wanted = fields_of(private), fields_of(public)
    if not set(wanted) <= set(there) or any(
        wanted[name].shape[1:] != there[name].shape[1:] for name in wanted
    ):
        return 0  # of another make: no row can be the same
    key = secrets.token_bytes(32)
    rows = keyed_hash([there[name] for name in wanted], key)
    found = keyed_hash([wanted[name].to(there[name].dtype) for name in wanted], key)
    return int(torch.isin(found, rows).sum())


def fields_of(batch: Any) -> Mapping[str, Tensor]:
    """The tensors of a batch by their place in it."""
    return {name: leaf for name, leaf in named_leaves(batch).items() if isinstance(leaf, Tensor)}
