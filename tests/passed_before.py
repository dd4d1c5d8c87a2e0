"""What a second run of the suite need not run again.

`.ci/run` runs the suite twice, without the optional packages and with them. ``--write-passed FILE`` lists the
tests that passed, and ``--leave-out FILE`` leaves these out. A file in which any test was skipped, failed or
could not be collected is not on the list: the second run takes it whole.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from tests.shared_fixtures import without_group


def pytest_addoption(parser):
    parser.addoption("--write-passed", metavar="FILE", help="list the tests of the files that passed whole")
    parser.addoption("--leave-out", metavar="FILE", help="leave out the tests that an earlier run listed")


def pytest_configure(config):
    # the processes of pytest-xdist report to the first one, which alone knows of all tests
    if config.getoption("--write-passed") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(PassedTests(Path(config.getoption("--write-passed"))))


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist adds to the names
def pytest_collection_modifyitems(config, items):
    if not config.getoption("--leave-out"):
        return
    passed = set(Path(config.getoption("--leave-out")).read_text(encoding="utf-8").splitlines())
    left_out = [item for item in items if item.nodeid in passed]
    items[:] = [item for item in items if item.nodeid not in passed]
    config.hook.pytest_deselected(items=left_out)


class PassedTests:
    """Writes down the tests that passed, of the files in which all did."""

    def __init__(self, path):
        self.path = path
        self.outcomes = defaultdict(set)  # by test

    def pytest_runtest_logreport(self, report):
        self.outcomes[without_group(report.nodeid)].add(report.outcome)

    def pytest_sessionfinish(self):
        whole = defaultdict(lambda: True)  # by file
        for test, outcomes in self.outcomes.items():
            whole[_file_of(test)] &= outcomes == {"passed"}
        passed = sorted(test for test in self.outcomes if whole[_file_of(test)])
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("".join(f"{test}\n" for test in passed), encoding="utf-8")


def _file_of(test):
    return test.partition("::")[0]
