"""Errors of the privacy room, and checks of public arguments."""

from __future__ import annotations

import math


class PlanError(ValueError):
    """A privacy plan that cannot hold: inconsistent releases, or an event without a valid accountant."""


class BudgetError(RuntimeError):
    """The budget does not allow what was asked. Nothing was released."""


class LedgerError(RuntimeError):
    """A release that the ledger refuses. Nothing was released and nothing was charged."""


class ChangedQueryError(LedgerError):
    """A repeated draw whose sums are not what they were. Nothing left; the step can be taken again."""


class PlanUsedUpError(LedgerError):
    """A kind of release of which the plan has none left. Nothing was released and nothing was charged."""


class JournalError(RuntimeError):
    """A journal that cannot be read or written. Nothing was released."""


def check_count(name: str, value: int, meaning: str) -> int:
    """`value` if it is an integer of at least 1, else a `ValueError` that names it."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"{name} must be an integer ({meaning}), got {value!r} of type {type(value).__name__}"
        )
    if value < 1:
        raise ValueError(f"{name} must be at least 1 ({meaning}), got {value}")
    return value


def check_positive(name: str, value: float) -> float:
    """`value` if it is a positive finite number, else an error that names it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} must be positive and finite, got {value}")
    return value
