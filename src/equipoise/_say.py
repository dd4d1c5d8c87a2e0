"""Lines for people, at the width of their terminal; those of a training go to standard error."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap

_BEGIN = re.compile(r" *(- )?")


def at_width(text: str) -> str:
    """The text wrapped at words, at the width of the terminal, or at 80 columns where there is none."""
    return wrapped(text, shutil.get_terminal_size().columns)


def page_width() -> int:
    """Of a text of several lines, for whatever prints it: the terminal's, and at most 88."""
    return min(88, shutil.get_terminal_size().columns)


def wrapped(text: str, width: int, indent: int | None = None) -> str:
    """Each line wrapped at words, and its rest indented: as far as its beginning or its bullet by default.

    A word longer than a line stays whole, and names of options and files are not cut at their hyphens.

    >>> print(wrapped("  - one two three four", 12))
      - one two
        three
        four
    """
    lines = []
    for line in text.splitlines():
        begin = _BEGIN.match(line)
        rest = " " * (begin.end() if indent is None and begin else indent or 0)
        lines += textwrap.wrap(
            line,
            width,
            subsequent_indent=rest,
            expand_tabs=False,  # every word stays as it is
            replace_whitespace=False,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]
    return "\n".join(lines)


def continued(command: str, width: int) -> str:
    r"""A command for a shell, indented by two spaces, and by backslashes in lines that fit the width.

    >>> print(continued("equipoise predict run --data rows.csv", 30))
      equipoise predict run \
        --data rows.csv
    """
    lines = [""]
    for part in command.split(" --"):
        part = part if lines == [""] else f"--{part}"
        if lines[-1] and len(lines[-1]) + len(part) + 7 > width:
            lines.append(part)
        else:
            lines[-1] = f"{lines[-1]} {part}".strip()
    return "  " + " \\\n    ".join(lines)


def say(text: str) -> None:
    """Print a line to standard error."""
    print(at_width(f"equipoise: {text}"), file=sys.stderr)
