"""What a client says when it does not do what the server asks."""

from __future__ import annotations

__all__ = ["Refused"]


class Refused(RuntimeError):
    """A client refuses a request: it makes no sense, is out of order, or is beyond the client's budget.

    Where the request made no sense or was out of order, nothing was spent. The message holds nothing private.
    """
