"""The pages hang together without the site generator: links, navigation, methods, and the house's prose."""

from __future__ import annotations

import ast
import contextlib
import re
import shlex
import tokenize
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest
import typer
from pages import DOCS, PAGES, ROOT, anchors, name_of, without_blocks

from equipoise.cli import app
from equipoise.methods.registry import METHODS

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
WIDTH, WORDS = 120, 100
# Idioms that read as translations, with what to write.
AVOID = {
    r"\bkeepers?\b": "data owner",
    r"\bcoins?\b": "secret randomness",
    r"\blots\b": "secret randomness, or random labels",
    r"\bbeside(s)?\b": "next to, compared with, in addition",
    r"\bis none\b": "say what is so",
    r"\balone[.;:]": "only, before the noun",
    r"\b(one|a) (line|number|loss|clip norm|step) a (method|record|step|round|layer)\b": "per",
}


SOURCES = ROOT / "src" / "equipoise"


def prose(page):
    """Paragraphs and list items: (number of the first line, text)."""
    lines = [
        (number, line)
        for number, line in without_blocks(page)
        if not line.startswith(("|", "#", "<!--", ":::"))
    ]
    for blank, group in groupby(lines, key=lambda pair: not pair[1].strip()):
        if blank:
            continue
        item: list[tuple[int, str]] = []
        for number, line in group:
            if item and re.match(r"\s*([-*]|\d+\.) ", line):
                yield item[0][0], " ".join(text.strip() for _, text in item)
                item = []
            item.append((number, line))
        yield item[0][0], " ".join(text.strip() for _, text in item)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for number, line in without_blocks(page):
        for target in LINK.findall(re.sub(r"`[^`]*`", "", line)):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            there = (page.parent / path).resolve() if path else page
            assert there.exists(), f"{name_of(page)}:{number}: {target}"
            assert not anchor or anchor in anchors(there), (
                f"{name_of(page)}:{number}: no heading for {target}"
            )
            if DOCS in page.parents:
                assert DOCS in there.parents, f"{name_of(page)}:{number}: {target} lies outside of the site"


