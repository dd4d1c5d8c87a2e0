"""A journal has one budget: what is left is said, and a run that would get hardly any of it is refused."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from small_problems import resumed, saved, training

import equipoise as eq


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


def test_the_same_budget_twice_is_refused_and_nothing_is_booked(tmp_path):
    journal = tmp_path / "journal"
    begun(journal, 1.0)
    before = journal.read_bytes()
    with pytest.raises(eq.privacy.BudgetError, match=r"runs=52"):
        begun(journal, 1.0)
    assert journal.read_bytes() == before


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


def test_a_larger_budget_and_stated_noise_are_taken(tmp_path, capsys, recwarn):
    journal = tmp_path / "journal"
    begun(journal, 1.0)
    second = begun(journal, 2.0)
    assert "of 2 at" in capsys.readouterr().err
    assert not [one for one in recwarn if "journal" in str(one.message) or "ledger" in str(one.message)]
    assert second.plan.releases[0].noise_multiplier < 20
    begun(journal, 2.0, noise_multiplier=30.0)


def test_a_plan_that_follows_from_noise_that_was_found_is_the_same_at_a_resume(tmp_path):
    begun(tmp_path / "journal", 1.0)  # which the second run's noise makes room for
    run = begun(tmp_path / "journal", 4.0, tmp_path / "run", HalfAgain)
    again = resumed(saved(run, steps=0).folder.path, method=HalfAgain())
    assert again.plan == run.plan
