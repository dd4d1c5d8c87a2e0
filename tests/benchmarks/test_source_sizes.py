"""Each number of the core says where it comes from."""

from __future__ import annotations

import pytest

from benchmarks import source_sizes


def test_each_number_of_the_core_is_explained():
    assert source_sizes.unexplained() == []


@pytest.mark.parametrize(
    ("text", "is_listed"),
    [
        ("MOST = 3", True),
        ("_SHARES: tuple[float, ...] = (0.5, -1)", True),
        ("MOST = 2 * OTHER\nNEXT = 1  # beside", True),
        ("ENDS = [math.inf]", True),
        ("class Rule:\n    MOST = 3", True),
        ("# above\nMOST = 3", False),
        ("MOST = 3  # beside", False),
        ('MOST = 3\n"""Below."""', False),
        ("RTOL = {\n    float: 1e-8,  # within\n}", False),
        ("NAMES = {1: 'one'}", False),
        ("class Kind(IntEnum):\n    ONE = 1", False),
        ("most = 3", False),
    ],
)
def test_what_is_listed(tmp_path, text, is_listed):
    (tmp_path / "module.py").write_text(text + "\n")
    assert len(source_sizes.unexplained([tmp_path])) == is_listed
