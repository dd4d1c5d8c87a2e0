"""Whether the stated population is near that of the data, and delta small enough for it.

Only the owner learns the number of records.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from equipoise._validate import delta_warning

_BEGIN = "the population is stated as"


def population_warning(
    records: int, population: int, batch_size: float, drawn: str = "record", test_share: float | None = None
) -> str | None:
    """A sentence where the stated population is far from the number of records, None where it is near.

    It is for the data's owner only: the number of records is private, and so is that of users, who are
    counted where they are drawn.

    >>> population_warning(1050, 1000, 100)
    >>> population_warning(1000, 12000, 256)[:76]
    'the population is stated as 12,000, but the data hold 1,000 records, so that'
    """
    if not _is_far(records, population):
        return None
    trained = (
        "" if test_share is None else f"; {1 - test_share:.0%} of it, {population:,}, are to be trained on"
    )
    held = "the data hold" if test_share is None else "the training data hold"
    stated = population if test_share is None else round(population / (1 - test_share))
    return (
        f"{_BEGIN} {stated:,}{trained}, but {held} {records:,} {drawn}s, so that a step draws "
        f"about {_count(batch_size * records / population)} of them instead of {_count(batch_size)}. "
        "The guarantee holds all the same, but the noise is that of the stated population. This sentence is "
        "for the data's owner: it is written into no file."
    )


def _count(size: float) -> str:
    """An expected number, as exact as it is of use: 166.667 is 167.

    >>> _count(1666.667), _count(2.5)
    ('1,667', '2.5')
    """
    return f"{size:,.0f}" if size >= 10 else f"{size:.2g}"


def _is_far(records: int, population: int) -> bool:
    return not 0.9 <= records / population <= 1.1


def warn_of_population(
    records: int, population: int, batch_size: float, drawn: str = "record", *, stacklevel: int = 2
) -> None:
    """Give a warning of Python's where it is far off: a log may keep it, so it tells no number of records."""
    if _is_far(records, population):
        side = "above" if population > records else "below"
        warnings.warn(
            f"{_BEGIN} {population:,}, more than a tenth {side} what the data hold, so that a step does not "
            f"draw about {_count(batch_size)} {drawn}s. The guarantee holds all the same, but the noise is "
            f"that of the stated population. State a public number close to the number of {drawn}s.",
            stacklevel=stacklevel + 1,
        )


def warn_of_delta(delta: float, population: int, *, stacklevel: int = 2) -> None:
    """Warn if delta would let a whole record leak."""
    if (warning := delta_warning(delta, population)) is not None:
        warnings.warn(warning, stacklevel=stacklevel + 1)


@contextmanager
def population_told_elsewhere() -> Iterator[None]:
    """Leave these warnings out: the caller has a better place for them, or has given them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=f"{_BEGIN}|delta=")
        yield
