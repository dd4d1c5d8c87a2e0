"""Bounded sums, noise, sampling, releases, ledger, accounting: the one door out of the private side.

Rows computed from records are `PrivateRows`; their numbers are `Private`. `clip` and its kin make `Bounded`
sums, whose sensitivity is known. The `Ledger` adds noise to them, books the event in a write-ahead journal
and hands them out. What may be released is fixed beforehand in a `PrivacyPlan`, built from public constants
and calibrated to a `Budget`.
"""

from equipoise._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
