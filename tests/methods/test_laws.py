"""Laws that every method obeys, whatever it does: they run over the table of examples."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json

import pytest
import torch
from table import (
    EXAMPLES,
    RECORDS,
    STEPS,
    holds_private,
    loss,
    network,
    noise_scales,
    parameters,
    records,
    under_replay,
)
from table import training as train

import equipoise as eq
from equipoise.gradients.engine_inputs import num_records
from equipoise.methods import METHODS, MeanSquareRule, TopShare, Trace, find
from equipoise.methods.base import Setting
from equipoise.privacy import Journal, JournalError, Ledger, PlanError, clip
from equipoise.privacy.private import unwrap
from equipoise.published import PublishedLedger
from equipoise.statements import check_with_journal
from equipoise.training.forwards import RowSource

BUDGET = eq.Budget(8.0, 1e-3)

assert {make().name for make in EXAMPLES.values()} == set(METHODS), "a line for every method"
FIRST = {(make().name, make().recipe): name for name, make in reversed(EXAMPLES.items())}


def cases(examples, wide_variants=False):
    """One case per line of the table; variants of a method may be left to `make test-all`."""
    names = FIRST.values() if wide_variants else examples
    marks = {name: () if name in names else pytest.mark.wide for name in examples}
    return pytest.mark.parametrize(
        "make", [pytest.param(examples[n], id=n, marks=marks[n]) for n in examples]
    )


every, every_kind = cases(EXAMPLES), cases(EXAMPLES, wide_variants=True)
OWN = {name: make for name, make in EXAMPLES.items() if make().recipe == "library"}
PROVEN = {name: make for name, make in OWN.items() if make().card.guarantee == "proven"}
own, proven, proven_kind = cases(OWN), cases(PROVEN), cases(PROVEN, wide_variants=True)


@every
def test_settings_survive_json(make):
    method = make()
    config = json.loads(json.dumps(method.config()))
    assert config["name"] == method.name
    assert find(method.name, method.recipe) is type(method)
    assert method.card.summary
    if method.public_batches():  # public records are never written: the message must say what to give again
        with pytest.raises(ValueError, match="public"):
            type(method).from_config(config)
        return
    again = type(method).from_config(config)
    assert again.config() == method.config()


@pytest.mark.few(24)
@own
def test_it_is_calibrated_from_below(make):
    plan = make().plan(Setting(sampling=eq.Poisson(20, RECORDS, STEPS), budget=BUDGET)).releases
    if plan.releases:
        assert 0.98 * BUDGET.epsilon <= plan.epsilon(BUDGET.delta).value <= BUDGET.epsilon
    assert plan.guarantee == "proven" or make().card.guarantee != "proven"


@pytest.mark.few(20)
@proven_kind
def test_it_completes_where_nothing_unproven_may_leave(make, monkeypatch):
    monkeypatch.setattr(eq.PrivateTraining, "ledger_class", Ledger)
    run = train(make())
    assert len(list(run)) == STEPS
    statement = run.statement()
    assert statement.guarantee == "proven"
    assert statement.epsilon is not None
    assert statement.epsilon <= BUDGET.epsilon * (1 + 1e-9)
    assert not holds_private(run.method_state)
    # what was planned was released, no more and no less
    assert not any(run.ledger.releases_left.values())


@pytest.mark.few(10)
@proven_kind
def test_it_protects_users(make, monkeypatch):
    """It completes, and what it claims for users is calibrated for them; or no accountant covers it.

    With rows of users in the place of rows of records the plan is the same.
    """
    monkeypatch.setattr(eq.PrivateTraining, "ledger_class", Ledger)
    users = {"owner": torch.arange(RECORDS) // 3, "records_per_user": 2}
    whole, alone = train(make(), **users, rows="mean"), train(make())
    assert [r.mechanism for r in whole.plan.releases] == [r.mechanism for r in alone.plan.releases]
    assert len(list(whole)) == STEPS
    assert (whole.statement().unit, whole.statement().guarantee) == ("user", "proven")
    if make().name == "dp-mf":
        with pytest.raises(PlanError, match="records_per_user=2"):
            train(make(), **users)
        return
    run = train(make(), **users)
    assert len(list(run)) == STEPS
    statement = run.statement()
    assert (statement.unit, statement.guarantee) == ("user", "proven")
    if run.plan.releases:
        assert 0.98 * BUDGET.epsilon <= statement.epsilon <= BUDGET.epsilon * (1 + 1e-9)
        multipliers = [[release.noise_multiplier for release in one.plan.releases] for one in (run, alone)]
        assert max(a / b for a, b in zip(*multipliers, strict=True)) > 1.2


def leaves_of(values, path=()):
    """The numbers, words and truth values in plain values, each with the way to it."""
    if isinstance(values, dict | list):
        for key, value in values.items() if isinstance(values, dict) else enumerate(values):
            yield from leaves_of(value, (*path, key))
    elif values is not None:
        yield path, values


def edited(values, path):
    """The values with another one at the end of a way."""
    values = copy.deepcopy(values)
    *way, last = path
    place = functools.reduce(lambda inside, key: inside[key], way, values)
    old = place[last]
    changed = not old if isinstance(old, bool) else old + "x" if isinstance(old, str) else old * 2 + 1
    place[last] = changed
    return values


@pytest.mark.parametrize("name", ["dp-mf", "joint-whitening", "adaclip", "dp-zo"])
def test_what_epsilon_depends_on_cannot_be_edited(name):
    """In the statement, and in the journal: each field by itself is caught."""
    run = train(EXAMPLES[name](), sampling=eq.FixedEpochs(20, RECORDS, STEPS))  # in closed form, and so quick
    list(run)
    statement, rows = json.loads(run.statement().to_json()), run.ledger.journal.read()

    def is_caught(statement, rows):
        journal = Journal()
        try:
            for row in rows:
                journal.write(row)
            return any(found.ok is False for found in check_with_journal(statement, journal.entries()))
        except JournalError:
            return True

    assert not is_caught(statement, rows)
    asked = ("epsilon", "delta", "relation", "unit", "plan", "sampling", "releases", "guarantee", "epsilons")
    for path, _ in leaves_of({key: statement[key] for key in asked}):
        assert is_caught(edited(statement, path), rows), path
    began = next(i for i, row in enumerate(rows) if row["type"] == "run")
    left = next(i for i, row in enumerate(rows) if row["type"] == "release")
    booked = {"plan", "fingerprint", "noise", "bounds", "multipliers", "pattern", "ordinal", "draw"}
    for number in (began, left):
        fields = {key: value for key, value in rows[number].items() if key in booked}
        for path, _ in leaves_of(fields):
            assert is_caught(statement, edited(rows, (number, *path))), path
    assert is_caught(statement, rows[:left] + rows[left + 1 :])


PLAIN, PER_LAYER = eq.DPSGD(clip_norm=0.5), eq.DPSGD(clip_norm=0.5, per_layer=True)
SCALE_1 = {"clip_norm": 0.5, "scale": eq.methods.FixedScale(1.0)}
ONE, NO_FILTER = {"noise_multiplier": 1.0}, eq.methods.LowPass(forward=(1.0,), feedback=())
EQUAL = {"clip_norm": 0.5, "body_clip_norm": 0.5}
LIMITS = {
    "two equal radii": (eq.DCDPSGD(**EQUAL), PLAIN),
    "two equal radii, top share of a trace": (
        eq.DCDPSGD(**EQUAL, variant=TopShare(), score=Trace(dimension=3)),
        PLAIN,
    ),
    "tail from the small radius on": (
        eq.DCDPSGD(clip_norm=0.5, body_clip_norm=0.05, tail_threshold=0.05),
        PLAIN,
    ),
    "equal radii of body and residual": (eq.DiceSGD(clip_norm=0.5, residual_clip_norm=0.5), PLAIN),
    "the same per layer": (eq.DiceSGD(clip_norm=0.5, residual_clip_norm=0.5, per_layer=True), PER_LAYER),
    # The squares' noise comes after the gradient's in the stream.
    "radius at its largest": (
        eq.AdaptiveRMS(clip_norm=0.5, radius=MeanSquareRule(tau=1e12), **ONE, radius_noise_multiplier=3.0),
        eq.DPSGD(clip_norm=0.5, **ONE),
    ),
    "one band": (eq.DPMF(clip_norm=0.5, bands=1), PLAIN),
    "one stage": (eq.DPSGD(clip_norm=0.5, noise_multiplier=eq.methods.NoiseStages((1.0,))), PLAIN),
    "scale 1": (eq.methods.ScaleThenPrivatise(**SCALE_1), PLAIN),
    "scale 1 per layer": (eq.methods.ScaleThenPrivatise(**SCALE_1, per_layer=True), PER_LAYER),
    "all of an estimate new": (eq.methods.DiSK(clip_norm=0.5, kappa=1.0), PLAIN),
    "no filter": (eq.methods.Doppler(clip_norm=0.5, filter=NO_FILTER), PLAIN),
}


@pytest.mark.parametrize(("method", "plain"), LIMITS.values(), ids=LIMITS)
def test_at_its_limit_it_is_dp_sgd_bit_for_bit(method, plain):
    """The same draws, the same sums, and so the same noise."""
    run, other = train(method), train(plain)
    list(run)
    list(other)
    assert torch.equal(parameters(run.model), parameters(other.model))


@pytest.mark.parametrize(
    "method",
    [
        eq.DCDPSGD(clip_norm=0.5),
        eq.DPSGD(clip_norm=eq.methods.ReleasedQuantile(0.5)),
        eq.methods.DiSK(clip_norm=eq.methods.ReleasedQuantile(0.5)),
    ],
)
def test_counts_leave_room_for_users_of_many_records(method):
    """Eight records of a user move a count by as much as four of its noises: it gets more noise."""
    setting = Setting(sampling=eq.Poisson(20, RECORDS, STEPS), budget=BUDGET, unit=eq.privacy.Unit("user", 8))
    plan = method.plan(setting).releases
    gradient, count = plan.releases
    assert count.noise_multiplier == gradient.noise_multiplier
    assert 0.98 * BUDGET.epsilon <= plan.epsilon(BUDGET.delta).value <= BUDGET.epsilon


def test_the_law_of_thresholds_sees_one_that_is_kept_and_never_released(monkeypatch):
    """A label's threshold taken from raw norms changes no bound and no noise: the state gives it away."""

    class Raw(eq.DPSGD):
        def step(self, context, state):
            draw = context.draw("batch")
            norm = float(unwrap(draw.rows(lambda rows, ids: rows.row_norms()).max()))
            sums = draw.query(lambda rows, ids: {"gradient": clip(rows, self.clip_rule, 0.5)})
            return context.ledger.release(draw, sums)["gradient"], {"tail_threshold": norm}

    sampling = eq.FullBatch(RECORDS, 2)
    method = Raw(clip_norm=0.5, noise_multiplier=1.0)
    both = under_replay(lambda: method, monkeypatch, sampling=sampling, budget=None)
    first, second = map(noise_scales, both)
    assert first[:-1] == second[:-1]
    assert first[-1] != second[-1]


