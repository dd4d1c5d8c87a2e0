"""Noise in stages: what DP-SGD plans with it, that it resumes exactly, and that audits see its bugs."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import pytest
import torch
from table import RECORDS, loss, network, parameters, records, training

import equipoise as eq
from equipoise.audit.replay import RecordingLedger
from equipoise.methods import NoiseStages
from equipoise.methods.base import Setting
from equipoise.privacy import Budget, FixedEpochs, Gaussian, Poisson
from equipoise.testing.checks import noise_scale
from equipoise.testing.rehearsal import CanaryTraining, rehearse, whitened

BUDGET = Budget(8.0, 1e-5)
FALLING = NoiseStages((1.0, 0.8, 0.5))


def planned(noise, sampling, **options):
    method = eq.DPSGD(noise_multiplier=noise, **options)
    return method.plan(Setting(sampling=sampling, budget=BUDGET)).releases


def test_stages_of_equal_length_spend_the_budget():
    plan = planned(FALLING, Poisson(512, 60_000, 1000))
    mechanism = plan["gradient"].mechanism
    assert (mechanism.starts, mechanism.factors) == ((0, 333, 667), (1.0, 0.8, 0.5))
    assert 0.99 * 8 <= plan.epsilon(1e-5).value <= 8
    flat = planned(None, Poisson(512, 60_000, 1000))["gradient"].noise_multiplier
    first = mechanism.noise_multiplier
    assert 0.5 * first < flat < first


def test_a_given_multiplier_is_that_of_the_first_stage():
    plan = planned(NoiseStages((2.0, 1.0), noise_multiplier=1.5), Poisson(512, 60_000, 1000))
    assert [plan["gradient"].at(step).noise_multiplier for step in (0, 500)] == [1.5, 0.75]


def test_stages_are_whole_epochs_where_records_take_turns():
    sampling = FixedEpochs(10, 100, 75)  # seven epochs and a half
    assert planned(FALLING, sampling)["gradient"].mechanism.starts == (0, 20, 50)


def test_one_stage_is_dp_sgd_bit_for_bit():
    ends = []
    for noise in (1.5, NoiseStages((1.0,), noise_multiplier=1.5)):
        model = network()
        run = training(eq.DPSGD(clip_norm=0.5, noise_multiplier=noise), model=model, budget=None)
        list(run)
        assert run.plan["gradient"].mechanism == Gaussian(1.5)
        ends.append(parameters(model))
    assert torch.equal(*ends)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NoiseStages(()), "factors=.* holds no numbers"),
        (lambda: NoiseStages(0.5), "factors=0.5 holds no numbers"),
        (lambda: NoiseStages((1.0, -1.0)), "factors=-1.0"),
        (lambda: NoiseStages((1.0,), noise_multiplier=0.0), "noise_multiplier=0.0"),
        (lambda: planned(FALLING, Poisson(5, 100, 2)), "are 3 stages, and the run has 2 steps"),
        (lambda: planned(FALLING, FixedEpochs(10, 100, 20)), "the run has 2 epochs of 10 draws"),
        (lambda: eq.DPMF(noise_multiplier=FALLING), "changes over the run.*take dp-sgd"),
    ],
)
def test_what_cannot_be_planned_is_refused(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_it_is_read_back_from_its_configuration_and_from_words():
    method = eq.DPSGD(noise_multiplier=FALLING)
    assert eq.DPSGD.from_config(method.config()) == method
    words = {"name": "dp-sgd", "noise_multiplier": "stages", "noise_multiplier.factors": [1.0, 0.8, 0.5]}
    assert eq.DPSGD.from_config(words) == method


@pytest.mark.parametrize("sampling", [Poisson(20, RECORDS, 12), FixedEpochs(15, RECORDS, 12)])
def test_closed_in_any_stage_and_resumed_exactly(sampling, tmp_path):
    method = eq.DPSGD(clip_norm=0.5, noise_multiplier=FALLING)
    model = network()
    reference = training(method, model=model, sampling=sampling)
    list(reference)
    whole = parameters(model)
    for kept in (2, 7):
        folder = tmp_path / str(kept)
        first = training(method, sampling=sampling, folder=folder)
        for step in first:
            if step.step == kept:
                first.save_checkpoint()
            if step.step == kept + 3:
                break
        first.close()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        again = eq.PrivateTraining.resume(folder, model, optimizer, loss=loss, data=records())
        list(again)
        assert torch.equal(parameters(model), whole)
        statement = again.finish().statement
        assert statement.epsilon == reference.statement().epsilon
        assert statement.guarantee == "proven"
        assert re.search(r"multiplier [\d.]+ to [\d.]+, in 3 stages", str(statement))
        assert eq.verify_run(folder).consistent


# ---- audits


class LastStage(RecordingLedger):
    """All draws get the noise of the last stage, which is the least."""

    def _noised(self, mechanism, sums, streams, over_steps):
        return super()._noised(self.plan["gradient"].at(10**6), sums, streams, over_steps)


class OneStageAhead(RecordingLedger):
    """Every stage begins a draw early."""

    def book(self, draw, sums, parts=()):
        booked = super().book(draw, sums, parts)
        return type(booked)(booked.streams, self.plan.groups(sums, draw.ordinal + 1), booked.past)


def white_noise(ledger_class):
    model = torch.nn.Linear(2000, 2, bias=False)
    made = type("Audited", (eq.PrivateTraining,), {"ledger_class": ledger_class})(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda model, batch: model(batch["input"]).sum(1),
        data={"input": torch.zeros(40, 2000)},
        sampling=Poisson(5, 40, 6),
        method=eq.DPSGD(noise_multiplier=NoiseStages((1.0, 0.5), noise_multiplier=1.0)),
        run=eq.Run(reproducible=True),
    )
    list(made)
    rows = [white["gradient"]["weight"].flatten() for white in whitened(made.ledger, made.ledger.transcript)]
    return noise_scale(torch.stack(rows).flatten(), 1.0)


def test_white_noise_has_scale_one_in_every_stage():
    assert white_noise(RecordingLedger).passes


@pytest.mark.parametrize("planted", [LastStage, OneStageAhead])
def test_noise_of_another_stage_is_seen(planted):
    assert not white_noise(planted).passes


def test_the_log_ratio_is_that_of_the_plan():
    """E[exp(L)] is 1 over absent canaries, and E[exp(-L)] over present ones."""
    found = rehearse(
        CanaryTraining(
            make_method=lambda: eq.DPSGD(clip_norm=1.0, noise_multiplier=FALLING),
            sampling=Poisson(2000, 20_000, 20),
            budget=Budget(2.0, 1e-5),
            canaries=20_000,
            seed=3,
        )
    )
    for chosen, sign in ((~found.present, 1.0), (found.present, -1.0)):
        values = (sign * found.log_ratios[chosen]).exp()
        assert abs(float(values.mean()) - 1) < 5 * float(values.std()) / math.sqrt(len(values))


def test_noise_that_the_method_knows_is_that_of_the_stage():
    """DP-AdamBC takes the noise's second moment out: with beta 0 it is that of the last step."""
    method = eq.methods.DPAdamBC(
        clip_norm=0.5, beta2=0.0, noise_multiplier=NoiseStages((1.0, 0.5), noise_multiplier=2.0)
    )
    seen = []

    @dataclass(frozen=True, kw_only=True)
    class Watched(eq.methods.DPAdamBC):
        def direction(self, gradient, moments, std):
            seen.append(std)
            return super().direction(gradient, moments, std)

    watched = Watched(**{name: getattr(method, name) for name in vars(method)})
    list(training(watched, sampling=Poisson(20, RECORDS, 6), budget=None))
    assert seen == pytest.approx([2.0 * 0.5 / 20] * 3 + [0.5 / 20] * 3)
