"""equipoise federate: several owners from one command, its report, and going on after a kill."""

import json
import random
import shutil

import dp_accounting
import pytest

from equipoise.app.federation import run
from equipoise.federated import Client
from tests.cli.conftest import quietly

SMALL = "federate --method adaptdp-fedavg --data digits --clients 3 --rounds 3 --local-steps 2"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished federation, shared by the tests that only read it: (folder, JSON answer).

    Beside it, in `trained`, is what a kill leaves when all rounds are over and no client has finished yet.
    """
    folder, client_values = tmp_path_factory.mktemp("runs") / "three", run._client_values

    def copying(*given):
        if not (folder.parent / "trained").exists():
            shutil.copytree(folder, folder.parent / "trained")
        return client_values(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "_client_values", copying)
        return folder, quietly(f"{SMALL} --partition dirichlet --run-dir {folder} --json")


def set_back(finished, to):
    """The federation as a kill leaves it, its server a round behind."""
    shutil.copytree(finished[0].parent / "trained", to)
    for path in to.glob("server/checkpoint/step-*.pt"):
        if not path.stem.endswith("2"):
            path.unlink()
    return to


@pytest.mark.parametrize("method", ["fedavg:dp-sgd --hardened", "fedpcdp --public-records 100"])
def test_a_dry_run_says_what_a_client_would_do_and_spends_nothing(equipoise, tmp_path, monkeypatch, method):
    monkeypatch.chdir(tmp_path)
    found = equipoise.ok(f"{SMALL} --clients-per-round 2 --epsilon 4 --dry-run --json --method {method}")
    value = found.value
    assert (value["dry_run"], value["client"]) == (True, 0)
    assert (value["steps"], value["guarantee"], value["private"]) == (4, "proven", True)
    assert 3.5 < value["epsilon"] <= 4
    assert all(noise > 0 for noise in value["noise_multipliers"].values())
    assert value["settings"]["rounds"] == 3
    assert "The busiest client, number 0, takes part in 2 of the 3 rounds:" in found.err
    assert "nothing spent" in found.err
    assert list(tmp_path.iterdir()) == []


def keys(folder):
    """The clients whose keys lie in the folder of a federation."""
    return sorted(path.parts[-3] for path in folder.glob("clients/*/private/key"))


def test_the_keys_go_when_all_rounds_are_over_also_after_a_kill(finished, tmp_path, equipoise, monkeypatch):
    """A kill before the first deletion, and one between the first and the second."""
    folder, found = finished
    assert keys(folder) == []
    copied = shutil.copytree(folder.parent / "trained", tmp_path / "copied")
    assert keys(copied) == ["000", "001", "002"]
    finish = Client.finish

    def die(self):
        if keys(copied) == ["001", "002"]:
            raise RuntimeError("killed")
        return finish(self)

    with monkeypatch.context() as patch:
        patch.setattr(Client, "finish", die)
        killed = equipoise("resume", copied, "--json")
    assert (killed.code, "RuntimeError: killed" in killed.err) == (70, True)
    assert keys(copied) == ["001", "002"]
    again = equipoise("resume", copied, "--json")
    assert (again.code, keys(copied)) == (0, [])
    other = {"seconds": 0, "run_dir": 0, "report": 0}
    assert {**again.value, **other} == {**found, **other}
    assert equipoise("verify", copied).code == 0


def test_the_same_command_again_has_nothing_left_to_do(finished, equipoise):
    folder, found = finished
    answer = equipoise(f"{SMALL} --partition dirichlet --json --run-dir", folder)
    assert (answer.code, answer.value["rounds"]) == (0, found["rounds"])
    other = equipoise(f"{SMALL} --partition dirichlet --epsilon 5 --json --run-dir", folder)
    assert (other.code, "epsilon" in other.value["error"]) == (2, True)


def test_resume_goes_on_with_a_federation(finished, tmp_path, equipoise):
    """A server set back by a round, as after a kill: clients answer again, and nothing is charged twice."""
    folder, found = finished
    copied = set_back(finished, tmp_path / "copied")
    before = {path: path.read_bytes() for path in (copied / "clients").rglob("journal.jsonl")}
    again = equipoise.ok("resume", copied, "--json")
    assert (again.value["rounds"], again.value["epsilon"]) == (found["rounds"], found["epsilon"])
    for path, old in before.items():
        assert path.read_bytes().startswith(old)
        added = path.read_bytes()[len(old) :]
        assert (b'"close"' in added, added.count(b"\n")) == (True, 1)  # and no release
    (copied / "settings.json").write_text("{")
    assert "settings.json is damaged" in equipoise("resume", copied, "--json").value["error"]
    assert equipoise("resume", folder, "--device", "cpu", "--json").code == 2


def test_ctrl_c_says_how_to_go_on(tmp_path, equipoise, monkeypatch):
    def interrupted(*given):
        raise KeyboardInterrupt

    folder, words = tmp_path / "cut", QUICK.replace("rounds 1", "rounds 3")
    with monkeypatch.context() as patch:
        patch.setattr(run.Federation, "rehearse", interrupted)
        early = equipoise(f"{words} --run-dir", folder)
        assert (early.code, folder.exists()) == (130, False)
        assert early.err == "equipoise: stopped; nothing was begun\n"
    run_rounds, command = run._run_rounds, f"equipoise resume {folder}"

    def in_a_round(*given):
        return run_rounds(*given[:-1], interrupted)

    with monkeypatch.context() as patch:
        patch.setattr(run, "_run_rounds", in_a_round)
        cut = equipoise(f"{words} --run-dir", folder)
        assert cut.code == 130
        assert cut.err.endswith(f"equipoise: stopped; go on with: {command}\n")
        assert command in equipoise("resume", folder, "--json").value["error"]
    assert equipoise("resume", folder, "--json").code == 0


def test_a_client_with_a_damaged_journal_drops_out_and_has_no_statement(finished, tmp_path, equipoise):
    _, found = finished
    copied = set_back(finished, tmp_path / "copied")
    journal = copied / "clients" / "001" / "private" / "journal.jsonl"
    journal.write_bytes(b"torn\n" + journal.read_bytes())
    answer = equipoise.ok("resume", copied, "--json")
    assert [row["answered"] for row in answer.value["rounds"]] == [3, 3, 2]
    assert answer.value["rounds"][2]["absent"]["1"].startswith("JournalError: the client's ledger or folder")
    assert [one["epsilon"] for one in answer.value["clients"]] == [
        one["epsilon"] if one["client"] != 1 else None for one in found["clients"]
    ]
    assert (answer.value["epsilon"], answer.value["guarantee"]) == (None, "none")
    assert "round 3, client 1: JournalError" in (copied / "report.html").read_text()
    verified = equipoise("verify", copied)
    assert verified.code == 1
    assert "client 001: took part in 2 rounds and has no statement" in verified.out
    assert keys(copied) == ["001"]  # it can be mended from a copy


def test_verify_report_and_predict_take_the_folder_of_a_federation(finished, tmp_path, equipoise):
    folder, found = finished
    verified = equipoise("verify", folder, "--json")
    assert (verified.code, verified.value["consistent"]) == (0, True)
    assert {name: one["epsilon"] for name, one in verified.value["clients"].items()} == {
        f"{one['client']:03d}": one["epsilon"] for one in found["clients"]
    }
    assert equipoise("predict", folder, "--json").value["accuracy"] == found["accuracy"]
    copied = shutil.copytree(folder, tmp_path / "copied")
    (copied / "report.html").unlink()
    assert equipoise("report", copied, "--json").value["epsilon"] == found["epsilon"]
    assert (copied / "report.html").is_file()
    said = equipoise("verify", copied).out
    assert said.count("consistent with its journal") == 3
    assert "The federation is consistent: 3 clients" in said
    statement = copied / "clients" / "001" / "statement.json"
    statement.write_text(json.dumps({**json.loads(statement.read_text()), "epsilon": 0.5}))
    answer = equipoise("verify", copied)
    assert answer.code == 1
    assert "client 001: epsilon 0.5000, NOT CONSISTENT" in answer.out


QUICK = "federate --method adaptdp-fedavg --data digits --subset 300 --clients 2 --rounds 1 --local-steps 1"


@pytest.mark.parametrize("method", ["adaptdp-fedavg", "dp-fedavg"])
def test_the_published_claim_and_the_owners_are_explained(tmp_path, equipoise, method):
    words = f"{QUICK} --method {method} --recipe as_published --json --run-dir"
    found = equipoise(words, tmp_path / "run").value
    assert found["epsilon"] < found["epsilon_claimed"] == pytest.approx(3.0, rel=1e-6)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "The publication claims ε = 3" in page
    assert "the epsilons of these owners add up" in page
    statement = json.loads((tmp_path / "run" / "clients" / "000" / "statement.json").read_text())
    words = "; ".join(statement["assumptions"])
    assert "Poisson sampling and add-or-remove-one neighbours" in words
    assert "the epsilons of these owners add up" in words
    assert equipoise("verify", tmp_path / "run").code == 0


def test_a_federation_in_a_subspace_as_published(tmp_path, equipoise):
    own = "--option public_batch_size=10 --option server_rate=0.5 --option dimension=5"
    words = f"{QUICK} --method fedpcdp --recipe as_published --public-records 20 {own} --json --run-dir"
    equipoise.ok(words, tmp_path / "run")
    statement = json.loads((tmp_path / "run" / "clients" / "000" / "statement.json").read_text())
    assert (statement["recipe"], statement["releases"][0]["max_bound"]) == ("as_published", 0.01)


HOSPITALS = """population = 900
target = "buys"
[columns]
wage = {type = "number", low = 0, high = 100}
buys = {type = "category", values = ["no", "yes"]}
"""
SIZES = {"ulm": 200, "bonn": 500, "kiel": 200}
SITES = " ".join(f"--site {name}.population={size}" for name, size in SIZES.items())


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory):
    """Rows of three hospitals in one table, and public ones to evaluate on."""
    folder, rng = tmp_path_factory.mktemp("hospitals"), random.Random(0)
    for name, sizes in (("rows", SIZES), ("test", {"ulm": 200})):
        rows = [(rng.uniform(0, 100), site) for site, size in sizes.items() for _ in range(size)]
        lines = [f"{wage:.2f},{site},{['no', 'yes'][wage > 50]}" for wage, site in rows]
        (folder / f"{name}.csv").write_text("\n".join(["wage,hospital,buys", *lines]))
    (folder / "rows.schema.toml").write_text(HOSPITALS)
    return folder


def of_hospitals(hospitals, words):
    table = f"federate --data {hospitals}/rows.csv --test {hospitals}/test.csv --rounds 4 --local-steps 2"
    return f"{table} --json --delta 1e-4 {words}"


def test_owners_of_a_column_have_a_budget_size_and_time_of_their_own(hospitals, tmp_path, equipoise):
    """A row of the dry run for each; the statements are of these budgets, and dp_accounting's epsilons."""
    own = f"--site-column hospital {SITES} --site kiel.epsilon=8 --site kiel.first=2 --site ulm.last=3"
    planned = equipoise(of_hospitals(hospitals, f"{own} --dry-run")).value["clients"]
    assert [(row["site"], row["population"], row["rounds"]) for row in planned] == [
        ("ulm", 200, 3), ("bonn", 500, 4), ("kiel", 200, 3),
    ]  # fmt: skip
    folder = tmp_path / "run"
    found = equipoise.ok(of_hospitals(hospitals, f"{own} --run-dir {folder}"))
    assert [row["asked"] for row in found.value["rounds"]] == [2, 3, 3, 2]
    for row, client in zip(planned, found.value["clients"], strict=True):
        assert all(client[name] == row[name] for name in ("site", "population", "rounds"))
        noise = dp_accounting.GaussianDpEvent(row["noise_multiplier"])
        accountant = dp_accounting.pld.PLDAccountant()
        accountant.compose(dp_accounting.PoissonSampledDpEvent(0.1, noise), 2 * row["rounds"])
        exact = accountant.get_epsilon(1e-4)
        assert client["epsilon"] == pytest.approx(row["epsilon"])
        assert client["epsilon"] == pytest.approx(exact, rel=2e-3)
    assert 7.9 < found.value["clients"][2]["epsilon"] <= 8
    assert equipoise("verify", folder).code == 0
    assert "kiel" in (folder / "report.html").read_text()
    assert "--site kiel.epsilon=8" in found.value["command"]


