"""Why a client does not do what the server asks: it refuses, or its own books are broken."""

from __future__ import annotations

from equipoise.privacy.errors import JournalError, LedgerError
from equipoise.training.checkpoint import CheckpointError

__all__ = ["BROKEN_BOOKS", "Refused"]

BROKEN_BOOKS = (LedgerError, JournalError, CheckpointError)
"""One client's own trouble: its ledger, its journal or its folder. The others go on without it."""


class Refused(RuntimeError):
    """A client refuses a request: it makes no sense, is out of order, or is beyond the client's budget.

    Where the request made no sense or was out of order, nothing was spent. The message holds nothing private.
    """
