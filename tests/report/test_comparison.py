"""The page of a comparison says what was found, and what must not be read into it."""

from __future__ import annotations

import copy
import re

import pytest
from invented import STATEMENT, comparison, method
from rich.console import Console

from equipoise.report.comparison_page import comparison_table, render_comparison, table_rows


@pytest.fixture
def values() -> dict:
    return comparison()


def text_of(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page.split("</style>")[1]))


def test_page_holds_the_numbers_and_the_warning(values):
    page = render_comparison(values)
    text = text_of(page)
    for words in (
        "81.00%",
        "80.00% to 82.00%",
        "search for learning rates is not accounted",
        "0.9991",
        "× 2.50",
        "Higher is better; always giving the commonest class would be at 55.00%.",
    ):
        assert words in text, words
    assert "Told apart from every other method" in text
    assert "Ahead of plain by 10.00 points" in text
    assert values["command"] in text
    assert "100 public ones" in text


def test_page_loads_and_runs_nothing(values):
    page = render_comparison(values)
    for word in ("<script", "http://", "https://", "src=", "@import", "url("):
        assert word not in page


def test_the_least_error_is_the_best(values):
    answer = "always giving the mean of the test records"
    values |= {"score": "rmse", "more_is_better": False, "baseline": 5.25, "baseline_answer": answer}
    values["methods"] = [method("plain", [3.5, 3.6, 3.7]), method("better", [2.0, 2.1, 2.25])]
    free = {**STATEMENT, "guarantee": "none", "epsilon": None}
    values["methods"].append(method("sgd", [1.0, 1.1, 1.2], statement=free, settings={"method": "sgd"}))
    page = render_comparison(values)
    text = text_of(page)
    for words in (
        "Best median RMSE 2.1 better",
        "Told apart from every other private method",
        "Ahead of plain by 1.5 RMSE plain has 3.6.",
        "Price of privacy 1 RMSE Without privacy 1.1.",
        "2 to 2.25",
        "Lower is better; always giving the mean of the test records would be at 5.25.",
    ):
        assert words in text, words
    assert "ccuracy" not in page
    values["methods"][0]["scores"] = [2.25, 3.6, 3.7]
    assert "Not told apart here from plain" in text_of(render_comparison(values))


def test_a_run_without_privacy_is_the_price_and_never_the_best(values):
    free = {**STATEMENT, "guarantee": "none", "epsilon": None}
    values["methods"].append(method("sgd", [0.9, 0.91, 0.92], statement=free, settings={"method": "sgd"}))
    text = text_of(render_comparison(values))
    assert "Best median accuracy 81.00% better" in text
    assert "Told apart from every other private method" in text
    assert "Price of privacy 10.00 points Without privacy 91.00%" in text
    assert "Not private: sgd. Neither clipped nor noised" in text
    assert "Not at the same budget" not in text


def test_overlapping_seeds_are_not_called_a_win(values):
    values["methods"][0]["scores"] = [0.70, 0.71, 0.805]
    text = text_of(render_comparison(values))
    assert "Not told apart here from plain" in text
    assert "Ahead of plain" not in text


@pytest.mark.parametrize(("error", "told_apart"), [(0.03, True), (0.04, False)])
def test_a_gap_within_two_standard_errors_of_the_test_records_is_not_called_a_win(values, error, told_apart):
    for one in values["methods"]:
        one["sampling_error"] = error  # the medians differ by 0.1
    assert ("Not told apart here from plain" not in text_of(render_comparison(values))) is told_apart
    console = Console(width=200, record=True)
    console.print(comparison_table(values))
    assert ("better is ahead" in console.export_text()) is told_apart


@pytest.mark.parametrize(
    ("change", "unequal"),
    [
        ({"guarantee": "worst_case", "epsilon": 0.9}, True),
        ({"guarantee": "none", "epsilon": None}, True),
        ({"epsilon": 1.2}, True),
        ({"epsilon": 1.0}, False),
    ],
)
def test_methods_beyond_the_budget_are_named(values, change, unequal):
    changed = copy.deepcopy(values)
    changed["methods"][1]["statement"] = {**STATEMENT, **change}
    assert ("Not at the same budget" in render_comparison(changed)) is unequal


def test_reproducible_runs_are_called_not_private(values):
    assert "NOT PRIVATE" not in render_comparison(values)
    assert "NOT PRIVATE" in render_comparison({**values, "reproducible": True})


def test_holes_and_the_papers_figure_are_shown(values):
    holes = [{"kind": "disclose", "reason": "raw threshold", "count": 7, "worst_case": None}]
    values["methods"][1]["statement"] = {
        **STATEMENT, "guarantee": "none", "epsilon": None, "epsilon_claimed": 0.5, "holes": holes,
    }  # fmt: skip
    text = text_of(render_comparison(values))
    assert "Without proof: raw threshold (7 times)" in text
    assert "paper: 0.5" in text
    assert table_rows(values)[1]["epsilon"] == "none"


def test_no_memory_no_column_of_lies(values):
    values["methods"][1]["memory_bytes"] = None
    assert (table_rows(values)[1]["memory"], table_rows(values)[1]["memories"]) == ("–", "")


def test_terminal_table_fits_80_columns(values):
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(comparison_table(values))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "80.0-82.0" in text


def test_page_describes_the_data_its_unit_and_the_files(values):
    values["data_description"] = "points in a plane"
    text = text_of(render_comparison(values))
    for words in (
        "toy: points in a plane. 10,000 training records, a public number",
        "100 more records were declared public",
        "The unit is one record. A person may own several",
        "What holds for all runs together comparison.html , comparison.json , runs/ .",
        # 2 methods of 3 seeds and 2 trials at 0.9991 and 1e-5
        "10 runs over the same records. Their epsilons add up to 9.991, their deltas to 0.0001.",
        "no model, no key and no training loss",
    ):
        assert words in text, words


@pytest.mark.parametrize(
    "change", [{"reproducible": True}, {"statement": {"guarantee": "none", "epsilon": None}}]
)
def test_files_of_runs_that_nothing_protects_are_named_so(values, change):
    if "statement" in change:
        values["methods"][1]["statement"] = {**STATEMENT, **change["statement"]}
    else:
        values |= change
    text = text_of(render_comparison(values))
    assert "What nothing protects comparison.html" in text
    assert "publish them only where the records are public" in text
    assert "add up" not in text


def test_a_method_beyond_the_budget_is_no_rival(values):
    values["methods"].append(method("loose", [0.9, 0.91, 0.92], statement={**STATEMENT, "epsilon": 1.2}))
    assert "every other method at this budget" in text_of(render_comparison(values))


def test_a_method_alone_beats_nobody(values):
    values["methods"] = values["methods"][1:]
    text = text_of(render_comparison(values))
    assert "No other method was compared." in text
    assert "worst seed" not in text


@pytest.mark.parametrize(("first", "second", "shown"), [(4, 2, "0.50"), (4, 0.5, ""), (0.5, 4, "")])
def test_memory_too_small_to_measure_has_no_ratio(values, first, second, shown):
    for one, size in zip(values["methods"], (first, second), strict=True):
        one["memory_bytes"] = size * 2**20
    assert table_rows(values)[1]["memories"] == shown
