"""Tests that use a fixture of their whole module run in one process of pytest-xdist, which sets it up once.

It takes `--dist loadgroup`, as the Makefile says. The name of the process' group stands behind a test's own
name then; `without_group` takes it off.
"""

from __future__ import annotations

import pytest

MARK = "@fixtures of "


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items):
    for item in items:
        known = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
        if any(found.scope == "module" for fixtures in known.values() for found in fixtures):
            item.add_marker(pytest.mark.xdist_group(f"{MARK[1:]}{item.path.stem}"))


def without_group(nodeid):
    """The name of a test.

    >>> without_group("tests/test_a.py::test_b[c]@fixtures of test_a")
    'tests/test_a.py::test_b[c]'
    """
    return nodeid.partition(MARK)[0]
