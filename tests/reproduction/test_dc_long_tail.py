"""Two thresholds on rare classes: the problem, the bars, and (slowly) what comes out."""

from __future__ import annotations

import pytest

from reproduction.papers.dc_dpsgd_long_tail import (
    ARMS,
    EXPERIMENT,
    PROGRAM,
    error_of,
)


def test_every_arm_is_there_once_at_both_epsilons():
    assert len({(arm.label, arm.epsilon) for arm in ARMS}) == len(ARMS) == 2 * 9 + 1


def test_without_privacy_a_few_steps_learn_something():
    (free,) = [arm for arm in ARMS if arm.label == "no privacy"]
    found = error_of(free, 0, steps=50)
    assert found[50] < 0.45


@pytest.mark.slow
def test_no_two_threshold_mode_with_a_guarantee_is_ahead():
    found = EXPERIMENT.run(range(6), lambda done, total, what: None)
    assert all(verdict.met for verdict in found.verdicts if PROGRAM not in verdict.sentence)
