"""What a bound asks of its ingredients: a public threshold, one value per record, whole groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from equipoise import _validate
from equipoise.privacy.private import Private, PrivateError, unwrap


def public_threshold(name: str, value: Any) -> float:
    """A public positive bound as a float.

    Raises:
        PrivateError: for a `Private` value: a bound computed from private rows has no sensitivity proof.
    """
    if isinstance(value, Private):
        raise PrivateError(
            f"{name} is a Private value; a raw private number cannot set a bound. Use a public constant, a "
            "public schedule, or a value that the ledger released"
        )
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} must be one number, got shape {tuple(value.shape)}")
        value = float(value)
    _validate.positive(**{name: value})
    return float(value)


def check_groups(groups: Sequence[Sequence[str]], names: Sequence[str]) -> list[tuple[str, ...]]:
    """The groups of parameter names, if they hold every name exactly once.

    Raises:
        ValueError: naming what is missing, repeated or unknown.
    """
    checked = [tuple(group) for group in groups]
    flat = [name for group in checked for name in group]
    if sorted(flat) != sorted(names):
        missing = sorted(set(names) - set(flat))
        twice = sorted({name for name in flat if flat.count(name) > 1})
        unknown = sorted(set(flat) - set(names))
        raise ValueError(
            f"groups must hold every parameter exactly once; missing {missing}, repeated {twice}, unknown "
            f"{unknown}"
        )
    return checked


def one_value_a_record(name: str, values: torch.Tensor) -> torch.Tensor:
    """The raw values [B] of a `Private` tensor, after a look at where they come from.

    Raises:
        TypeError: not `Private`.
        ValueError: not one value per record.
        PrivateError: an entry may depend on other records, so that no bound would hold.
    """
    if not isinstance(values, Private):
        raise TypeError(
            f"{name} must be a Private tensor with one value per record, got {type(values).__name__}"
        )
    if values.ndim != 1:
        raise ValueError(
            f"{name} must have one value per record (shape [B]), got shape {tuple(values.shape)}"
        )
    return require_by_record(name, values)


def require_by_record(name: str, values: Private) -> torch.Tensor:
    """The raw values, if entry i is known to come from record i alone; see `provenance`."""
    if not values.by_record:
        raise PrivateError(
            f"{name} must look at each record on its own: an entry that depends on other records (a median, "
            "a sort, a mean, a position in the batch) moves when one of them enters or leaves, and the sum "
            "has no bound. Compute it from the rows' own statistics with elementwise operations and public "
            "numbers; a quantile of the batch goes through a release first"
        )
    return unwrap(values)


def require_each_alone(
    name: str,
    ask: Callable[[torch.Tensor], torch.Tensor],
    norms: torch.Tensor,
    parts: torch.Tensor,
    scale: float,
    proved: bool,
) -> None:
    """Refuse a rule whose answer for one record depends on the others, or on how many they are.

    The rule is asked again with one record more in front and with one less, as neighbouring data have, so
    that both of two neighbours are refused. It is also asked in halves where its operations do not show that
    it keeps records apart.

    Args:
        name: of the rule.
        ask: from norms [B] to the lengths [B] or [B, m] that the rule gives records of these norms.
        norms: raw norms [B].
        parts: its answer for them.
        scale: the sum's bound; lengths that agree to 1e-7 of it, or to 1e-4 of themselves, are the same.
        proved: whether the rule's operations keep records apart.

    Raises:
        PrivateError: naming the rule.
    """
    if not len(norms):
        return
    # Of two neighbours one has a record more: a rule that counts is refused on both, or neither, so that the
    # refusal itself tells nothing.
    again = [(ask(torch.cat([norms[:1], norms]))[1:], parts)]
    if len(norms) > 1:
        again.append((ask(norms[1:]), parts[1:]))
        if not proved:
            again.append((torch.cat([ask(half) for half in norms.chunk(2)]), parts))
    for found, expected in again:
        same = found.shape == expected.shape and torch.allclose(
            found.double(), expected.double(), rtol=1e-4, atol=1e-7 * scale, equal_nan=True
        )
        if not same:
            raise PrivateError(
                f"{name} gives a record another weight when other records are there; it must look at each "
                "norm on its own, and not at how many there are, since the sum has no bound otherwise"
            )


def require_length(name: str, values: torch.Tensor, norms: torch.Tensor) -> None:
    """Refuse values that are not one per row."""
    if values.shape[0] != norms.shape[0]:
        raise ValueError(
            f"{name} has {values.shape[0]} entries for {norms.shape[0]} rows; give one per record"
        )
