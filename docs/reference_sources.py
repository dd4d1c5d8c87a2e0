"""How the reference reads the sources: what a package exports, and where a docstring has examples."""

from __future__ import annotations

import re
from typing import Any

import griffe


def with_examples(text: str) -> str:
    """Doctests as code: a section `Example:` is named as the parser knows it, others are fenced."""
    lines: list[str] = []
    fenced = False
    for line in re.sub(r"^Example:$", "Examples:", text, flags=re.M).splitlines():
        if line.startswith(">>> ") and not fenced:
            lines.append("```python")
            fenced = True
        elif fenced and not line.strip():
            lines.append("```")
            fenced = False
        lines.append(line)
    return "\n".join([*lines, "```"] if fenced else lines)


class Reexports(griffe.Extension):
    """Read `from equipoise.a.b import Name as Name` in a package's `__init__` as an export of `Name`."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        self._visit(pkg)

    def _visit(self, member: griffe.Object) -> None:
        if member.docstring is not None:
            member.docstring.value = with_examples(member.docstring.value)
        if member.is_module and member.is_init_module and member.exports is None:
            member.exports = [
                name
                for name, other in member.members.items()
                if other.is_alias and not name.startswith("_") and other.target_path.startswith("equipoise.")
            ] or None
        for other in list(member.members.values()):
            if not other.is_alias:
                self._visit(other)
