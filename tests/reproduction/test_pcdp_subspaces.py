"""What directions are worth: the problem of the experiment, its bars, and (slowly) whether they hold."""

from __future__ import annotations

import pytest

from reproduction.papers import pcdp_sgd_subspaces as subspaces

pytestmark = pytest.mark.filterwarnings("ignore:the subspace captures")


def test_arms_are_there_once_and_have_a_method():
    lines = subspaces.arms()
    assert len({(arm.part, arm.label) for arm in lines}) == len(lines)
    assert {arm.make(0).name for arm in lines} == {"dp-sgd", "pcdp-sgd", "pdp", "rpdp", "gep"}


@pytest.mark.slow
def test_the_bars_are_met_over_three_seeds():
    found = subspaces.EXPERIMENT.run(range(3), lambda done, total, what: None)
    assert all(verdict.met for verdict in found.verdicts)
