"""How large the sources are: lines of code, docstring and comment, files and functions, by room.

python benchmarks/source_sizes.py [FOLDER ...]      # src/equipoise by default
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Sizes:
    """Sums over the files of a room.

    Attributes:
        most_arguments, longest: with the place where they are.
    """

    files: int = 0
    total: int = 0
    code: int = 0
    docstring: int = 0
    comment: int = 0
    blank: int = 0
    functions: int = 0
    most_arguments: tuple[int, str] = (0, "")
    longest: tuple[int, str] = (0, "")

    def add(self, path: Path) -> None:
        """Count a file."""
        text = path.read_text(encoding="utf-8")
        lines, tree = text.splitlines(), ast.parse(text)
        docs: set[int] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[0] if node.body else None
                if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                    docs |= set(range(first.lineno, (first.end_lineno or 0) + 1))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.functions += 1
                arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                place = f"{path.stem}:{node.name}"
                self.most_arguments = max(self.most_arguments, (len(arguments), place))
                self.longest = max(self.longest, ((node.end_lineno or 0) - node.lineno + 1, place))
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        comments = {
            t.start[0] for t in tokens if t.type == tokenize.COMMENT and t.line.strip().startswith("#")
        }
        blank = {number for number, line in enumerate(lines, 1) if not line.strip()} - docs
        self.files += 1
        self.total += len(lines)
        self.docstring += len(docs)
        self.comment += len(comments - docs)
        self.blank += len(blank)
        self.code += len(lines) - len(docs) - len(comments - docs) - len(blank)


def main(folders: list[str]) -> None:
    print(
        "| room | files | total | code | docstring | comment | blank | functions | most arguments | longest |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for folder in folders:
        root, rooms, whole = Path(folder), {}, Sizes()
        for path in sorted(root.rglob("*.py")):
            room = path.relative_to(root).parts[0]
            rooms.setdefault(room if not room.endswith(".py") else "(top)", Sizes()).add(path)
            whole.add(path)
        for name, s in [*rooms.items(), ("**all**", whole)]:
            most, longest = (f"{n} ({place})" for n, place in (s.most_arguments, s.longest))
            row = (s.files, s.total, s.code, s.docstring, s.comment, s.blank, s.functions, most, longest)
            print(f"| {name} | " + " | ".join(map(str, row)) + " |")


if __name__ == "__main__":
    main(sys.argv[1:] or ["src/equipoise"])
