"""Records whose rows no method sees: what they move, being in the forward, they move through others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from equipoise.privacy import Private
from equipoise.privacy.private import unwrap


class _Proxy:
    """Another object, but for what a subclass does differently."""

    def __init__(self, inner: Any, records: tuple[int, ...]) -> None:
        self._inner, self._records = inner, records

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class SilentMethod(_Proxy):
    """A method that does not see the rows of some records, which are in the forward nevertheless."""

    def init(self, context: Any) -> Any:
        return self._inner.init(_SilentContext(context, self._records))

    def step(self, context: Any, state: Any) -> Any:
        return self._inner.step(_SilentContext(context, self._records), state)


class _SilentContext(_Proxy):
    def draw(self, name: str = "batch") -> Any:
        return _SilentDraw(self._inner.draw(name), self._records)


class _SilentDraw(_Proxy):
    """A draw whose micro-batches come without these records' rows.

    What a method makes of all rows (`rows`) and asks with (`along`) has no place for the records either.
    """

    def query(self, fn: Callable[..., Any], at: Any = None, along: Any = None) -> Any:
        if along is None:
            return self._inner.query(self._hiding(fn), at)
        raise WholeDrawError

    def rows(self, fn: Callable[..., Any], at: Any = None) -> Any:
        raise WholeDrawError

    def _hiding(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        def seen(*given: Any) -> Any:
            *rows, ids = given
            hidden = torch.isin(unwrap(ids), torch.tensor(self._records, device=unwrap(ids).device))
            keep = (~hidden).nonzero().flatten()
            if len(keep) == len(unwrap(ids)):
                return fn(*given)
            kept = Private(unwrap(ids)[keep], ids.draw)
            return fn(*(one.rows(keep) for one in rows), kept)

        return seen


class WholeDrawError(Exception):
    """The method looks at numbers of a whole draw."""
