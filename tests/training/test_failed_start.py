"""A start that fails leaves nothing behind: the same folder and the same budget can be tried again."""

from __future__ import annotations

import json

import pytest
from small_problems import RECORDS, training

import equipoise as eq
from equipoise.privacy import BudgetError, PlanError
from equipoise.training.folder.checkpoint import CheckpointError, Checkpoints

SAMPLING = eq.FixedEpochs(12, RECORDS, 10)


def enough_for_one() -> eq.Budget:
    """A budget that one run fits in and two do not."""
    return eq.Budget(1.05 * training(sampling=SAMPLING).plan.epsilon(1e-3).value, 1e-3)


def test_a_budget_that_is_used_up_leaves_no_folder(tmp_path):
    shared = {"journal": tmp_path / "ledger.jsonl", "reproducible": False, "sampling": SAMPLING}
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


def test_what_a_failed_start_reserved_is_free_again(tmp_path, monkeypatch):
    """The first checkpoint cannot be written: nothing was released, and the shared journal knows it."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    options = {
        "journal": tmp_path / "ledger.jsonl",
        "folder": folder,
        "reproducible": False,
        "sampling": SAMPLING,
        "budget": enough_for_one(),
    }

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


def test_what_a_resumed_run_needs_is_there_before_the_first_checkpoint(tmp_path, monkeypatch):
    order = []
    save = Checkpoints.save

    def noted(self, step, state):
        order.append(step)
        save(self, step, state)

    monkeypatch.setattr(Checkpoints, "save", noted)

    class Noting(eq.Run):
        def created(self, folder):
            order.append(folder.name)

    training(steps=2, run=Noting(tmp_path / "run", reproducible=True))
    assert order == ["run", 0]


def test_a_plan_that_no_accountant_covers_fails_before_anything_is_spent(tmp_path):
    exact = eq.WithoutReplacement(12, RECORDS, 4)
    with pytest.raises(PlanError, match="replace_one"):
        training(sampling=exact, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    shared = {"relation": "replace_one", "journal": tmp_path / "ledger.jsonl", "reproducible": False}
    training(sampling=exact, **shared)
    with pytest.raises(PlanError, match="one scheme"):
        training(sampling=eq.Poisson(12, RECORDS, 4), **shared)
