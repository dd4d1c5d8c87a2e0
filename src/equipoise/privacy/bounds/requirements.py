"""What a bound asks of its ingredients: a public threshold, one value per record, whole groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from equipoise import _validate
from equipoise.privacy.private import Private, PrivateError, unwrap

#: How many norms a clip rule sees at a time. Any constant would do: large enough for most draws to be one
#: block, small enough to cost nothing for a single record.
BLOCK = 1024


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


def answers_by_record(
    name: str, rule: Callable[[torch.Tensor], torch.Tensor], norms: torch.Tensor, scale: float
) -> torch.Tensor:
    """The raw weights [B] that a rule gives records of these norms, each for its own record alone.

    The rule computes on `Private` norms, so that its operations show whether they keep records apart. It sees
    them in blocks of one length, the last filled up, so that it cannot tell how many there are. What may mix
    records is asked in other company too; see `require_each_alone`.

    Args:
        name: of the rule.
        rule: from norms to one weight per record.
        norms: raw norms [B].
        scale: the sum's bound.

    Raises:
        PrivateError: the rule looks at other records.
        ValueError: it does not return one weight per record.
    """
    found = []
    for block in torch.split(norms, BLOCK):
        whole = torch.cat([block, block.new_ones(BLOCK - len(block))])
        answer = rule(Private(whole))
        if answer.shape != whole.shape:
            raise ValueError(
                f"{name} returned shape {tuple(answer.shape)} for norms of shape {tuple(whole.shape)}; it "
                "must return one weight per record"
            )
        if not (isinstance(answer, Private) and answer.by_record):
            weights = unwrap(rule(Private(norms)))
            lengths = weights.double() * norms.double()
            require_each_alone(
                name, lambda some: unwrap(rule(Private(some))).double() * some.double(), norms, lengths, scale
            )
            return weights
        found.append(unwrap(answer)[: len(block)])
    return torch.cat(found)


def require_each_alone(
    name: str,
    ask: Callable[[torch.Tensor], torch.Tensor],
    norms: torch.Tensor,
    parts: torch.Tensor,
    scale: float,
) -> None:
    """Refuse a rule whose answer for one record depends on the others, or on how many they are.

    The rule is asked again with one record more in front and with one less, as neighbouring data have, so
    that both of two neighbours are refused. It is also asked in halves.

    Args:
        name: of the rule.
        ask: from norms [B] to the lengths [B] or [B, m] that the rule gives records of these norms.
        norms: raw norms [B].
        parts: its answer for them.
        scale: the sum's bound; lengths that agree to 1e-7 of it, or to 1e-4 of themselves, are the same.

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
