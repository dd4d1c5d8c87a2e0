"""What the commands say: one JSON object for programs, words on a console for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["emit", "fail", "loading", "open_console", "quiet", "warn_of_numbers"]


def open_console(as_json: bool) -> Console:
    """Where words for people go."""
    from rich.console import Console

    return Console(stderr=as_json, highlight=False)


@contextmanager
def loading() -> Iterator[None]:
    """Say at once that something happens: PyTorch takes seconds to load. Only a person's screen shows it."""
    with open_console(True).status("starting: loading PyTorch"):
        yield


def quiet() -> None:
    """Keep off the screen what the accountants say about orders that they leave out."""
    from absl import logging

    logging.set_verbosity(logging.ERROR)


def emit(value: dict[str, Any]) -> None:
    """Print the answer as one JSON object."""
    # allow_nan=False: a reader of JSON must never meet the word Infinity
    print(json.dumps(value, allow_nan=False))


def warn_of_numbers(found: dict[str, Any], console: Console) -> None:
    """Say that a model is of no use, where its numbers are not finite."""
    if not found["finite"]:
        console.print(
            "[bold yellow]Warning[/]: the model's numbers are not finite, so it answers nothing. Train again "
            "with a smaller --learning-rate, or with other inputs; what was spent stays spent.",
            soft_wrap=True,
        )


def fail(message: str, as_json: bool, code: int, name: str = "equipoise") -> int:
    """Say why nothing came of it; gives the exit code back."""
    if as_json:
        print(json.dumps({"error": message, "exit_code": code}))
    print(f"{name}: {message}", file=sys.stderr)
    return code
