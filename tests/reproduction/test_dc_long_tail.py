"""Two thresholds on rare classes: the problem, the bars, and (slowly) what comes out."""

from __future__ import annotations

import math

import pytest
import torch

from reproduction.papers.dc_dpsgd_long_tail import (
    ARMS,
    COUNTS,
    EXPERIMENT,
    PROGRAM,
    error_of,
    rare_classes,
    verdicts,
)


def test_the_classes_have_the_counts_of_cifar10_ht_and_the_test_is_balanced():
    problem = rare_classes(0)
    assert problem.population == 12_406
    assert tuple(problem.data["y"].bincount().tolist()) == COUNTS
    assert problem.error(problem.make_model()) == pytest.approx(0.9)  # every answer is the first class
    assert not torch.equal(problem.data["x"], rare_classes(1).data["x"])


def test_every_arm_is_there_once_at_both_epsilons():
    assert len({(arm.label, arm.epsilon) for arm in ARMS}) == len(ARMS) == 2 * 9 + 1


def test_the_best_two_threshold_mode_is_compared_and_the_program_apart():
    labels = {arm.label for arm in ARMS if arm.epsilon == 2}
    accuracy = {(epsilon, label): 50.0 for epsilon in (8.0, 2.0) for label in labels}
    accuracy |= {(8.0, "DP-SGD"): 58.0, (8.0, "norm, p=0.2, 10:1"): 57.0, (8.0, PROGRAM): 59.0}
    accuracy |= {(8.0, "PSAC"): 60.0, (math.inf, "no privacy"): 62.0}
    found = [v for v in verdicts(accuracy) if v.sentence.startswith("DP-SGD's accuracy less")]
    assert [verdict.value for verdict in found] == [1.0, -1.0, 0.0, 0.0]
    assert [verdict.met for verdict in found] == [True, False, True, True]
    assert "norm, p=0.2, 10:1" in found[0].sentence


def test_without_privacy_a_few_steps_learn_something():
    (free,) = [arm for arm in ARMS if arm.label == "no privacy"]
    found = error_of(free, 0, steps=50)
    assert found[50] < 0.45


@pytest.mark.slow
def test_no_two_threshold_mode_with_a_guarantee_is_ahead():
    found = EXPERIMENT.run(range(6), lambda done, total, what: None)
    assert all(verdict.met for verdict in found.verdicts if PROGRAM not in verdict.sentence)
