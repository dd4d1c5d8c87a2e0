"""How large the sources are: lines of code, docstring and comment, files and functions, by room.

python benchmarks/source_sizes.py [FOLDER ...]      # src/equipoise by default
python benchmarks/source_sizes.py --constants       # numbers of the core that nothing explains
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src" / "equipoise"
CORE = [SOURCES / room for room in ("gradients", "privacy", "methods", "published", "training", "statements")]


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


def holds_numbers(node: ast.AST) -> bool:
    """Whether a value is made of numbers: its own, or a library's such as math.pi.

    Keys of a table do not count.
    """
    if isinstance(node, ast.Dict):
        return any(map(holds_numbers, node.values))
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float, complex)
    if isinstance(node, ast.Attribute) and ast.unparse(node).startswith(("math.", "torch.finfo")):
        return True
    return any(map(holds_numbers, ast.iter_child_nodes(node)))


def numbers(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Line and name of each upper-case constant that holds numbers, and whether something explains it.

    That is a comment above it, beside it or within its value, or a docstring below it. Members of an Enum
    need none.
    """
    text = path.read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
    owners = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Module | ast.ClassDef)]
    for owner in owners:
        if isinstance(owner, ast.ClassDef) and any("Enum" in ast.unparse(base) for base in owner.bases):
            continue
        for node, after in zip(owner.body, [*owner.body[1:], None], strict=True):
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
            if any(map(str.isupper, names)) and holds_numbers(node.value):
                lines = range(node.lineno - 1, (node.end_lineno or node.lineno) + 1)
                has_docstring = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                yield node.lineno, ", ".join(names), has_docstring or not comments.isdisjoint(lines)


def unexplained(folders: Iterable[Path] = CORE) -> list[str]:
    """The constants of numbers that lack an explanation, as `file:line name`."""
    files = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return [
        f"{path}:{line} {names}"
        for path in files
        for line, names, is_explained in numbers(path)
        if not is_explained
    ]


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
    if sys.argv[1:] == ["--constants"]:
        sys.exit("\n".join(unexplained()) or 0)
    main(sys.argv[1:] or [str(SOURCES)])
