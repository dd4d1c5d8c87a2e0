"""The documentation as data: pages, and fenced blocks with the tag above them.

A comment above a block says how the tests treat it: `<!-- slow -->` leaves it to the slow tests, and
`<!-- skip: reason -->` leaves it out. `<!-- needs: package -->` runs it where the optional package is.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/federated/README.md")
PAGES = sorted([*DOCS.rglob("*.md"), *(ROOT / name for name in TOP)])
FENCE = re.compile(r"^```(\w*)\s*$")
TAG = re.compile(r"^<!-- (slow|skip|needs): ?(.*?) ?-->$|^<!-- (slow) -->$")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, the line where the text begins, and how tests treat it."""

    language: str
    text: str
    line: int
    slow: bool = False
    skip: str | None = None
    needs: str | None = None

    @property
    def runs(self) -> bool:
        return self.language in ("python", "sh") and self.skip is None


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found: list[Block] = []
    language, start, text, above = None, 0, [], ""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = FENCE.match(line)
        if language is None and fence:
            language, start, text = fence[1], number + 1, []
        elif language is not None and line == "```":
            tag = TAG.match(above)
            slow = bool(tag) and "slow" in (tag[1], tag[3])
            skip, needs = (tag[2] if tag and tag[1] == kind else None for kind in ("skip", "needs"))
            found.append(Block(language, "\n".join(text) + "\n", start, slow, skip, needs))
            language, above = None, ""
        elif language is not None:
            text.append(line)
        elif line.strip():
            above = line.strip()
    assert language is None, f"{name_of(page)}: the block that begins at line {start} has no end"
    return found
