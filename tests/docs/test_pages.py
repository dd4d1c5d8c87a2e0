"""What pages point at exists: files, methods, commands and their options. mkdocs checks the site's links."""

import contextlib
import re
import shlex

import pytest
import typer
from pages import DOCS, PAGES, ROOT, TOP, name_of

from equipoise.cli import GONE, app
from equipoise.methods.registry import METHODS


@pytest.mark.parametrize("name", TOP)
def test_links_of_pages_outside_of_the_site_lead_somewhere(name):
    page = ROOT / name
    for target in re.findall(r"\]\(([^)\s#]+)", page.read_text(encoding="utf-8")):
        assert re.match(r"[a-z]+:", target) or (page.parent / target).exists(), target


def test_every_method_has_a_page_or_a_section_of_one():
    pages = [page.read_text(encoding="utf-8") for page in (DOCS / "methods").glob("*.md")]
    headings = [heading for page in pages for heading in re.findall(r"^##? (\S+)$", page, re.M)]
    named = [heading for heading in headings if heading in METHODS]
    assert sorted(named) == sorted(METHODS)


def test_files_that_are_named_exist():
    rooms = "|".join(room.name for room in (ROOT / "src" / "equipoise").iterdir() if room.is_dir())
    missing = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        named = [f"src/equipoise/{path}" for path in re.findall(rf"(?<![\w/])(?:{rooms})/[\w/]+\.py", text)]
        top = "src|tests|baselines|benchmarks|reproduction|contrib|examples"
        named += re.findall(rf"\b(?:{top})/[\w/.-]*\w", text)
        missing += [f"{name_of(page)}: {path}" for path in named if not (ROOT / path).exists()]
    assert [line for line in missing if "NAME" not in line] == []


def commands(text: str) -> list[list[str]]:
    """What a page asks the reader to type after `equipoise`, in blocks and in code spans."""
    found = []
    for line in re.findall(r"(?:^|`)(equipoise [^`\n]*)", text.replace("\\\n", " "), re.M):
        with contextlib.suppress(ValueError):  # a command that is cut off in prose
            found.append(shlex.split(line, comments=True)[1:])
    return found


def test_commands_and_their_options_exist():
    known = typer.main.get_command(app).commands
    for page in PAGES:
        for words in commands(page.read_text(encoding="utf-8")):
            if (
                not words or words[0].startswith(("-", ".")) or words[0] == "trains"
            ):  # a sentence, or the name
                continue
            if words[0] in GONE and page.name == "CHANGELOG.md":  # it tells of earlier versions
                continue
            assert words[0] in known, f"{name_of(page)}: equipoise {' '.join(words)}"
            command = known[words[0]]
            if hasattr(command, "commands"):  # a group, such as data
                # alone, or as the changelog names what earlier versions had
                if len(words) == 1 or words[1] == "--help" or page.name == "CHANGELOG.md":
                    continue
                assert words[1] in command.commands, f"{name_of(page)}: equipoise {' '.join(words)}"
                command = command.commands[words[1]]
            options = {option for parameter in command.params for option in parameter.opts} | {"--help"}
            unknown = {word for word in words if word.startswith("--")} - options
            assert not unknown, f"{name_of(page)}: equipoise {' '.join(words)}"
