"""The neighbouring relations by the names that arguments and files give them."""

from __future__ import annotations

__all__ = ["RELATIONS"]

RELATIONS = ("add_or_remove_one", "replace_one")
