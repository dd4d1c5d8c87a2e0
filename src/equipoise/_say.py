"""A line for whoever watches a training: it goes to standard error, and is no warning."""

from __future__ import annotations

import shutil
import sys
import textwrap

__all__ = ["at_width", "say", "wrapped"]


def at_width(text: str) -> str:
    """The text wrapped at words if standard error is a terminal; otherwise as it is."""
    return wrapped(text) if sys.stderr.isatty() else text


def wrapped(text: str, width: int | None = None, indent: int = 0) -> str:
    """Each line wrapped at words to a width, the terminal's by default; later lines are indented."""
    width = width or shutil.get_terminal_size().columns
    return "\n".join(
        textwrap.fill(
            line, width, break_long_words=False, break_on_hyphens=False, subsequent_indent=" " * indent
        )
        for line in text.splitlines()
    )


def say(text: str) -> None:
    """Print a line to standard error."""
    print(at_width(f"equipoise: {text}"), file=sys.stderr)