def test_later_rounds_code_rows_as_the_first(hospitals, tmp_path, equipoise, monkeypatch):
    def interrupted(*given):
        raise KeyboardInterrupt

    table, folder = tmp_path / "tables", tmp_path / "run"
    shutil.copytree(hospitals, table)
    with monkeypatch.context() as patch:
        patch.setattr(run, "_run_rounds", interrupted)
        assert equipoise(of_hospitals(table, f"--clients 2 --run-dir {folder}")).code == 130
    (table / "rows.schema.toml").write_text(HOSPITALS.replace('"no", "yes"', '"yes", "no"'))
    run.federation.cache_clear()  # as another process
    found = equipoise.ok("resume --json", folder).value
    assert found["schema"]["columns"]["buys"]["values"] == ["no", "yes"]


SLIPS = {
    "--site-column hospital --site ulm.population=900": "a row has another owner",
    f"--site-column hospital {SITES} --site hof.population=9": "a named owner has no row",
    "--site-column hospital --site ulm.epsilon=3": "--site ulm.population is missing",
    f"--site-column hospital {SITES} --partition shards": "no --partition",
    "--site 12.epsilon=3": "the owners are 0 to 9",
    "--site 3.population=30": "follow from --partition",
    "--site 3.first=1.5": "3.first=1.5",
    "--site 3.epsilon=-1": "a number above zero",
}


def test_slips_of_owners_are_named(hospitals, equipoise):
    for words, message in SLIPS.items():
        found = equipoise(of_hospitals(hospitals, f"{words} --dry-run"))
        assert (found.code, message in " ".join(found.err.split())) == (2, True), found.err