@pytest.mark.few(24)
@proven
def test_nothing_but_what_was_released_steers_it(make, monkeypatch):
    """Neither thresholds follow raw values, nor do divisors follow how many records were drawn.

    Half of the records of every draw are gone and the others are stretched: the same releases lead to the
    same parameters, thresholds and state, to the last bit.
    """
    first, second = under_replay(make, monkeypatch, thinned=True)
    assert torch.equal(parameters(first.model), parameters(second.model))
    assert noise_scales(first) == noise_scales(second)


def test_the_law_of_sizes_sees_a_divisor_that_is_counted(monkeypatch):
    class Counted(eq.DPSGD):
        def step(self, context, state):
            draw = context.draw("batch")
            size = draw.rows(lambda rows, ids: rows.row_norms()).shape[0]
            sums = draw.query(lambda rows, ids: {"gradient": clip(rows, self.clip_rule, 0.5)})
            released = context.ledger.release(draw, sums)["gradient"]
            return {name: value / max(1, size) for name, value in released.items()}, state

    first, second = under_replay(
        lambda: Counted(clip_norm=0.5, noise_multiplier=1.0), monkeypatch, thinned=True, budget=None
    )
    assert not torch.equal(parameters(first.model), parameters(second.model))
    assert noise_scales(first) == noise_scales(second)


