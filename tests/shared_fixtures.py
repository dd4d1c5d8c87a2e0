"""What several test files use: seeds, two processes that train together, one worker for a module's tests.

Tests that use a fixture of their whole module run in one process of pytest-xdist, which sets it up once.

It takes `--dist loadgroup`, as the Makefile says. The name of the process' group stands behind a test's own
name then; `without_group` takes it off.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

MARK = "@fixtures of "


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Each test begins with the same random numbers, alone or among others, so that a failure comes again."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def in_processes(work: Callable[[int, int, str], None], folder: Path, count: int = 2) -> None:
    """Run work(rank, port, folder) in so many processes, which meet at the port."""
    import torch.multiprocessing as mp

    mp.start_processes(work, args=(free_port(), str(folder)), nprocs=count, start_method="spawn")


@pytest.fixture(scope="module")
def two_processes(request, tmp_path_factory) -> Path:
    """The folder in which two processes ran the `IN_TWO_PROCESSES` of the test's module."""
    folder = tmp_path_factory.mktemp("ranks")
    in_processes(request.module.IN_TWO_PROCESSES, folder)
    return folder


@pytest.fixture(scope="module")
def by_rank(two_processes) -> list:
    """What each of the two left in found0.pt and found1.pt."""
    import torch

    return [torch.load(two_processes / f"found{rank}.pt", weights_only=False) for rank in (0, 1)]


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
