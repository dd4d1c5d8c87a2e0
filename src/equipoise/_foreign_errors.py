"""Errors of code that is not ours, such as a user's loss: their texts may hold records.

A message of ours tells what kind of error it was and where it was raised. The text stays with the error,
the cause of ours. Python's traceback shows it to whoever runs the code; no message or log of ours does.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from types import FrameType

_LONGEST = 2000
"""Characters of a text that a traceback shows; torch's own messages are shorter, printed tensors longer."""


def where_raised(error: BaseException) -> str:
    """The kind of an error, and its last line that is neither ours nor torch's.

    >>> try:
    ...     {}["a secret"]
    ... except KeyError as error:
    ...     where_raised(error)
    'KeyError in <module> (..., line 2)'
    """
    place = place_of_user(error)
    if place is None and error.__traceback__ is not None:
        place = _place(*[*traceback.walk_tb(error.__traceback__)][-1])
    return type(error).__name__ + (f" in {place}" if place else "")


def place_of_user(error: BaseException) -> str | None:
    """The last function and line behind an error that is neither ours nor torch's, if there is one."""
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__", "")).split(".")[0] not in ("equipoise", "torch"):
            found = _place(frame, line)
    return found


def _place(frame: FrameType, line: int) -> str:
    return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}, line {line})"


def cause_of(error: BaseException) -> BaseException | None:
    """The error as the cause of ours; None where its text is too long to be shown."""
    return error if len(str(error)) <= _LONGEST else None