@pytest.mark.few(24)
@every_kind
def test_a_step_computes_as_many_gradients_as_it_is_said_to(make, monkeypatch):
    """So that `describe` tells the time of methods of several passes, too."""
    method, given = make(), {"sampling": eq.FullBatch(RECORDS, STEPS)}  # draws of a size that is known
    if getattr(method, "anchor_batch_size", None) is not None:  # smaller than everybody
        given = {"sampling": eq.WithoutReplacement(20, RECORDS, STEPS), "relation": "replace_one"}
        method = dataclasses.replace(method, noise_multiplier=1.0, anchor_noise_multiplier=1.0)
        given["budget"] = None
    run = train(method, **given)
    told = run.method.gradients_per_step(run.method_plan)
    computed, private, public = 0, RowSource.of_records, RowSource.of_public

    def of_records(self, records, points, *rest, **options):
        nonlocal computed
        computed += num_records(records) * len(points)
        return private(self, records, points, *rest, **options)

    def of_public(self, batch, *rest):
        nonlocal computed
        computed += num_records(batch)
        return public(self, batch, *rest)

    monkeypatch.setattr(RowSource, "of_records", of_records)
    monkeypatch.setattr(RowSource, "of_public", of_public)
    list(run)
    assert told == pytest.approx(computed / STEPS)


