"""A record whose row no method sees, though it is in the forward: what it moves, it moves through others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from equipoise.privacy import Private
from equipoise.privacy.private import unwrap

__all__ = ["SilentMethod", "WholeDrawError"]


class _Proxy:
    """Another object, but for what a subclass does differently."""

    def __init__(self, inner: Any, record: int) -> None:
        self._inner, self._record = inner, record

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class SilentMethod(_Proxy):
    """A method that does not see the row of one record, which is in the forward nevertheless."""

    def init(self, context: Any) -> Any:
        return self._inner.init(_SilentContext(context, self._record))

    def step(self, context: Any, state: Any) -> Any:
        return self._inner.step(_SilentContext(context, self._record), state)


class _SilentContext(_Proxy):
    def draw(self, name: str = "batch") -> Any:
        return _SilentDraw(self._inner.draw(name), self._record)


class _SilentDraw(_Proxy):
    """A draw whose micro-batches come without one record's row.

    What a method makes of all rows (`rows`) and asks with (`along`) has no place for the record either.
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
            keep = (unwrap(ids) != self._record).nonzero().flatten()
            if len(keep) == len(unwrap(ids)):
                return fn(*given)
            kept = Private(unwrap(ids)[keep], ids.draw)
            return fn(*(one.rows(keep) for one in rows), kept)

        return seen


class WholeDrawError(Exception):
    """The method looks at numbers of a whole draw."""
