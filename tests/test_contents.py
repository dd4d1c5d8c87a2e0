"""The table of contents: every public name is there, and `import equipoise` stays quick."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import equipoise as eq


@pytest.mark.parametrize("name", eq.__all__)
def test_every_name_can_be_imported(name):
    assert getattr(eq, name) is not None


@pytest.mark.parametrize(
    "contents", sorted(Path(eq.__file__).parent.rglob("__init__.pyi")), ids=lambda file: file.parent.name
)
def test_a_module_of_a_name_stands_before_no_class_or_function(contents):
    """Whoever imported the module first would find it in place of what it holds."""
    parts = contents.parent.relative_to(Path(eq.__file__).parents[1]).parts
    package = pytest.importorskip(".".join(parts), exc_type=ImportError)
    modules = {file.stem for file in contents.parent.glob("*.py")}
    for name in modules & set(package.__all__):
        import_module(f"{package.__name__}.{name}")
        assert isinstance(package.__getattr__(name), ModuleType), name


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match=r"no attribute 'PrivateTrainer'.*PrivateTraining"):
        eq.PrivateTrainer  # noqa: B018


def test_the_import_is_quick():
    code = "import sys, equipoise; sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'scipy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
