"""Words of a guarantee that several rooms share."""

from __future__ import annotations

from collections.abc import Mapping

#: The neighbouring relations by the names that arguments and files give them.
RELATIONS = ("add_or_remove_one", "replace_one")

#: What a guarantee assumes of public records, after their number.
ARE_PUBLIC = "records are public, get no protection, and none of them is a private record"


def condition_in_words(independence: Mapping[str, str]) -> str:
    """What a guarantee rests on, behind its word; empty if all is proved, or nothing is known.

    >>> condition_in_words({"model": "compared", "data": "proved"})
    ', if records are kept apart (compared)'
    """
    weakest = [word for word in ("unchecked", "compared") if word in independence.values()]
    return f", if records are kept apart ({weakest[0]})" if weakest else ""
