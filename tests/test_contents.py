"""The table of contents: every public name is there, and `import equipoise` stays quick."""

from __future__ import annotations

import subprocess
import sys

import pytest

import equipoise as eq


@pytest.mark.parametrize("name", eq.__all__)
def test_every_name_can_be_imported(name):
    assert getattr(eq, name) is not None


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match=r"no attribute 'PrivateTrainer'.*PrivateTraining"):
        eq.PrivateTrainer  # noqa: B018


def test_the_import_is_quick():
    code = "import sys, equipoise; sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'scipy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
