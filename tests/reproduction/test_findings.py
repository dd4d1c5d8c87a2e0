"""Findings keep their numbers on the way to a file and back, and draw what they hold."""

from __future__ import annotations

import json
import math

import pytest

from reproduction.figures import curves_figure
from reproduction.findings import Curve, Findings, Table, Verdict
from reproduction.papers import EXPERIMENTS, TITLES, find_experiment


def findings() -> Findings:
    return Findings(
        Table(["method", "T=10"], [["DP-SGD", 0.5], ["diverges", math.inf]], note="median of 2 seeds"),
        [
            Curve.of_seeds("DP-SGD", [{0: 1.0, 10: 0.4}, {0: 1.0, 10: 0.6}], "interp"),
            Curve("u", (0.0, 10.0), (1.0, 0.0), panel="skew"),
        ],
        [Verdict.at_most("small", 0.5, 1.0), Verdict.at_least("large", 0.5, 1.0)],
    )


def test_survives_a_file() -> None:
    text = json.dumps(findings().to_json(), allow_nan=False)
    back = Findings.from_json(json.loads(text))
    assert back.to_json() == findings().to_json()
    assert back.table.rows[1][1] == math.inf
    assert [v.met for v in back.verdicts] == [True, False]


def test_rows_fit_their_columns() -> None:
    with pytest.raises(ValueError, match="cells"):
        Table(["a", "b"], [["x"]])


def test_median_and_spread_of_seeds() -> None:
    curve = findings().curves[0]
    assert (curve.x, curve.y, curve.low, curve.high) == ((0, 10), (1.0, 0.5), (1.0, 0.4), (1.0, 0.6))


def legends(figure) -> list[list[str]]:
    found = [*figure.legends, *(axes.get_legend() for axes in figure.axes)]
    return [[text.get_text() for text in legend.get_texts()] for legend in found if legend is not None]


def test_figure_has_a_panel_a_problem_each_with_its_legend() -> None:
    figure = curves_figure(findings().curves, x_label="steps", y_label="error")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["interp", "skew"]
    assert legends(figure) == [["DP-SGD"], ["u"]]
    assert [axes.get_yscale() for axes in figure.axes] == ["log", "log"]


def test_long_labels_that_all_panels_share_stay_inside_the_figure() -> None:
    labels = [f"a method with a long name, number {k}" for k in range(7)]
    figure = curves_figure(
        [Curve(label, (0.0, 1.0), (2.0, 1.0)) for label in labels], x_label="x", y_label="y"
    )
    assert legends(figure) == [labels]
    figure.draw_without_rendering()
    box, page = figure.legends[0].get_window_extent(), figure.bbox
    assert box.x0 >= page.x0
    assert box.x1 <= page.x1


@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_every_experiment_is_found_under_its_name(name: str) -> None:
    experiment = find_experiment(name)
    assert experiment.name == name
    assert experiment.title == TITLES[name]
    assert experiment.summary
    assert experiment.default_seeds >= 1
