"""Runs that share a journal: each goes on with the plan that it began with, under its own name."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from small_problems import RECORDS, resumed, saved, training

import equipoise as eq
from equipoise.distributed.shared_ledger import SharedLedger
from equipoise.methods import Abadi, Plan
from equipoise.privacy import Gaussian, Ledger, LedgerError, PrivacyPlan, Release, calibrate
from equipoise.training.folder.config_file import rebuild
from equipoise.training.folder.run_folder import RunFolder
from equipoise.training.run_ledger import booked_plan

SAMPLING = eq.FixedEpochs(12, RECORDS, 10)  # accounted in closed form, and so quickly
BUDGET = eq.Budget(8.0, 1e-3)


@pytest.fixture
def shared(tmp_path):
    return {
        "journal": tmp_path / "ledger.jsonl",
        "reproducible": False,
        "sampling": SAMPLING,
    }


def calibrated(folder, **options):
    """A run whose noise follows from the budget and from the other runs in the journal."""
    return training(folder=folder, method=eq.DPSGD(clip_norm=0.5), budget=BUDGET, **options)


@pytest.mark.parametrize("meanwhile", ["another closed", "another began", "both"])
def test_a_run_goes_on_though_others_came_and_went_while_it_was_prepared(
    tmp_path, shared, monkeypatch, meanwhile
):
    """Its noise was fitted to a state of the journal that is not the one before its first line."""
    other = training(folder=tmp_path / "other", **shared)
    plan = other.plan

    write_config = RunFolder.write_config  # between the plan and the ledger

    def late(*arguments):
        if meanwhile != "another began":
            other.ledger.close()
        if meanwhile != "another closed":
            Ledger(PrivacyPlan([plan["gradient"].scaled(30.0)], SAMPLING), journal=other.ledger.journal)
        write_config(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "write_config", late)
        run = calibrated(tmp_path / "run", **shared)
    saved(run)
    if meanwhile == "another began":  # and closes while this one is stopped
        other.ledger.close()
    again = resumed(tmp_path / "run")
    assert again.plan.fingerprint() == run.plan.fingerprint()
    assert again.run(progress=False).epsilon <= BUDGET.epsilon


@dataclass(frozen=True, kw_only=True)
class Own(eq.Method):
    """A method of a user's own: it plans by the noise of another plan, or calibrates by itself."""

    name = "own"
    searches: bool = False

    def plan(self, setting):
        def with_noise(multiplier):
            releases = [Release("gradient", 1.0, Gaussian(multiplier))]
            return PrivacyPlan(releases, setting.sampling, setting.relation)

        if self.searches:  # to what other runs left of the budget
            return Plan(calibrate(with_noise, setting.budget, other_events=setting.other_runs))
        found = setting.calibrated(with_noise)["gradient"].noise_multiplier
        releases = [Release(name, 1.0, Gaussian(3 * found)) for name in ("gradient", "count")]
        return Plan(PrivacyPlan(releases, setting.sampling, setting.relation))

    def step(self, context, state):
        draw, names = context.draw("batch"), [one.name for one in context.plan.releases.releases]
        sums = draw.query(lambda rows, ids: {name: eq.privacy.clip(rows, Abadi(), 1.0) for name in names})
        gradient = context.ledger.release(draw, sums)["gradient"]
        return {name: value / 12 for name, value in gradient.items()}, state


METHODS = {kind.name: kind(clip_norm=0.5) for kind in (eq.DPSGD, eq.DiceSGD, eq.DPC4, eq.AdaptiveRMS)}
METHODS |= {"own": Own(), "own search": Own(searches=True)}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", METHODS)
def test_nothing_is_calibrated_again_where_a_run_goes_on(tmp_path, shared, monkeypatch, name):
    training(folder=tmp_path / "other", **shared).run(progress=False)
    budget = eq.Budget(20.0, 1e-3)
    run = training(folder=tmp_path / "run", method=METHODS[name], budget=budget, **shared)
    saved(run)
    constants = repr(run.method_plan.constants)

    def refuse(*_, **__):
        raise AssertionError("it is calibrated again")

    given = {"method": METHODS[name]} if name.startswith("own") else {}
    if not given:
        monkeypatch.setattr("equipoise.methods.base.calibrate", refuse)
    again = resumed(tmp_path / "run", **given)
    assert again.plan.fingerprint() == run.plan.fingerprint()
    assert repr(again.method_plan.constants) == constants
    again.take_step()


def test_another_schedule_of_thresholds_is_refused_where_a_run_goes_on(tmp_path, shared):
    run = training(
        folder=tmp_path / "run", method=eq.DPSGD(clip_norm=lambda step: 0.5), budget=BUDGET, **shared
    )
    saved(run)
    with pytest.raises(ValueError, match="the privacy plan differs"):
        resumed(tmp_path / "run", method=eq.DPSGD(clip_norm=lambda step: 5.0))


@pytest.mark.parametrize("own_journal", [False, True])
def test_a_finished_run_has_no_key_and_gets_none(tmp_path, shared, own_journal):
    if own_journal:
        del shared["journal"]
    run = calibrated(tmp_path / "run", **shared)
    run.run(progress=False)
    run.close()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RuntimeError, match=r"finished already.*load_model.*start_or_resume"):
        resumed(tmp_path / "run")
    assert [path for path in sorted(tmp_path.rglob("*")) if path.name != "lock"] == [
        path for path in before if path.name != "lock"
    ]
    with pytest.raises(RuntimeError, match="holds no key"):
        booked_plan(run.folder, rebuild(run.folder.read_config()).run)


def test_a_seed_names_one_run_in_a_journal(tmp_path, shared):
    shared = shared | {"reproducible": True, "seed": 5}
    first = training(folder=tmp_path / "a", **shared)
    first.take_step()
    lines = shared["journal"].read_bytes()
    with pytest.raises(LedgerError, match=r"seed=5.*reproducible=True.*journal=.*another seed"):
        training(folder=tmp_path / "b", **shared)
    assert shared["journal"].read_bytes() == lines
    assert not (tmp_path / "b").exists()
    training(folder=tmp_path / "b", **(shared | {"seed": 6})).take_step()
    saved(first, steps=0)
    resumed(tmp_path / "a").take_step()


def test_a_run_that_takes_the_guarantee_of_others_away_is_named(tmp_path, shared):
    own = training(**shared)
    assert not own.statement().warnings
    seeded = training(**shared | {"reproducible": True})
    statement = own.statement()
    assert statement.guarantee == "none"
    (warning,) = statement.warnings
    assert seeded.ledger.run in warning
    assert "public seed" in warning


class Broadcasts:
    """Two processes, as rank 0 sees them: what it sends the other is kept."""

    count = 2

    def __init__(self):
        self.sent = []

    def first(self, compute):
        self.sent.append(compute())
        return self.sent[-1]


def test_noise_over_steps_and_its_keys_stay_on_rank_0(tmp_path):
    plan = PrivacyPlan([], SAMPLING)
    history = {"gradient": [{"ordinal": 0, "key": "5e" * 32, "shapes": {}, "noise": {}}]}
    processes = Broadcasts()
    ledger = SharedLedger(plan, processes, lambda: Ledger(plan, history=history))
    place = ledger.synced_place()
    assert place["history"] == history
    assert "5e" * 32 not in repr(processes.sent)
    ledger.own = None
    assert ledger.place == {}
