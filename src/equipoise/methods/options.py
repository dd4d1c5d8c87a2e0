"""Options of a method that are algorithms themselves: frozen dataclasses with a `kind`."""

from __future__ import annotations

from typing import ClassVar

__all__ = ["Option"]


class Option:
    """A choice between algorithms."""

    kind: ClassVar[str]
