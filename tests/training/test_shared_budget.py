"""A journal has one budget: what is left is said, and a run that would get hardly any of it is refused."""

import pytest
import torch
from torch import nn

import equipoise as eq


def begun(journal, epsilon, **method):
    model = nn.Linear(2, 1)
    return eq.PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda model, batch: model(batch["x"])[:, 0].square(),
        data={"x": torch.randn(120, 2)},
        sampling=eq.Poisson(50, population=115, steps=3),
        method=eq.DPSGD(**method),
        budget=eq.Budget(epsilon, 1e-4),
        run=eq.Run(journal=journal),
    )


def test_the_same_budget_twice_is_refused_and_nothing_is_booked(tmp_path):
    journal = tmp_path / "journal"
    begun(journal, 1.0)
    before = journal.read_bytes()
    with pytest.raises(eq.privacy.BudgetError, match=r"equipoise calibrate.*noise_multiplier"):
        begun(journal, 1.0)
    assert journal.read_bytes() == before


def test_a_larger_budget_and_stated_noise_are_taken(tmp_path, capsys, recwarn):
    journal = tmp_path / "journal"
    begun(journal, 1.0)
    second = begun(journal, 2.0)
    assert "of 2 at" in capsys.readouterr().err
    assert not [one for one in recwarn if "journal" in str(one.message) or "ledger" in str(one.message)]
    assert second.plan.releases[0].noise_multiplier < 20
    begun(journal, 2.0, noise_multiplier=30.0)
