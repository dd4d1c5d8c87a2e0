"""A run beside others in one journal: its noise is fitted to what they leave of the budget."""

from __future__ import annotations

import pytest
import torch

from equipoise.app.settings import Settings, SettingsError
from equipoise.app.shared_budget import make_method
from equipoise.methods import find
from equipoise.methods.base import Setting
from equipoise.privacy import FullBatch, Gaussian, Journal, Ledger, PrivacyPlan, Release, epsilon
from equipoise.privacy.ledger.run_record import compose_events
from equipoise.training.randomness import generator

SAMPLING = FullBatch(2000, 20)  # accounted in closed form, and so quickly
EARLIER = PrivacyPlan([Release("gradient", 1.0, Gaussian(60.0))], SAMPLING)
DELTA = 1e-5


@pytest.fixture
def journal(tmp_path):
    path = tmp_path / "ledger.jsonl"
    Ledger(EARLIER, journal=Journal(path)).journal.close()
    return path


def settings(journal, method, **changes):
    return Settings(
        data="digits", method=method, ledger=str(journal), **({"epsilon": 2.0, "delta": DELTA} | changes)
    )


def plan_of(method, seed=0):
    return method.plan(Setting(sampling=SAMPLING, public_rng=generator(seed, "plan"))).releases


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
        ("pcdp-sgd", {"options": {"source": "private_moment"}}),
    ],
    ids=str,
)
def test_the_budget_is_met_together(journal, method, changes):
    made, budget = make_method(settings(journal, method, **changes), SAMPLING)
    plan = plan_of(made, changes.get("seed", 0))
    together = epsilon(compose_events([plan.event(), EARLIER.event()]), DELTA).value
    assert 0.985 * budget.epsilon <= together <= budget.epsilon
    # a run that goes on makes its plan from the settings of its method alone
    again = find(method).from_config(made.config())
    assert plan_of(again, changes.get("seed", 0)).fingerprint() == plan.fingerprint()


def test_a_method_that_releases_nothing_needs_nothing(journal):
    public = {"input": torch.zeros(4, 2), "target": torch.zeros(4)}
    method, budget = make_method(settings(journal, "public-only"), SAMPLING, public)
    assert plan_of(method).releases == ()
    assert Ledger(plan_of(method), budget, Journal(journal)).spent().value < budget.epsilon


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("dp-sgd", {"epsilon": 0.1}, "the earlier ones have taken"),
        ("dice-sgd", {"recipe": "as_published"}, "no noise that could be fitted"),
        ("dc-dpsgd", {"recipe": "as_published"}, "cannot be fitted"),
        (
            "dc-dpsgd",
            {"epsilon": 0.77, "options": {"tail_threshold.count_noise": 0.011}},
            "whose noise is a setting",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_fitted_is_said(journal, method, changes, message):
    with pytest.raises(SettingsError, match=message):
        make_method(settings(journal, method, **changes), SAMPLING)