def test_the_navigation_lists_every_page_once():
    listed = re.findall(r"(\S+\.md)\s*$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_every_method_has_a_page():
    pages = {page.stem for page in (DOCS / "methods").glob("*.md")} - {"index"}
    assert pages == set(METHODS)


def test_the_list_of_methods_names_every_method():
    text = (DOCS / "methods" / "index.md").read_text(encoding="utf-8")
    table = text[text.index("## All of them") : text.index("## As published")]
    assert sorted(re.findall(r"^\| \[(\S+)\]\(\1\.md\) \|", table, re.M)) == sorted(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_the_page_of_a_method_has_its_parts(name):
    text = (DOCS / "methods" / f"{name}.md").read_text(encoding="utf-8")
    for part in ("## Guarantee", "## When to use it", "```sh"):
        assert part in text, f"docs/methods/{name}.md: {part} is missing"
    assert "](../figures/" in text, (
        f"docs/methods/{name}.md shows no figure: add a Picture to reproduction/pictures.py, draw it with "
        f"`python -m reproduction pictures {name}`, and link ../figures/{name}.png"
    )


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_lines_and_paragraphs_are_short(page):
    for number, line in without_blocks(page):
        assert not line.startswith(("<<<<<<<", ">>>>>>>")), f"{name_of(page)}:{number}: a merge left this"
        assert len(line) <= WIDTH or line.startswith("|"), f"{name_of(page)}:{number}: {len(line)} characters"
    for number, paragraph in prose(page):
        words = len(paragraph.split())
        assert words <= WORDS, f"{name_of(page)}:{number}: {words} words in one paragraph"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_prose_is_plain(page):
    found = [
        f"{name_of(page)}:{number}: {match[0]!r}: {better}"
        for number, paragraph in prose(page)
        for pattern, better in AVOID.items()
        if (match := re.search(pattern, re.sub(r"`[^`]*`", "", paragraph)))
    ]
    assert found == []


def words_of(path: Path) -> Iterator[tuple[int, str]]:
    """What a source file says to people: its docstrings, other strings of several words, and comments."""
    if path.suffix != ".py":  # a template
        yield from enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        return
    inside: set[int] = set()  # the parts of f-strings, which are read as a whole
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            inside |= {id(part) for part in node.values}
            parts = [part.value if isinstance(part, ast.Constant) else "x" for part in node.values]
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.lineno, node.value
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def insider_words(path: Path) -> list[str]:
    return [
        f"{name_of(path)}:{number}: {match[0]!r}: {better}"
        for number, text in words_of(path)
        for pattern, better in AVOID.items()
        if " " in text and (match := re.search(pattern, re.sub(r"`[^`]*`", "", text)))
    ]


@pytest.mark.parametrize("folder", sorted({path.parent.name for path in SOURCES.glob("*/__init__.py")}))
def test_the_words_of_the_package_are_plain(folder):
    files = [path for kind in ("*.py", "*.j2") for path in sorted((SOURCES / folder).rglob(kind))]
    assert [word for path in files for word in insider_words(path)] == []


def test_the_words_at_the_top_of_the_package_are_plain():
    assert [word for path in sorted(SOURCES.glob("*.py")) for word in insider_words(path)] == []


def test_an_insider_word_in_a_source_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr("test_pages.ROOT", tmp_path)
    monkeypatch.setattr("pages.ROOT", tmp_path)
    path = tmp_path / "module.py"
    path.write_text(
        '"""Reads the first alone."""\n'
        "beside = 1  # beside the point\n"
        "name = 'beside'\n"
        "raise ValueError(f'{name} stands alone.')\n"
        "print('what `alone.` means')\n"
    )
    lines = [word.split(": ")[0] for word in insider_words(path)]
    assert sorted(lines) == ["module.py:1", "module.py:2", "module.py:4"]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_sentences_are_short_on_the_whole(page):
    """The mean is held to 20 words, so that a long sentence is an exception."""
    lengths = [
        len(sentence.split())
        for _, paragraph in prose(page)
        for sentence in re.split(r"(?<=[.?!:;])\s", re.sub(r"`[^`]*`", "x", paragraph))
        if len(sentence.split()) > 2
    ]
    if len(lengths) > 5:
        assert sum(lengths) / len(lengths) <= 20, f"{name_of(page)}: {sum(lengths) / len(lengths):.1f} words"


def test_the_two_commands_of_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "\nmake train " in readme
    assert "\nmake test " in readme


def commands(text: str) -> list[list[str]]:
    """What a page asks the reader to type after `equipoise`, in blocks and in code spans."""
    found = []
    for line in re.findall(r"(?:^|`)(equipoise [^`\n]*)", text.replace("\\\n", " "), re.M):
        with contextlib.suppress(ValueError):  # a command that is cut off in prose
            found.append(shlex.split(line, comments=True)[1:])
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_and_their_options_exist(page):
    known = typer.main.get_command(app).commands
    for words in commands(page.read_text(encoding="utf-8")):
        if not words or words[0].startswith(("-", ".")) or words[0] == "trains":  # a sentence, or the name
            continue
        assert words[0] in known, f"{name_of(page)}: equipoise {' '.join(words)}"
        command = known[words[0]]
        if hasattr(command, "commands"):  # a group, such as data
            assert words[1] in command.commands, f"{name_of(page)}: equipoise {' '.join(words)}"
            command = command.commands[words[1]]
        options = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        unknown = {word for word in words if word.startswith("--")} - options
        assert not unknown, f"{name_of(page)}: equipoise {' '.join(words)}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_are_named_exist(page):
    text = page.read_text(encoding="utf-8")
    rooms = "|".join(room.name for room in (ROOT / "src" / "equipoise").iterdir() if room.is_dir())
    for path in re.findall(rf"(?<![\w/])(?:{rooms})/[\w/]+\.py", text):
        assert (ROOT / "src" / "equipoise" / path).exists(), f"{name_of(page)}: {path}"
    for path in re.findall(r"\b(?:src|tests|benchmarks|reproduction|contrib|examples)/[\w/.-]*\w", text):
        if "NAME" not in path:
            assert (ROOT / path).exists(), f"{name_of(page)}: {path}"
