"""The contents of a package, imported when they are first used.

What a package offers stands once, as plain imports in the `__init__.pyi` next to its `__init__.py`, where
type checkers read it. `attach` reads the same file and gives the functions with which a module answers.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any


class _Later(ModuleType):
    def __getattr__(self, name: str) -> Any:
        value = getattr(import_module(self.__name__), name)
        setattr(self, name, value)  # found at once from here on
        return value


def later(name: str) -> ModuleType:
    """A module that is imported when something of it is first used: who verifies a run has no torch.

    >>> later("math").floor(2.5)
    2
    """
    return _Later(name)


def attach(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package with an `__init__.pyi`.

    Args:
        package, file: `__name__` and `__file__` of the package.
    """
    tree = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    home = {
        alias.name: node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    names = sorted(home)

    def find(name: str) -> Any:
        if name not in home:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}; it offers {', '.join(names)}"
            )
        if home[name] == package:
            return import_module(f"{package}.{name}")  # a module of the package itself
        value = getattr(import_module(home[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return find, lambda: list(names), names
