"""Trainings whose unit of privacy is the user."""

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from small_problems import RECORDS, OnDemand, loss, network, owners, parameters, records, resumed, training
from test_processes import join_group
from torch import nn

import equipoise as eq
from equipoise.data import Records
from equipoise.gradients import GradientEngine
from equipoise.privacy import JournalError, PlanError, Unit
from equipoise.statements.verify import verify_run
from equipoise.training.owners import Owners, UserSource, joined_over_users
from equipoise.training.record_source import DataError, RecordSource
from tests.shared_fixtures import in_processes

MOST = 3
#: Options, an error and words of it.
REFUSED = [
    ({"most": None}, TypeError, "records_per_user"),
    ({"most": 10**6}, PlanError, "rows='mean'"),
    ({"most": 10**6, "rows": "mean"}, ValueError, "smaller cap"),
    ({"owner": [0, 1]}, DataError, "another length"),
    ({"owner": "nobody"}, DataError, "owner='nobody' is no column"),
    ({"owner": [1, "1"] * (RECORDS // 2)}, DataError, "types: int, str"),
    ({"owner": np.ma.masked_array([7] * RECORDS, [True] * RECORDS)}, DataError, "MaskedArray"),
    ({"owner": np.array(["secret-value", None] * (RECORDS // 2), dtype=object)}, DataError, "NoneType, str"),
]


@pytest.mark.parametrize(("options", "error", "message"), REFUSED)
def test_what_names_no_user_per_record_is_refused(options, error, message):
    with pytest.raises(error, match=message) as caught:
        of_users(**options)
    assert "secret-value" not in str(caught.value)


def of_users(most=2, owner=None, **options):
    owner = torch.arange(RECORDS) // 4 if owner is None else owner
    given = {} if most is None else {"records_per_user": most}
    return training(owner=owner, **given, **options)


@pytest.mark.parametrize("rows", [None, "mean"])
def test_users_of_one_record_are_the_record_level_bit_for_bit(rows):
    alone, run = training(steps=5), of_users(1, torch.arange(RECORDS), rows=rows, steps=5)
    statements = [each.run(progress=False).statement for each in (alone, run)]
    assert torch.equal(parameters(alone.model), parameters(run.model))
    assert statements[0].epsilon == statements[1].epsilon
    assert [statement.unit for statement in statements] == ["record", "user"]


def drawn(run):
    """The records of every draw of a training."""
    seen, used = [], run._setup.rows.used
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


def test_all_of_a_users_records_are_as_likely():
    owner, counts = torch.tensor([0, 1, 1, 1, 0, 1]), torch.zeros(6)
    everything, trials = torch.arange(6), 1000
    for number in range(trials):
        choice = Owners(owner, Unit("user", 2))
        choice.choose(number.to_bytes(32, "big"))
        counts[choice.used(everything)] += 1
    # a user with two records has both, one with four each half of the time, within four deviations
    assert counts[[0, 4]].tolist() == [trials, trials]
    assert (counts[[1, 2, 3, 5]] - trials / 2).abs().max() < 4 * (trials / 4) ** 0.5


def test_a_method_that_forgets_the_unit_is_held_to_it():
    class Careless(eq.DPSGD):
        def plan(self, setting):
            found = super().plan(setting)
            return type(found)(found.releases.protecting(Unit()))

    run = of_users(3, method=Careless(noise_multiplier=2.0))
    assert run.plan.unit == Unit("user", 3)
    assert run.statement().unit == "user"


def test_owners_are_a_column_of_the_data():
    """Numbers, texts, or a table's digests of names; the model sees no user."""
    seen, sampling, numbers = [], eq.FullBatch(RECORDS, 2), torch.arange(RECORDS) // 4

    def watching(model, batch):
        seen.append(set(batch))
        return loss(model, batch)

    digests = torch.randint(2**62, (RECORDS // 4, 2))[numbers]
    for owner in (numbers, digests):
        data = Records({**records(), "patient": owner})
        run = of_users(owner="patient", data=data, loss=watching, sampling=sampling)
        given = of_users(owner=owner, sampling=sampling)
        for each in (run, given):
            list(each)
        assert torch.equal(parameters(run.model), parameters(given.model))
    assert all(names == {"input", "label"} for names in seen)
    texts = Owners([f"user {number}" for number in numbers.tolist()], Unit("user", 2))
    assert texts.partition() == Owners(digests, Unit("user", 2)).partition()


def test_draws_of_one_size_are_refused_where_users_own_several_records():
    exact = {"sampling": eq.WithoutReplacement(10, RECORDS, 4), "relation": "replace_one"}
    with pytest.raises(DataError, match="which user is there"):
        of_users(most=1, **exact)
    of_users(most=1, owner=torch.arange(RECORDS), **exact)


def begun(folder, rows):
    model, sampling = network(dtype=torch.float64), eq.Poisson(20 if rows is None else 5, RECORDS, 6)
    given = {"rows": rows, "data": records(dtype=torch.float64), "folder": folder}
    return of_users(MOST, owners(), model=model, sampling=sampling, **given)


@pytest.mark.parametrize("rows", [None, "mean"])
def test_left_behind_its_checkpoint_and_resumed(rows, tmp_path):
    whole, run = begun(tmp_path / "whole", rows), begun(tmp_path / "run", rows)
    list(whole)
    run.take_step()
    run.save_checkpoint()
    run.take_step()
    run.close()
    users = {"owner": owners(), "records_per_user": MOST, "rows": rows}
    data = records(dtype=torch.float64)
    again = resumed(tmp_path / "run", network(dtype=torch.float64), data=data, **users)
    statement = again.run(progress=False).statement
    assert torch.equal(parameters(again.model), parameters(whole.model))
    assert (statement.unit, statement.releases[0]["used"]) == ("user", 6)
    assert statement.users == {"records": MOST, "rows": rows}
    assert verify_run(tmp_path / "run").consistent


def test_a_run_that_goes_on_needs_its_users(tmp_path):
    run = of_users(folder=tmp_path / "run", steps=4)
    run.take_step()
    run.close()
    with pytest.raises(ValueError, match="protects users"):
        resumed(tmp_path / "run")
    with pytest.warns(UserWarning, match="other records"):  # other owners are other data
        resumed(tmp_path / "run", owner=torch.arange(RECORDS) // 3, records_per_user=2)


def test_runs_in_a_journal_have_the_same_users_of_the_same_records(tmp_path):
    """Names do not matter, nor how many records of a user a run takes: its cost is that of the user."""
    journal = {"journal": tmp_path / "journal", "steps": 2}
    first = of_users(**journal, owner=torch.arange(RECORDS) // 4)
    renamed = [f"user {i // 4}" for i in range(RECORDS)]
    second = of_users(3, renamed, seed=1, **journal)
    assert list(second.ledger.other_runs()) == [first.ledger.run]
    assert "the other runs in this journal have the same users" in second.statement().assumptions
    with pytest.raises(JournalError, match="accounted for one user"):
        training(**journal, seed=1)
    before = (tmp_path / "journal").read_text()
    with pytest.raises(JournalError, match="owner groups them into other users"):
        of_users(**journal, seed=2, owner=torch.arange(RECORDS) // 3)
    assert (tmp_path / "journal").read_text() == before  # nothing was booked
    fewer = {name: value[:40] for name, value in records().items()}  # of grown data nothing can be said
    of_users(**journal, seed=3, owner=torch.arange(40) // 3, data=fewer)


def test_an_edited_journal_that_mixes_users_is_found(tmp_path):
    journal = tmp_path / "journal"
    for seed in (0, 1):
        run = of_users(journal=journal, steps=2, seed=seed, folder=tmp_path / f"run{seed}")
        run.run(progress=False)
    folder = tmp_path / "run1"
    assert verify_run(folder, ledger_file=journal).consistent
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    began = next(line for line in lines if line["type"] == "run")
    began["owners"] = began["owners"].replace(":", ":0")
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert not verify_run(folder, ledger_file=journal).consistent


def in_process(rank: int, port: int, folder: str) -> None:
    join_group(rank, port)
    for rows in (None, "mean"):
        run = begun(Path(folder) / f"run {rows}", rows)
        list(run)
        torch.save(parameters(run.model), Path(folder) / f"rank{rank} {rows}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.wide
def test_two_processes_equal_one(tmp_path):
    in_processes(in_process, tmp_path)
    for rows in (None, "mean"):
        run = begun(tmp_path / "alone", rows)
        list(run)
        run.close()
        shutil.rmtree(tmp_path / "alone")
        alone = parameters(run.model)
        ends = [torch.load(tmp_path / f"rank{rank} {rows}.pt") for rank in (0, 1)]
        assert torch.equal(*ends)
        torch.testing.assert_close(ends[0], alone, rtol=1e-10, atol=1e-12)


def convolutions():
    torch.manual_seed(0)
    layers = [nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 4, 2, padding=1), nn.Tanh(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(36, 3)).double()


@pytest.mark.parametrize(
    ("rows", "make"), [("sum", lambda: network(dtype=torch.float64)), ("mean", convolutions)]
)
def test_rows_of_users_are_the_dense_sums_of_their_records(rows, make):
    counts, most, model = torch.tensor([3, 1, 4, 2]), 4, make()
    batch = records(10, dtype=torch.float64)
    owners = Owners(torch.arange(4).repeat_interleave(counts).tolist(), Unit("user", most, rows))
    users = UserSource(RecordSource(batch), owners).take(torch.arange(4))
    engine = GradientEngine(model, joined_over_users(loss, rows), users)
    found, single = engine(users), GradientEngine(model, loss, batch)(batch).materialise().matrix()
    wanted = torch.stack([rows.sum(0) for rows in single.split(counts.tolist())])
    if rows == "mean":
        wanted = wanted / counts[:, None]
    torch.testing.assert_close(found.materialise().matrix(), wanted, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.row_norms(), wanted.norm(dim=1), rtol=1e-6, atol=1e-9)
    weights = torch.tensor([0.5, 2.0, -1.0, 0.0], dtype=torch.float64)
    sums = torch.cat([value.flatten() for value in found.weighted_sums(weights).values()])
    torch.testing.assert_close(sums, weights @ wanted, rtol=1e-9, atol=1e-12)
    # in ghost form: the positions of a user's records merge, and no row is held
    assert {row.how for row in engine.coverage()} == {"rule"}


def test_a_user_with_a_record_that_fails_is_left_out_whole(tmp_path):
    class Broken(OnDemand):
        def __getitem__(self, i):
            if i == 57:
                raise OSError("secret-value")
            return super().__getitem__(i)

    given = {"rows": "mean", "sampling": eq.FullBatch(15, 2), "folder": tmp_path / "run"}
    of_users(4, data=Broken(records()), **given).run(progress=False)
    assert '"batch.records_failed": 1' in (tmp_path / "run" / "private" / "diagnostics.jsonl").read_text()
