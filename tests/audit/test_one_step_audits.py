"""Steps whose law is known: the certificate comes close to the claim, and bugs of a fifth are seen."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from scipy import stats

import equipoise as eq
from equipoise.audit.bounds import certify_gaussian
from equipoise.methods import METHODS, Automatic, Independent, OneStep, ReleasedQuantile, Round, TwoChannel
from equipoise.methods.base import Setting
from equipoise.privacy import Unit, clip
from equipoise.privacy.private import unwrap
from equipoise.testing import checks
from equipoise.testing.method_audit import ONE_STEP, audit_method
from equipoise.testing.rehearsal import CanaryTraining, rehearse
from reproduction.planted_steps import Quiet, probe_method

NOTHING = ("sgd", "clip-sgd", "ef-sgd", "public-only")
"""Nothing leaves with noise."""
VARIANTS = {
    "dp-sgd, automatic rule": ("dp-sgd", {"clip_rule": "auto_s"}),
    "dp-sgd, per layer": ("dp-sgd", {"per_layer": True}),
    "dp-sgd, quantile": ("dp-sgd", {"clip_norm": ReleasedQuantile(1.0)}),
    "dice-sgd, independent": ("dice-sgd", {"variant": Independent()}),
    "dice-sgd, automatic": ("dice-sgd", {"variant": Automatic()}),
    "dc-dpsgd, two_channel": ("dc-dpsgd", {"variant": TwoChannel()}),
    "adaptive-rms, round": ("adaptive-rms", {"variant": Round()}),
}

PROBES = {name: (name, {}) for name in METHODS} | VARIANTS
EACH = 1 - 0.01 / (3 * len(PROBES))
"""Of every certificate, so that all of them are true with 99%."""


def test_every_method_has_a_design():
    assert set(ONE_STEP) == set(METHODS)


@pytest.mark.parametrize("mu", [0.3, 1.0, 4.0])
def test_the_certificate_of_normal_laws_is_below_the_truth_and_close(mu):
    rng = np.random.default_rng(0)
    truth = eq.privacy.gaussian_epsilon(mu, 1e-5)
    found = [
        certify_gaussian(3 * rng.normal(size=n), 3 * (mu + rng.normal(size=n)), 1e-5, 0.9).epsilon
        for n in 200 * [10_000]
    ]
    # 10% may err; the union of two limits is careful
    assert np.mean(np.array(found) > truth) < 0.1
    assert min(found) > 0.75 * truth


@pytest.mark.parametrize("name", ["dp-sgd", "dp-svrg", "dp-c4", "dice-sgd", "dp-mf"])
def test_the_statistic_is_normal(name):
    """With the same deviation in either world, as the certificate takes it."""
    design, count = ONE_STEP[name], 4000
    training = CanaryTraining(
        make_method=lambda: design.make(count),
        sampling=design.sampling(count),
        budget=eq.Budget(2.0, 1e-5),
        canaries=count,
        seed=5,
        layout=design,
        knows_deal=design.slots > 1,
    )
    found = rehearse(training)
    worlds = [found.log_ratios[found.present == present].numpy() for present in (False, True)]
    assert all(stats.kstest(stats.zscore(values, ddof=1), "norm").pvalue > 1e-3 for values in worlds)
    assert 0.9 < worlds[0].std() / worlds[1].std() < 1.1


# Of records in every draw the sensitivity is that of the whole run, and a canary of one gradient reaches it.
@pytest.mark.few(2)
@pytest.mark.parametrize(
    "design", [*map(ONE_STEP.get, ("dp-sgd", "dice-sgd", "dp-mf")), replace(ONE_STEP["dp-mf"], slots=1)]
)
def test_a_small_step_is_close_and_bugs_are_seen(design):
    found = probe_method(replace(design, canaries=40_000), confidence=EACH)
    assert found.holds
    assert found.finds, found
    assert found.clean.certified > 0.8 * found.clean.claimed


def test_noise_over_steps_is_audited_with_its_bands():
    design = ONE_STEP["dp-mf"]
    sampling = design.sampling(100)
    setting = Setting(sampling=sampling, budget=eq.Budget(2.0, 1e-5))
    plan = design.make(100, **design.options).plan(setting).releases
    assert plan.sampling_of("batch") == sampling == eq.FixedEpochs(25, 100, 8, same_slots=True)
    assert plan["gradient"].mechanism.memory == 3


def test_an_attacker_who_knows_the_deal_looks_at_those_of_the_first_slot():
    """With next to no noise they are all seen through; those of another slot would not be."""
    training = CanaryTraining(
        make_method=lambda: eq.DPMF(clip_norm=1.0, bands=4, noise_multiplier=0.01),
        sampling=eq.FixedEpochs(100, 400, 8),
        budget=None,
        canaries=400,
        seed=2,
        knows_deal=True,
    )
    found = rehearse(training)
    assert 25 < found.present.sum() < 75  # a quarter of those who take part
    assert 150 < (~found.present).sum() < 250
    assert torch.equal(found.log_ratios > 0, found.present)


SMALL = replace(ONE_STEP["dp-sgd"], canaries=20_000)


def test_check_method_passes_what_is_sound():
    class Mine(eq.DPSGD):
        name = "mine"

    found = checks.check_method(Mine(clip_norm=1.0))
    assert found.method == "mine"
    assert 1.5 < found.certified <= found.claimed <= 2


@pytest.mark.parametrize(
    ("part", "words"), [("audit_method", "certified"), ("check_noise", "noise for 'gradient'")]
)
def test_check_method_names_what_a_method_does_not_keep(monkeypatch, part, words):
    monkeypatch.setattr(checks, part, partial(getattr(checks, part), make_ledger=Quiet))
    with pytest.raises(AssertionError, match=words):
        checks.check_method(SMALL)


def test_check_method_finds_what_left_without_a_release():
    class Leaking(eq.DPSGD):
        name = "leaking"

        def step(self, context, state):
            estimate, state = super().step(context, state)
            sums = context.draw("batch").query(lambda rows, ids: {"raw": clip(rows, eq.methods.Abadi(), 1.0)})
            raw = {name: unwrap(value) for name, value in sums["raw"].value.items()}
            return {name: value + raw[name] for name, value in estimate.items()}, state

    with pytest.raises(RuntimeError, match="not a function of what was released"):
        checks.check_method(replace(SMALL, make=lambda m: Leaking(clip_norm=1.0)))


@pytest.mark.slow
@pytest.mark.parametrize("line", PROBES)
def test_steps_of_all_methods(line):
    """Clean, no claim is refuted; a fifth less noise, or a quarter longer rows, refutes every one."""
    name, options = PROBES[line]
    found = probe_method(name, options=options, confidence=EACH)
    assert found.holds, found
    assert found.finds, found
    if name not in NOTHING:
        assert found.clean.claimed is not None
        close = 0.7 if ONE_STEP[name].in_turn else 0.8  # in turn, experiments are few
        assert found.clean.certified > close * found.clean.claimed


MEANS = Unit("user", 4, "mean")


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("design", "unit", "close"),
    [
        ("dp-sgd", Unit("user", 4), 0.5),
        ("dp-sgd", MEANS, 0.5),
        (replace(ONE_STEP["dp-mf"], options={"bands": 4}), MEANS, 0.75),
        ("dp-sgd", Unit("user", 3, "sum"), 0.5),
        (replace(ONE_STEP["dp-mf"], options={"strategy": OneStep(0.8)}), MEANS, 0.75),
    ],
)
def test_a_step_of_users(design, unit, close):
    """The certificate for users is below the claim for users, and within a factor of two of it."""
    one_step = {"one_step": True} if isinstance(design, str) else {}
    found = audit_method(design, 2.0, canaries=20_000, unit=unit, **one_step)
    assert found.unit == unit
    assert found.holds
    assert found.certified > close * found.claimed


def test_a_step_of_users_that_is_accounted_for_records_is_seen(monkeypatch):
    monkeypatch.setattr(Unit, "group", property(lambda self: 1))
    found = audit_method("dp-sgd", 2.0, one_step=True, canaries=20_000, unit=Unit("user", 4))
    assert not found.holds
    assert found.certified > 3 * found.claimed