@pytest.mark.few(14)
@every_kind
def test_micro_batches_change_nothing(make):
    ends = []
    for size in (7, 60):
        model = network()
        list(train(make(), model=model, microbatch_size=size))
        ends.append(parameters(model))
    torch.testing.assert_close(*ends, rtol=1e-7, atol=1e-9)


@pytest.mark.few(20)
@every_kind
def test_stopped_and_resumed(make, tmp_path):
    """A run that lost the steps after its checkpoint ends where the uninterrupted one ends, and pays once."""
    whole = network()
    reference = train(make(), model=whole)
    list(reference)
    folder = tmp_path / "run"
    first = train(make(), folder=folder)
    for step in first:
        if step.step == 3:
            first.save_checkpoint()
        if step.step == 5:
            break
    state = first.method_state
    first.close()
    model = network()
    again = eq.PrivateTraining.resume(
        folder, model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, data=records(), method=make()
    )
    assert again.steps_done == 3
    assert holds_private(again.method_state) == holds_private(state)
    list(again)
    torch.testing.assert_close(parameters(model), parameters(whole), rtol=1e-6, atol=1e-8)
    assert again.statement().epsilon == reference.statement().epsilon
    assert not any(again.ledger.releases_left.values()) or again.method.card.guarantee == "none"


@pytest.mark.few(14)
@every_kind
def test_draws_without_records(make, monkeypatch):
    class Nobody(PublishedLedger):
        def sample(self, draw, num_records):
            return super().sample(draw, num_records)[:0]

    monkeypatch.setattr(eq.PrivateTraining, "ledger_class", Nobody)
    model = network()
    before = parameters(model)
    run = train(make(), model=model)
    assert len(list(run)) == STEPS
    assert torch.isfinite(parameters(model)).all()
    # A raw threshold is zero where nobody was drawn, and so is its noise; a reference has none at all.
    if run.method.recipe == "library" and run.method.card.guarantee != "none":
        assert not torch.equal(before, parameters(model))


@pytest.mark.few(14)
@every_kind
def test_a_record_without_a_finite_gradient_has_no_weight(make, monkeypatch):
    """On a device, too, where the sums of a draw are looked at when all are there."""
    data = records()
    bad = torch.arange(0, RECORDS, 4)  # so many that every few draws hold some
    data["weight"][bad] = 1e308  # a finite number whose gradient overflows
    data["input"][bad] *= 1e3
    model, far = network(), network()
    assert len(list(train(make(), model=model, data=data))) == STEPS
    assert torch.isfinite(parameters(model)).all()
    monkeypatch.setattr("equipoise.training.step.host_waits", lambda device: True)
    assert len(list(train(make(), model=far, data=data))) == STEPS
    torch.testing.assert_close(parameters(far), parameters(model), rtol=1e-6, atol=1e-8)
