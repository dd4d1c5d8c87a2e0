"""A run beside others in one journal: its noise is fitted to what they leave of the budget."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from equipoise.app.method_settings import make_method, make_setting
from equipoise.app.settings import RunSettings
from equipoise.methods import find
from equipoise.privacy import (
    BudgetError,
    FullBatch,
    Gaussian,
    Journal,
    Ledger,
    PrivacyPlan,
    Release,
    epsilon,
)
from equipoise.privacy.ledger.run_record import compose_events

SAMPLING = FullBatch(2000, 20)  # accounted in closed form, and so quickly
EARLIER = PrivacyPlan([Release("gradient", 1.0, Gaussian(60.0))], SAMPLING)
DELTA = 1e-5


@pytest.fixture
def journal(tmp_path):
    path = tmp_path / "ledger.jsonl"
    Ledger(EARLIER, journal=Journal(path)).journal.close()
    return path


def settings(journal, method, **changes):
    return RunSettings(
        data="digits", method=method, ledger=str(journal), **({"epsilon": 2.0, "delta": DELTA} | changes)
    )


def plan_of(made, settings, budget):
    return made.plan(make_setting(settings, SAMPLING, budget)).releases


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("dp-sgd", {}),
        ("dp-sgd", {"clip_norm": "quantile"}),
        ("dice-sgd", {}),
        ("dp-c4-plus", {}),
        ("dp-svrg", {"options": {"schedule": "at_random", "schedule.period": 3}, "seed": 3}),
        ("adaptive-rms", {}),
        ("adaptive-rms", {"variant": "round", "options": {"variant.length": 5}}),
        ("dc-dpsgd", {}),
        ("pcdp-sgd", {"options": {"source": "moment"}}),
    ],
    ids=str,
)
def test_the_budget_is_met_together(journal, method, changes):
    asked = settings(journal, method, **changes)
    made, budget = make_method(asked, SAMPLING)
    plan = plan_of(made, asked, budget)
    together = epsilon(compose_events([plan.event(), EARLIER.event()]), DELTA).value
    assert 0.985 * budget.epsilon <= together <= budget.epsilon
    # a run that goes on has the plan that it booked, whatever others cost by now, and the same constants
    booked = PrivacyPlan.from_description(plan.describe())
    first, again = (
        find(method).from_config(made.config()).plan(replace(asked_of, booked=of))
        for asked_of, of in (
            (make_setting(asked, SAMPLING, budget), None),
            (replace(make_setting(asked, SAMPLING, budget), other_runs=()), booked),
        )
    )
    assert again.releases.fingerprint() == plan.fingerprint()
    assert repr(again.constants) == repr(first.constants)


def test_a_method_that_releases_nothing_needs_nothing(journal):
    public = {"input": torch.zeros(4, 2), "target": torch.zeros(4)}
    asked = settings(journal, "public-only")
    method, budget = make_method(asked, SAMPLING, public)
    plan = plan_of(method, asked, budget)
    assert plan.releases == ()
    assert Ledger(plan, budget, Journal(journal)).spent().value < budget.epsilon


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("dp-sgd", {"epsilon": 0.1}, "other runs over the same records count too"),
        (
            "dice-sgd",
            {"recipe": "as_published"},
            "above the budget|a budget of its own",
        ),
        ("dc-dpsgd", {"recipe": "as_published"}, "computes its noise from a budget of its own"),
        (
            "dc-dpsgd",
            {"epsilon": 0.77, "options": {"tail_threshold.count_noise": 0.011}},
            "releases whose noise does not scale",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_fitted_is_said(journal, method, changes, message):
    asked = settings(journal, method, **changes)
    made, budget = make_method(asked, SAMPLING)
    with pytest.raises((ValueError, BudgetError), match=message):
        Ledger(plan_of(made, asked, budget), budget, Journal(journal))
