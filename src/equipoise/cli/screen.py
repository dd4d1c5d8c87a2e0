"""What the commands say: one JSON object for programs, words on a console for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from equipoise._say import at_width, wrapped

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


def open_console(as_json: bool) -> Console:
    """Where words for people go, wrapped at words; one longer than a line, such as a path, stays whole."""
    from rich.console import Console

    class Screen(Console):
        def print(self, *objects: Any, markup: bool | None = None, **given: Any) -> None:
            for one in objects or ("",):
                if isinstance(one, str):
                    text = _at_words(self.render_str(one, markup=markup), self.width)
                    super().print(text, soft_wrap=True, **given)
                else:
                    super().print(one, **given)

    return Screen(stderr=as_json, highlight=False)


def _at_words(text: Text, width: int) -> Text:
    """The text wrapped as `wrapped` does it. Rich itself cuts long words, or does not wrap at all."""
    from rich.text import Text

    lines, at = [], 0
    for line in wrapped(text.plain, width).split("\n"):
        words = line.lstrip()
        at = text.plain.index(words, at)
        lines.append(Text(line[: len(line) - len(words)]) + text[at : at + len(words)] if words else Text())
        at += len(words)
    return Text("\n").join(lines)


@contextmanager
def loading() -> Iterator[None]:
    """Say at once that something happens: PyTorch takes seconds to load. Only a person's screen shows it.

    The accountants, which are loaded too, are quiet from then on.
    """
    with open_console(True).status("starting: loading PyTorch"):
        yield
        quiet()


def quiet() -> None:
    """Keep off the screen what the accountants say about orders that they leave out."""
    from absl import logging

    logging.set_verbosity(logging.ERROR)


def emit(value: dict[str, Any]) -> None:
    """Print the answer as one JSON object."""
    # allow_nan=False: a reader of JSON must never meet the word Infinity
    print(json.dumps(value, allow_nan=False))


def answer(values: dict[str, Any], as_json: bool, *shown: Any) -> None:
    """Print the values as JSON, or what is shown of them; None and "" are left out."""
    if as_json:
        emit(values)
        return
    console = open_console(False)
    for one in shown:
        if one is not None and one != "":
            console.print(one)


def warn_of_numbers(found: dict[str, Any], console: Console) -> None:
    """Say that a model is of no use, where its numbers are not finite."""
    if not found["finite"]:
        console.print(
            "[bold yellow]Warning[/]: the model's numbers are not finite, so it is useless. Train again with "
            "a smaller --learning-rate, or with other inputs; what was spent stays spent."
        )


def fail(message: str, as_json: bool, code: int, name: str = "equipoise") -> int:
    """Say why nothing came of it; gives the exit code back."""
    if as_json:
        with suppress(OSError):  # this output may be what is full
            print(json.dumps({"error": message, "exit_code": code}))
    print(at_width(f"{name}: {message}"), file=sys.stderr)
    return code
