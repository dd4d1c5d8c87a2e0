import csv
import warnings
from pathlib import Path

import pytest

from equipoise.app import compare, train
from equipoise.privacy import PrivateSearch
from equipoise.statements import verify

WORDS = "sweep --data digits --subset 200 --batch-size 50 --epochs 1 --grid seed=0,1 --grid epsilon=1,8"


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_grid_is_trained_once_and_goes_on(equipoise, tmp_path, monkeypatch):
    """A row per combination in the order of the grid; what is there is not trained again."""
    found = equipoise.ok(WORDS, "--run-dir", tmp_path / "runs", "--json")
    assert (found.value["runs"], found.value["failed"]) == (4, 0)
    rows = rows_of(tmp_path / "runs" / "results.csv")
    assert [(row["seed"], row["epsilon"]) for row in rows] == [("0", "1"), ("0", "8"), ("1", "1"), ("1", "8")]
    for row in rows:
        assert 0.9 * float(row["epsilon"]) < float(row["epsilon_of_run"]) <= float(row["epsilon"])
        assert row["guarantee"] == "proven"
        assert float(row["accuracy"]) <= found.value["best"]["accuracy"]
    assert (tmp_path / "runs" / "results.png").read_bytes()[:4] == b"\x89PNG"
    trained, train = [], compare.train_in_memory
    monkeypatch.setattr(compare, "train_in_memory", lambda *given: trained.append(given[0]) or train(*given))
    more = (WORDS.replace("=1,8", "=1,8,3"), "--run-dir", tmp_path / "runs", "--out", tmp_path / "table.csv")
    assert equipoise(*more).code == 0
    assert [(one.seed, one.epsilon) for one in trained] == [(0, 3), (1, 3)]
    assert [row for row in rows_of(tmp_path / "table.csv") if row["epsilon"] != "3"] == rows


def test_a_run_that_fails_is_a_row(equipoise, tmp_path, monkeypatch):
    def train(settings, *given):
        warnings.warn("take care", stacklevel=1)
        if settings.seed:
            raise ValueError("no such luck")
        return real(settings, *given)

    real = compare.train_in_memory
    monkeypatch.setattr(compare, "train_in_memory", train)
    with pytest.warns(UserWarning, match="take care"):
        found = equipoise(WORDS.replace("=1,8", "=8"), "--run-dir", tmp_path / "runs")
    assert found.code == 1
    errors = [row["error"] for row in rows_of(tmp_path / "runs" / "results.csv")]
    assert errors == ["", "ValueError: no such luck"]
    assert "1 of them failed" in found.out


@pytest.mark.wide
def test_processes_give_the_same_table(equipoise, tmp_path):
    tables = []
    for jobs in (1, 2):
        folder = tmp_path / str(jobs)
        assert equipoise(WORDS, "--reproducible", "--jobs", jobs, "--run-dir", folder).code == 0
        tables.append([row | {"seconds": 0} for row in rows_of(folder / "results.csv")])
    assert tables[0] == tables[1]


def test_other_files_of_the_same_name_are_trained_on_anew(equipoise, people, tmp_path, monkeypatch):
    """An edited table or schema has results of its own, though no name in the settings differs."""
    for name in ("people.csv", "people.schema.toml", "held_out.csv"):
        (tmp_path / name).write_bytes((people.parent / name).read_bytes())
    trained, train = [], compare.train_in_memory
    monkeypatch.setattr(compare, "train_in_memory", lambda *given: trained.append(given[0]) or train(*given))
    words = f"sweep --data {tmp_path / 'people.csv'} --test {tmp_path / 'held_out.csv'} --batch-size 60"
    for edited, count in ((None, 1), (None, 1), ("people.csv", 2), ("people.schema.toml", 3)):
        if edited:
            (tmp_path / edited).write_bytes((tmp_path / edited).read_bytes() + b"\n")
        equipoise.ok(words, "--epochs", "1", "--grid", "epsilon=8", "--run-dir", tmp_path / "runs")
        assert len(trained) == count


SEARCH = (
    "search --data digits --subset 400 --batch-size 50 --epochs 1 --epsilon 3 --private-validation 0.2 "
    "--grid learning_rate=0.01,0.3,1 --grid clip_norm=0.3,1 --mean 3"
)


@pytest.fixture
def trials(monkeypatch):
    """What the runs of a search were given; a number to draw; and what befalls a run, by its number."""
    real = train.train_run

    class Trials(list):
        drawn = 3

    made = Trials()
    made.befalls = {}

    def noted(settings, console):
        made.append(settings)
        if (befallen := made.befalls.pop(len(made), None)) is not None:
            raise befallen
        return real(settings, console)

    monkeypatch.setattr(train, "train_run", noted)
    monkeypatch.setattr(PrivateSearch, "draw", lambda law: made.drawn)
    return made


def test_the_best_of_a_random_number_of_runs_is_kept_and_charged(equipoise, tmp_path, trials):
    """Stopped in its first and second run, it goes on with the number drawn; a run that fails is made."""
    folder = tmp_path / "search"
    trials.befalls = {1: KeyboardInterrupt(), 3: KeyboardInterrupt(), 4: ValueError("no such luck")}
    assert equipoise(SEARCH, "--run-dir", folder).code != 0
    trials.drawn = 7
    assert equipoise(SEARCH, "--run-dir", folder).code != 0
    found = equipoise(SEARCH, "--run-dir", folder, "--json").value
    assert len(trials) == 5
    assert 0.99 * 3 < found["epsilon"] <= 3
    assert found["statement"]["search"] == {"mean": 3.0, "shape": 1.0}
    assert all(one.epsilon < 2 for one in trials)
    assert sorted(path.name for path in folder.iterdir()) == ["chosen", "private"]
    assert not list((folder / "private").glob("run-*"))
    assert (folder / "private").stat().st_mode & 0o77 == 0
    assert equipoise("verify", folder / "chosen").code == 0
    assert f"{folder}/chosen" in equipoise.refused("predict", folder)
    again = equipoise(SEARCH, "--run-dir", folder, "--json").value  # it has ended
    assert (again["statement"], len(trials)) == (found["statement"], 5)
    other = equipoise(SEARCH.replace("--epsilon 3", "--epsilon 1"), "--run-dir", folder)
    assert (other.code, "holds a search with other settings" in other.err) == (2, True)


@pytest.mark.wide
def test_a_search_that_was_killed_at_its_charge_ends_as_it_should(equipoise, tmp_path, trials, monkeypatch):
    """Between the journal's line and the statement, and before the run gets its name."""
    folder = tmp_path / "search"
    for where in ("write_atomically", None):
        with monkeypatch.context() as kill:
            if where:
                kill.setattr(verify, where, lambda *args, **options: (_ for _ in ()).throw(KeyboardInterrupt))
            else:
                kill.setattr(Path, "rename", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
            assert equipoise(SEARCH, "--run-dir", folder).code != 0
    found = equipoise(SEARCH, "--run-dir", folder, "--json").value
    assert (found["epsilon"] <= 3, len(trials)) == (True, 3)
    assert equipoise("verify", folder / "chosen").code == 0
