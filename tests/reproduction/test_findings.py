"""Findings keep their numbers on the way to a file and back, and draw what they hold."""

from __future__ import annotations

import json
import math

import pytest

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
        {("DP-SGD", 10): 1 / 3, ("diverges", 10): math.inf},
    )


def test_survives_a_file() -> None:
    text = json.dumps(findings().to_json(), allow_nan=False)
    back = json.loads(text)
    assert back == findings().to_json()
    assert back["table"]["rows"][1][1] == "inf"
    assert [verdict["met"] for verdict in back["verdicts"]] == [True, False]
    assert back["numbers"] == [["DP-SGD", 10, 0.333333], ["diverges", 10, "inf"]]


@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_every_experiment_is_found_under_its_name(name: str) -> None:
    experiment = find_experiment(name)
    assert experiment.name == name
    assert experiment.title == TITLES[name]
    assert experiment.summary
    assert experiment.default_seeds >= 1
