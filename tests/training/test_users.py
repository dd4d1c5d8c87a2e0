"""Trainings whose unit of privacy is the user."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from killed_users import MOST, STEPS, owners, start
from small_problems import RECORDS, OnDemand, loss, network, parameters, records, training
from test_processes import in_two_processes, join_group

import equipoise as eq
from equipoise.privacy import JournalError, PlanError, Unit
from equipoise.training.folder.published_run import verify_run
from equipoise.training.owners import Owners
from equipoise.training.record_source import DataError


def of_users(most=2, owner=None, **options):
    owner = torch.arange(RECORDS) // 4 if owner is None else owner
    return training(unit="user", owner=owner, records_per_user=most, **options)


def test_one_record_per_user_is_the_record_level_bit_for_bit():
    ends, statements = [], []
    for options in ({}, {"unit": "user", "owner": torch.arange(RECORDS), "records_per_user": 1}):
        run = training(steps=10, **options)
        result = run.run(progress=False)
        ends.append(parameters(run.model))
        statements.append(result.statement)
    assert torch.equal(*ends)
    assert statements[0].epsilon == statements[1].epsilon
    assert [statement.unit for statement in statements] == ["record", "user"]


def drawn(run):
    """The records of every draw of a training."""
    seen = []
    used = run._setup.rows.used
    run._setup.rows.used = lambda ids: (seen.append(used(ids)), seen[-1])[1]
    list(run)
    return seen


def test_no_draw_holds_more_of_a_user_than_the_cap():
    owner = np.array(owners())
    run = of_users(MOST, owner.tolist(), sampling=eq.FullBatch(RECORDS, 4))
    draws = drawn(run)
    for ids in draws:
        assert torch.equal(ids, draws[0])  # the same records in every draw
    found, there = Counter(owner[draws[0]]), Counter(owner)
    assert found == {user: min(count, MOST) for user, count in there.items()}


def test_a_run_with_another_key_uses_other_records():
    chosen = [drawn(of_users(sampling=eq.FullBatch(RECORDS, 1), seed=seed))[0] for seed in (0, 0, 1)]
    assert torch.equal(chosen[0], chosen[1])
    assert not torch.equal(chosen[0], chosen[2])


def test_all_of_a_users_records_are_as_likely():
    owner, counts = torch.tensor([0, 1, 1, 1, 0, 1]), torch.zeros(6)
    everything, trials = torch.arange(6), 3000
    for number in range(trials):
        choice = Owners(owner, Unit("user", 2))
        choice.choose(number.to_bytes(32, "big"))
        counts[choice.used(everything)] += 1
    # a user with two records has both, one with four each half of the time, within four deviations
    assert counts[[0, 4]].tolist() == [trials, trials]
    assert (counts[[1, 2, 3, 5]] - trials / 2).abs().max() < 4 * (trials / 4) ** 0.5


def test_records_beyond_the_cap_are_never_read():
    class Watched(OnDemand):
        def __getitem__(self, i):
            read.append(i)
            return super().__getitem__(i)

    read: list[int] = []
    run = of_users(1, data=Watched(records()), sampling=eq.FullBatch(RECORDS, 3))
    read.clear()  # of the trials before the first draw
    list(run)
    assert len(set(read)) == RECORDS // 4
    assert {i // 4 for i in read} == set(range(RECORDS // 4))


def test_the_noise_meets_the_budget_of_users():
    budget = eq.Budget(4.0, 1e-5)
    runs = [of_users(most, method=eq.DPSGD(), budget=budget) for most in (1, 2, 4)]
    noise = [run.plan["gradient"].noise_multiplier for run in runs]
    assert noise == sorted(noise)
    for run, most in zip(runs, (1, 2, 4), strict=True):
        statement = run.statement()
        assert 0.98 * 4 <= statement.epsilon <= 4
        assert (statement.unit, statement.users) == ("user", {"records": most, "rows": None})
        assert "one user" in str(statement)
        assert "NOT PRIVATE" in str(statement)
    assert "at most 4 records" in " ".join(str(runs[2].statement()).split())


def test_a_method_that_forgets_the_unit_is_held_to_it():
    class Careless(eq.DPSGD):
        def plan(self, setting):
            found = super().plan(setting)
            return type(found)(found.releases.protecting(Unit()))

    run = of_users(3, method=Careless(noise_multiplier=2.0))
    assert run.plan.unit == Unit("user", 3)
    assert run.statement().unit == "user"


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_owners_come_in_several_forms(kind):
    run = of_users(owner=kind([i // 4 for i in range(RECORDS)]), steps=2)
    assert run.run(progress=False).steps == 2


def test_owners_are_a_column_of_the_data():
    seen = []

    def watching(model, batch):
        seen.append(set(batch))
        return loss(model, batch)

    data = records() | {"patient": torch.arange(RECORDS) // 4}
    run = of_users(owner="patient", data=data, loss=watching, sampling=eq.FullBatch(RECORDS, 2))
    given = of_users(sampling=eq.FullBatch(RECORDS, 2))
    list(run)
    list(given)
    assert torch.equal(parameters(run.model), parameters(given.model))
    assert all(names == {"input", "label"} for names in seen)  # the model sees no user


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"unit": "user", "records_per_user": 2}, ValueError, "unit='user' needs owner"),
        ({"unit": "user", "owner": list(range(RECORDS))}, ValueError, "needs records_per_user"),
        ({"owner": list(range(RECORDS))}, ValueError, "unit='record' protects single records"),
        ({"records_per_user": 2}, ValueError, "belongs to unit='user'"),
        ({"unit": "client"}, ValueError, "unit='client' is unknown"),
    ],
)
def test_arguments_that_do_not_go_together_are_named(options, error, message):
    with pytest.raises(error, match=message):
        training(**options)


@pytest.mark.parametrize(
    ("owner", "message"),
    [
        ([0, 1], "another length"),
        ("nobody", "owner='nobody' is no column"),
        (torch.zeros(RECORDS), "type float32"),
        (torch.zeros(RECORDS, 2, dtype=torch.long), "2 axes"),
        ([None] * RECORDS, "NoneType"),
        (np.array(["secret-value", None] * (RECORDS // 2), dtype=object), "types NoneType, str"),
        (3, "owner is an int"),
    ],
)
def test_owners_that_name_no_user_per_record_are_refused(owner, message):
    with pytest.raises(DataError, match=message) as caught:
        of_users(owner=owner)
    assert "secret-value" not in str(caught.value)


def test_samplings_that_no_accountant_covers_are_refused_before_anything_is_spent(tmp_path):
    with pytest.raises(PlanError, match="WithoutReplacement"):
        of_users(
            sampling=eq.WithoutReplacement(10, RECORDS, 4), relation="replace_one", run_dir=tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()


def test_killed_and_resumed(tmp_path):
    whole = start(str(tmp_path / "whole"))
    folder = tmp_path / "killed"
    script = Path(__file__).with_name("killed_users.py")
    ended = subprocess.run([sys.executable, script, str(folder)], capture_output=True, text=True, check=False)
    assert ended.returncode == -9, ended.stderr
    resumed = start(str(folder), resume=True)
    assert torch.equal(parameters(resumed.model), parameters(whole.model))
    statement = resumed.statement()
    assert (statement.unit, statement.releases[0]["used"]) == ("user", STEPS)
    assert verify_run(folder).consistent


def test_a_run_that_goes_on_needs_its_users(tmp_path):
    run = of_users(run_dir=tmp_path / "run", steps=4)
    run.take_step()
    run.close()
    model = network()
    pieces = {"loss": loss, "data": records()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    with pytest.raises(ValueError, match="needs owner"):
        eq.PrivateTraining.resume(tmp_path / "run", model, optimizer, **pieces)
    with pytest.warns(UserWarning, match="other records"):  # other owners are other data
        eq.PrivateTraining.resume(
            tmp_path / "run", model, optimizer, owner=torch.arange(RECORDS) // 3, **pieces
        )


def test_a_shared_journal_holds_one_unit(tmp_path):
    of_users(ledger_file=tmp_path / "journal", steps=2)
    with pytest.raises(JournalError, match="accounted for one user, this one for one record"):
        training(ledger_file=tmp_path / "journal", steps=2, seed=1)
    second = of_users(ledger_file=tmp_path / "journal", steps=2, seed=1)
    assert "the other runs in this journal have the same users" in second.statement().assumptions


def in_process(rank: int, port: int, folder: str) -> None:
    join_group(rank, port)
    run = start(str(Path(folder) / "run"))
    torch.save(parameters(run.model), Path(folder) / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_equal_one(tmp_path):
    in_two_processes(in_process, tmp_path)
    alone = parameters(start(str(tmp_path / "alone")).model)
    ends = [torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1)]
    assert torch.equal(*ends)
    torch.testing.assert_close(ends[0], alone, rtol=1e-10, atol=1e-12)
