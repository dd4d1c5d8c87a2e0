"""The page of a comparison says what was found, and what must not be read into it."""

import re

import pytest
from invented import STATEMENT, comparison, method
from rich.console import Console

from equipoise.report.comparison_page import comparison_table, render_comparison

FREE = {**STATEMENT, "guarantee": "none", "epsilon": None}
SGD = method("sgd", [0.9, 0.91, 0.92], statement=FREE, settings={"method": "sgd"})


@pytest.fixture
def values() -> dict:
    return comparison()


def text_of(values: dict) -> str:
    page = render_comparison(values)
    assert not re.search(r"<script|https?://|src=|@import|url\(", page)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page.split("</style>")[1]))


def test_page_holds_the_numbers_and_the_warning(values):
    values["data_description"] = "points in a plane"
    text = text_of(values)
    for words in (
        "Best median accuracy 81.00% better better is ahead: its worst seed",
        *("80.00% to 82.00%", "0.9991", "x2.50", "6.29 MB", values["command"], "100 public ones"),
        "search for learning rates is not accounted",
        # 2 methods of 3 seeds and 2 trials at 0.9991 and 1e-5
        "10 runs over the same records. Their epsilons add up to 9.991, their deltas to 0.0001.",
    ):
        assert words in text, words
    assert "NOT PRIVATE" not in text
    assert "Not at the same budget" not in text


def test_a_run_without_privacy_is_never_the_best(values):
    values["methods"].append(SGD)
    text = text_of(values)
    assert "Best median accuracy 81.00% better better is ahead" in text
    assert "Without privacy 91.00%" in text
    assert "Not private: sgd. Neither clipped nor noised" in text
    assert "Not at the same budget" not in text


@pytest.mark.parametrize(("change", "ahead"), [
    ({}, True),
    ({"scores": [0.70, 0.71, 0.805]}, False),  # seeds that overlap
    ({"sampling_error": 0.03}, True),
    ({"sampling_error": 0.07}, False),  # the medians differ by 0.1, less than two standard errors
])  # fmt: skip
def test_who_is_ahead(values, change, ahead):
    values["methods"][0] |= change
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(comparison_table(values))
    table = console.export_text()
    assert max(map(len, table.splitlines())) <= 80
    for text in (text_of(values), table):
        assert ("better is ahead" in text) is ahead
        assert ("better is not told apart from plain" in text) is not ahead


@pytest.mark.parametrize("changed", [{"guarantee": "worst_case", "epsilon": 0.9}, FREE, {"epsilon": 1.2}])
def test_a_method_without_the_proof_or_the_budget_is_named_and_no_rival(values, changed):
    values["methods"].append(method("loose", [0.9, 0.91, 0.92], statement={**STATEMENT, **changed}))
    text = text_of(values)
    assert "Not at the same budget. loose:" in text
    assert "better is ahead" in text
    assert "What nothing protects comparison.html" in text
    assert "add up" not in text


def test_reproducible_runs_are_called_not_private(values):
    text = text_of({**values, "reproducible": True})
    assert "NOT PRIVATE" in text
    assert "publish them only where the records are public" in text
