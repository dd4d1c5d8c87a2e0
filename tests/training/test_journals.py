"""Runs that share a journal: each goes on with the plan that it began with, under its own name."""

import json
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
from small_problems import RECORDS, resumed, saved, training

import equipoise as eq
from equipoise.distributed.shared_ledger import SharedLedger
from equipoise.methods import Plan
from equipoise.privacy import (
    BudgetError,
    Gaussian,
    Ledger,
    LedgerError,
    PlanError,
    PrivacyPlan,
    Release,
    calibrate,
)
from equipoise.training.folder.checkpoint import CheckpointError, Checkpoints
from equipoise.training.folder.config_file import rebuild
from equipoise.training.folder.run_folder import RunFolder
from equipoise.training.run_ledger import booked_plan

SAMPLING = eq.FixedEpochs(12, RECORDS, 10)  # accounted in closed form, and so quickly
BUDGET = eq.Budget(8.0, 1e-3)


@pytest.fixture
def shared(tmp_path):
    return {"journal": tmp_path / "ledger.jsonl", "reproducible": False, "sampling": SAMPLING}


def calibrated(folder, **options):
    """A run whose noise follows from the budget and from the other runs in the journal."""
    return training(folder=folder, method=eq.DPSGD(clip_norm=0.5), budget=BUDGET, **options)


@pytest.mark.parametrize("meanwhile", ["another closed", "another began"])
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
class Own(eq.DPSGD):
    """A method of a user's own, which calibrates by itself to what other runs left of the budget."""

    name: ClassVar[str] = "own"

    def plan(self, setting):
        def with_noise(multiplier):
            releases = [Release("gradient", 1.0, Gaussian(multiplier))]
            return PrivacyPlan(releases, setting.sampling, setting.relation)

        return Plan(calibrate(with_noise, setting.budget, other_events=setting.other_runs))


METHODS = {"dp-sgd": eq.DPSGD(clip_norm=0.5), "dp-c4": eq.DPC4(clip_norm=0.5), "own": Own()}


@pytest.mark.parametrize("name", METHODS)
def test_nothing_is_calibrated_again_where_a_run_goes_on(tmp_path, shared, monkeypatch, name):
    training(folder=tmp_path / "other", **shared).run(progress=False)
    budget = eq.Budget(20.0, 1e-3)
    run = training(folder=tmp_path / "run", method=METHODS[name], budget=budget, **shared)
    saved(run)
    constants = repr(run.method_plan.constants)

    def refuse(*_, **__):
        raise AssertionError("it is calibrated again")

    given = {"method": METHODS[name]} if name == "own" else {}
    if not given:
        monkeypatch.setattr("equipoise.methods.base.calibrate", refuse)
    again = resumed(tmp_path / "run", **given)
    assert again.plan.fingerprint() == run.plan.fingerprint()
    assert repr(again.method_plan.constants) == constants
    again.take_step()


def test_a_finished_run_has_no_key_and_gets_none(tmp_path, shared):
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


def test_noise_over_steps_and_its_keys_stay_on_rank_0():
    plan, sent = PrivacyPlan([], SAMPLING), []
    history = {"gradient": [{"ordinal": 0, "key": "5e" * 32, "shapes": {}, "noise": {}}]}
    processes = SimpleNamespace(count=2, first=lambda compute: sent.append(compute()) or sent[-1])
    ledger = SharedLedger(plan, processes, lambda: Ledger(plan, history=history))
    assert ledger.synced_place()["history"] == history
    assert "5e" * 32 not in repr(sent)
    ledger.own = None
    assert ledger.place == {}


@dataclass(frozen=True, kw_only=True)
class HalfAgain(eq.DPSGD):
    """With half as much noise again as the budget asks for."""

    name: ClassVar[str] = "half-again"

    def plan(self, setting):
        found = super().plan(setting).releases
        return eq.methods.Plan(replace(found, releases=[one.scaled(1.5) for one in found.releases]))


def begun(journal, budget, folder=None, kind=eq.DPSGD, **method):
    if isinstance(budget, float):
        budget = eq.Budget(budget, 1e-4)
    options = {"method": kind(**method), "budget": budget, "reproducible": False}
    return training(steps=3, journal=journal, folder=folder, **options)


def test_runs_that_share_a_budget_get_the_same_noise_and_spend_it(tmp_path, capsys):
    runs = []
    for number in range(4):
        budget = eq.Budget(2.0, 1e-4, runs=4)
        runs.append(begun(tmp_path / "j", budget))
        assert f"run {number + 1} of the 4" in str(runs[-1].describe())
    noise = [run.plan.releases[0].noise_multiplier for run in runs]
    assert max(noise) < 1.01 * min(noise)
    assert 0.98 * 2 < runs[-1].describe().epsilon <= 2  # the last one's counts all of them
    assert "run 4 of the 4" in capsys.readouterr().err
    with pytest.raises(eq.privacy.BudgetError, match="other runs in the journal cost"):
        begun(tmp_path / "j", budget)


def test_a_run_that_released_nothing_takes_no_part_of_the_budget(tmp_path):
    def noise():
        return begun(tmp_path / "j", eq.Budget(2.0, 1e-4, runs=3))

    first = noise()
    first.take_step()
    empty = noise()
    empty.finish(stop_fixed_beforehand=True)
    second = noise()
    assert "run 2 of the 3" in str(second.describe())
    multipliers = [run.plan.releases[0].noise_multiplier for run in (first, second)]
    assert max(multipliers) < 1.01 * min(multipliers)


def test_a_plan_that_follows_from_noise_that_was_found_is_the_same_at_a_resume(tmp_path):
    begun(tmp_path / "journal", 1.0)  # which the second run's noise makes room for
    run = begun(tmp_path / "journal", 4.0, tmp_path / "run", HalfAgain)
    again = resumed(saved(run, steps=0).folder.path, method=HalfAgain())
    assert again.plan == run.plan


def enough_for_one() -> eq.Budget:
    """A budget that one run fits in and two do not."""
    return eq.Budget(1.05 * training(sampling=SAMPLING).plan.epsilon(1e-3).value, 1e-3)


def test_a_budget_that_is_used_up_leaves_no_folder(tmp_path, shared):
    budget = enough_for_one()
    training(folder=tmp_path / "a", budget=budget, **shared)
    before = (tmp_path / "ledger.jsonl").read_text()
    for _ in range(2):
        with pytest.raises(BudgetError, match="above the budget"):
            training(folder=tmp_path / "b", budget=budget, **shared)
        assert not (tmp_path / "b").exists()
    assert (tmp_path / "ledger.jsonl").read_text() == before
    run = training(folder=tmp_path / "b", budget=eq.Budget(50.0, 1e-3), **shared)
    run.take_step()


def test_what_a_failed_start_reserved_is_free_again(tmp_path, shared, monkeypatch):
    """The first checkpoint cannot be written: nothing was released, and the shared journal knows it."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    options = shared | {"folder": folder, "budget": enough_for_one()}

    def full(self, step, state):
        raise CheckpointError("no space")

    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "save", full)
        with pytest.raises(CheckpointError, match="no space"):
            training(**options)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    entries = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert [entry["type"] for entry in entries] == ["run", "close"]
    assert training(**options).run(progress=False).epsilon <= options["budget"].epsilon


def test_a_plan_that_no_accountant_covers_fails_before_anything_is_spent(tmp_path):
    with pytest.raises(PlanError, match="replace_one"):
        training(sampling=eq.WithoutReplacement(12, RECORDS, 4), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
