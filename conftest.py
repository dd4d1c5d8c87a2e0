"""The lanes of the tests, and which files pytest leaves alone.

`wide` is given here by folder and file, and in a test file by `@pytest.mark.wide`. Of a test with
`@pytest.mark.few(2)`, two cases run in `make test`, evenly spaced, and the others are wide. A wide file that
the command line names runs.

Doctests of modules whose optional packages are missing are not collected, nor is `conftest.py`, which several
folders have: collected as a module, one would hide the other.
"""

import math
import os
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest_plugins = ["tests.shared_fixtures"]
NEEDS = {
    "flwr": [
        "src/equipoise/federated/flower/*.py",
        "contrib/secure_sum/*.py",
        "tests/federated/flower_grid.py",
    ],
    "lightning": ["src/equipoise/integrations/lightning.py"],
    "transformers": ["src/equipoise/integrations/transformers.py"],
    "triton": ["src/equipoise/privacy/noise/chacha_kernel.py"],
}
collect_ignore_glob = ["tests/*/conftest.py"] + [
    pattern for package, patterns in NEEDS.items() if not find_spec(package) for pattern in patterns
]

# What `make test` leaves to `make test-all`.
WIDE = (
    "baselines/",
    "contrib/",
    "reproduction/",
    "tests/benchmarks/",
    "tests/cli/test_cli_federate.py",
    "tests/contrib/",
    "tests/docs/",
    "tests/examples/",
    "tests/federated/test_driver.py",
    "tests/federated/test_flower",
    "tests/federated/test_local_updates.py",
    "tests/fuzz/",
    "tests/gradients/test_models_hf.py",
    "tests/gradients/test_sharded_engine.py",
    "tests/integrations/",
    "tests/reproduction/",
    "tests/training/test_neighbours_in_processes.py",
    "tests/training/test_processes.py",
    "tests/training/test_restarted_processes.py",
    "tests/training/test_sharded_",
)


def pytest_addoption(parser):
    parser.addoption("--passed", metavar="FILE", help="leave out the tests listed there, add those that pass")


def relative(path, config):
    return os.path.relpath(path, config.rootpath).replace(os.sep, "/")


@pytest.hookimpl(tryfirst=True)  # before -m is read, and before pytest-xdist adds to the names
def pytest_collection_modifyitems(config, items):
    given = [Path(config.invocation_params.dir, argument.partition("::")[0]) for argument in config.args]
    named = [relative(path.resolve(), config) + "/" * path.is_dir() for path in given]
    if not any(name.startswith(WIDE) for name in named):
        for item in items:
            if relative(item.path, config).startswith(WIDE):
                item.add_marker("wide")
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            cases[item.path, item.originalname].append(item)
    for group in cases.values():
        step = math.ceil(len(group) / group[0].get_closest_marker("few").args[0])
        for item in set(group) - set(group[::step]):
            item.add_marker("wide")
    listed = Path(config.getoption("--passed") or "")
    if listed.is_file():
        passed = set(listed.read_text(encoding="utf-8").splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
        items[:] = [item for item in items if item.nodeid not in passed]


def pytest_terminal_summary(terminalreporter, config):
    is_first = not hasattr(config, "workerinput")  # of the processes of pytest-xdist
    if config.getoption("--passed") and is_first:
        from tests.shared_fixtures import without_group

        passed = [without_group(report.nodeid) for report in terminalreporter.stats.get("passed", [])]
        with open(config.getoption("--passed"), "a", encoding="utf-8") as file:
            file.writelines(f"{name}\n" for name in passed)
