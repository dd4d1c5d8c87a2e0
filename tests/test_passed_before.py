"""The second run of `.ci/run` leaves out what passed, and nothing else."""

import pytest

pytest_plugins = ["pytester"]

FIRST = """
import pytest
@pytest.mark.parametrize("word", ["a", "a b\\n"])
def test_one(word): pass
"""
WITH_EXTRA = """
import pytest
def test_always(): pass
def test_extra(): pytest.skip("needs an extra")
"""
BROKEN = """
def test_fine(): pass
def test_fails(): assert False
"""
TORN_DOWN = """
import pytest
@pytest.fixture
def thing():
    yield
    raise ValueError
def test_it(thing): pass
"""


@pytest.mark.parametrize("processes", ["0", pytest.param("2", marks=pytest.mark.slow)])
def test_files_that_passed_whole_are_left_out(pytester, processes):
    pytester.makepyfile(
        test_first=FIRST, test_with_extra=WITH_EXTRA, test_broken=BROKEN, test_torn_down=TORN_DOWN
    )
    options = ("-p", "tests.passed_before", "-p", "no:hypothesispytest", "-p", "no:anyio", "-n", processes)
    pytester.runpytest(*options, "--write-passed", "made/passed").assert_outcomes(
        passed=5, skipped=1, failed=1, errors=1
    )
    # a test that the first run did not know is new
    pytester.makepyfile(test_first=FIRST.replace('"]', '", "new"]'))
    pytester.runpytest(*options, "--leave-out", "made/passed").assert_outcomes(
        passed=4, skipped=1, failed=1, errors=1, deselected=0 if processes != "0" else 2
    )
