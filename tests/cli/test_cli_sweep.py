import csv

import pytest

from equipoise.app import compare

WORDS = "sweep --data digits --subset 200 --batch-size 50 --epochs 1 --grid seed=0,1 --grid epsilon=1,8"


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_grid_is_trained_once_and_goes_on(equipoise, tmp_path, monkeypatch):
    """A row per combination in the order of the grid; what is there is not trained again."""
    found = equipoise(WORDS, "--run-dir", tmp_path / "runs", "--json")
    assert found.code == 0, found.err
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
        if settings.seed:
            raise ValueError("no such luck")
        return real(settings, *given)

    real = compare.train_in_memory
    monkeypatch.setattr(compare, "train_in_memory", train)
    found = equipoise(WORDS.replace("=1,8", "=8"), "--run-dir", tmp_path / "runs")
    assert found.code == 1
    assert [row["error"] for row in rows_of(tmp_path / "runs" / "results.csv")] == [
        "",
        "ValueError: no such luck",
    ]
    assert "1 of them failed" in found.out


@pytest.mark.wide
def test_processes_give_the_same_table(equipoise, tmp_path):
    tables = []
    for jobs in (1, 2):
        folder = tmp_path / str(jobs)
        assert equipoise(WORDS, "--reproducible", "--jobs", jobs, "--run-dir", folder).code == 0
        tables.append(
            [{k: v for k, v in row.items() if k != "seconds"} for row in rows_of(folder / "results.csv")]
        )
    assert tables[0] == tables[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "--grid is missing"),
        ("--grid data=digits,mnist", "data is shared by all runs"),
        ("--grid epsilon=1 --grid epsilon=2", "epsilon is there twice"),
        ("--grid epsilon=1,none", "--epsilon is"),
        ("--grid epsilon", "NAME=VALUE"),
        ("--grid no_such=1,2", "no_such"),
        ("--grid seed=0,1 --secret-seed README.md", "the same noise and sampling"),
    ],
)
def test_slips_are_answered_before_anything_is_trained(equipoise, tmp_path, words, said):
    found = equipoise(f"sweep --data digits {words}", "--run-dir", tmp_path / "runs")
    assert found.code == 2
    assert said in found.err


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
        found = equipoise(words, "--epochs", "1", "--grid", "epsilon=8", "--run-dir", tmp_path / "runs")
        assert found.code == 0, found.out
        assert len(trained) == count
