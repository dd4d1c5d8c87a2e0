"""Errors of the privacy room."""

from __future__ import annotations


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
