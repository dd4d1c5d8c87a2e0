"""What people read on a narrow screen is wrapped at words, and nothing is cut off."""

import io
import os
import shutil
import sys

import pytest

from equipoise.cli.screen import at_width, open_console
from equipoise.training.progress import progress_bar

TEXT = (
    "--delta is 0.1, not below 1/population: give a smaller one, see /a/path/longer/than/a/whole/line/of/it"
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> Terminal:
    """Make standard output and error a terminal of so many columns."""
    found = Terminal()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, found)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda *_: os.terminal_size((columns, 24)))
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    return found


def test_sentences_are_wrapped_at_words_on_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch, 40)
    open_console(False).print(TEXT, markup=False, soft_wrap=True)
    for shown in (screen.getvalue(), at_width(TEXT)):
        assert shown.split() == TEXT.split()  # no word is cut, none is lost
        assert all(len(line) <= 40 for line in shown.splitlines() if "/a/path" not in line)


def test_sentences_stay_one_line_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    monkeypatch.setattr(sys, "stderr", file)
    open_console(False).print(TEXT, markup=False, soft_wrap=True)
    assert file.getvalue() == TEXT + "\n"
    assert at_width(TEXT) == TEXT


def test_progress_shows_steps_epsilon_and_the_first_score_at_80_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = terminal(monkeypatch, 80)
    scores = dict.fromkeys(("accuracy", "balanced_accuracy", "f1", "auc"), 0.123456)
    with progress_bar(1000, 0, show=True) as bar:
        bar.update(1000, 1.5484, scores)
    shown = screen.getvalue()
    for part in ("1000/1000", "epsilon 1.548", "accuracy 0.1235"):
        assert part in shown
    assert "balanced_accuracy" not in shown
