"""What people read on a narrow screen is wrapped at words, and nothing is cut off."""

import io
import os
import re
import shutil
import sys

import pytest

from equipoise.cli import main
from equipoise.cli.screen import at_width, open_console
from equipoise.training.progress import progress_bar

TEXT = "a\tb --delta is 0.1, not below 1/population: give a smaller: /a/path/longer/than/a/whole/line/of/it"


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


@pytest.mark.parametrize("piped", [False, True])
def test_sentences_are_wrapped_at_words_on_a_screen_and_in_a_file(monkeypatch, piped) -> None:
    screen = terminal(monkeypatch, 40)
    monkeypatch.setattr(screen, "isatty", lambda: not piped)
    open_console(False).print(TEXT, markup=False)
    for shown in (screen.getvalue(), at_width(TEXT)):
        assert shown.split() == TEXT.split()  # no word is cut, none is lost
        assert all(len(line) <= 40 or line.startswith("/a/path") for line in shown.splitlines())


def lines_on_screen(text: str) -> list[str]:
    """Without colours and what a later sign overwrote."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return [line.rstrip("\r").rpartition("\r")[2] for line in plain.split("\n")]


ON_TABLE = "--data people.csv --epsilon 3 --delta 0.1 --epochs 2 --population 12000 --test-share 0.25"
COMMANDS = (
    "schema init people.csv --target buys --output other.schema.toml",
    f"train {ON_TABLE} --run-dir a-folder-with-a-rather-long-name-in/another-one",
    "verify a-folder-with-a-rather-long-name-in/another-one",
    "resume a-folder-with-a-rather-long-name-in/another-one",
    "calibrate --population 400 --batch-size 50 --steps 60 --epsilon 3 --delta 0.1",
)


def test_no_line_of_the_common_commands_is_longer_than_the_screen(people, monkeypatch, tmp_path) -> None:
    for path in people.parent.glob("people*"):
        shutil.copy(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    screen = terminal(monkeypatch, 80)
    for command in COMMANDS:
        at = screen.tell()
        assert main(command.split()) == 0, screen.getvalue()[at:]
        said = lines_on_screen(screen.getvalue()[at:])
        assert len(said) > 3, command
        assert [line for line in said if len(line) > 80] == [], command
    shown = lines_on_screen(screen.getvalue())
    assert "  equipoise predict a-folder-with-a-rather-long-name-in/another-one \\" in shown
    assert "    --data ROWS.csv --output predicted.csv" in shown


def test_progress_shows_steps_epsilon_and_the_first_score_at_80_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = terminal(monkeypatch, 80)
    scores = dict.fromkeys(("accuracy", "balanced_accuracy", "f1", "auc"), 0.123456)
    with progress_bar(1000, 0, show=True) as show:
        show(1000, 1.5484, scores)
    shown = screen.getvalue()
    for part in ("1000/1000", "epsilon 1.549", "accuracy 0.1235"):
        assert part in shown
    assert "balanced_accuracy" not in shown
