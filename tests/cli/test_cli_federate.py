"""equipoise federate: several owners from one command, its report, and going on after a kill."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import dp_accounting
import pytest

SMALL = "federate --method adaptdp-fedavg --data digits --clients 3 --rounds 3 --local-steps 2"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished federation, shared by the tests that only read it: (folder, JSON answer).

    Beside it, in `trained`, is what a kill leaves when all rounds are over and no client has finished yet.
    """
    import contextlib
    import io

    from equipoise.app.federation import run
    from equipoise.cli import main

    folder, out = tmp_path_factory.mktemp("runs") / "three", io.StringIO()
    client_values = run._client_values

    def copying(*given):
        if not (folder.parent / "trained").exists():
            shutil.copytree(folder, folder.parent / "trained")
        return client_values(*given)

    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(io.StringIO()),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(run, "_client_values", copying)
        assert main(f"{SMALL} --partition dirichlet --run-dir {folder} --json".split()) == 0
    return folder, json.loads(out.getvalue())


@pytest.mark.parametrize("method", ["fedavg:dp-sgd --hardened", "fedpcdp --public-records 100"])
def test_a_dry_run_says_what_a_client_would_do_and_spends_nothing(equipoise, tmp_path, monkeypatch, method):
    monkeypatch.chdir(tmp_path)
    found = equipoise(f"{SMALL} --clients-per-round 2 --epsilon 4 --dry-run --json --method {method}")
    assert found.code == 0, found.err
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
    from equipoise.federated import Client

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
    assert {**again.value, "seconds": 0, "run_dir": 0, "report": 0} == {
        **found, "seconds": 0, "run_dir": 0, "report": 0,
    }  # fmt: skip
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
    copied = tmp_path / "copied"
    shutil.copytree(folder.parent / "trained", copied)
    before = {path: path.read_bytes() for path in (copied / "clients").rglob("journal.jsonl")}
    for path in copied.glob("server/checkpoint/step-*.pt"):
        if not path.stem.endswith("2"):
            path.unlink()
    again = equipoise("resume", copied, "--json")
    assert again.code == 0, again.err
    assert again.value["rounds"] == found["rounds"]
    assert again.value["epsilon"] == found["epsilon"]
    lines = {path: path.read_bytes() for path in before}
    assert all(lines[path].startswith(old) for path, old in before.items())
    assert all(b'"close"' in lines[path][len(old) :] for path, old in before.items())  # and no release
    assert all(lines[path][len(old) :].count(b"\n") == 1 for path, old in before.items())
    (copied / "settings.json").write_text("{")
    damaged = equipoise("resume", copied, "--json")
    assert damaged.code != 0
    assert "settings.json is damaged" in damaged.value["error"]
    assert equipoise("resume", folder, "--device", "cpu", "--json").code == 2


def test_ctrl_c_says_how_to_go_on(tmp_path, equipoise, monkeypatch):
    from equipoise.app.federation import run

    def interrupted(*given):
        raise KeyboardInterrupt

    folder, words = tmp_path / "cut", QUICK.replace("rounds 1", "rounds 3")
    with monkeypatch.context() as patch:
        patch.setattr(run.Federation, "rehearse", interrupted)
        early = equipoise(f"{words} --run-dir", folder)
        assert (early.code, early.err, folder.exists()) == (
            130,
            "equipoise: stopped; nothing was begun\n",
            False,
        )
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
    folder, found = finished
    copied = shutil.copytree(folder.parent / "trained", tmp_path / "copied")
    for path in copied.glob("server/checkpoint/step-*.pt"):
        if not path.stem.endswith("2"):
            path.unlink()
    journal = copied / "clients" / "001" / "private" / "journal.jsonl"
    journal.write_bytes(b"torn\n" + journal.read_bytes())
    answer = equipoise("resume", copied, "--json")
    assert answer.code == 0, answer.err
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
    values = json.loads((copied / "federation.json").read_text())
    (copied / "federation.json").write_text(json.dumps({**values, "epsilon": 0.1}))
    assert equipoise("verify", copied).code == 1
    statement = copied / "clients" / "001" / "statement.json"
    statement.write_text(json.dumps({**json.loads(statement.read_text()), "epsilon": 0.5}))
    answer = equipoise("verify", copied)
    assert answer.code == 1
    assert "client 001: epsilon 0.5000, NOT CONSISTENT" in answer.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--method baselines.moon:Moon", "is no federated method"),
        ("--method fedpcdp", "--public-records"),
        ("--method dp-fedavg --option tau=1", "is not an option of"),
        ("--method dp-fedavg-quantile --recipe as-published", "has only library"),
        ("--clients-per-round 4", "there are 3 clients"),
        ("--batch-size 5000", "--batch-size"),
        ("--clip-norm quantile", "takes a number"),
    ],
)
def test_slips_are_named(tmp_path, equipoise, words, message):
    answer = equipoise(f"{SMALL} {words} --json --run-dir", tmp_path / "a")
    assert answer.code == 2
    assert message in answer.value["error"]
    assert not (tmp_path / "a").exists()


@pytest.mark.slow
def test_killed_and_gone_on_with(tmp_path):
    """SIGKILL in the middle of the rounds, three times; the model is that of an undisturbed federation."""
    command = [sys.executable, "-m", "equipoise", *SMALL.replace("rounds 3", "rounds 8").split()]
    command += ["--method", "dp-fedavg", "--reproducible", "--json", "--run-dir"]
    quiet: dict = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    whole = json.loads(subprocess.run([*command, tmp_path / "whole"], check=True, **quiet).stdout)
    folder = tmp_path / "killed"
    for least in (1, 3, 6):
        process = subprocess.Popen([*command, folder], **quiet)
        while process.poll() is None and newest(folder) < least:
            time.sleep(0.01)
        time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
    found = json.loads(subprocess.run([*command, folder], check=True, **quiet).stdout)
    assert [row["round"] for row in found["rounds"]] == list(range(1, 9))
    assert found["epsilon"] == whole["epsilon"]
    assert found["clients"] == whole["clients"]
    assert found["accuracy"] == pytest.approx(whole["accuracy"], abs=0.02)


def newest(folder: Path) -> int:
    """The last round that the server has on disk."""
    return max(
        (int(path.stem.split("-")[1]) for path in folder.glob("server/checkpoint/step-*.pt")), default=0
    )


QUICK = "federate --method adaptdp-fedavg --data digits --subset 300 --clients 2 --rounds 1 --local-steps 1"


def test_settings_that_cannot_be_used_begin_no_folder(tmp_path, equipoise):
    for wrong in ("--option tau=-1", "--recipe as_published --epsilon 0.01"):
        refused = equipoise(f"{QUICK} {wrong} --json --run-dir", tmp_path / "run")
        assert refused.code != 0
        assert not (tmp_path / "run").exists()
    assert equipoise(f"{QUICK} --json --run-dir", tmp_path / "run").code == 0


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


@pytest.mark.parametrize("method", ["fedpcdp", "fedpdp"])
def test_a_federation_in_a_subspace_as_published(tmp_path, equipoise, method):
    own = "--option public_batch_size=10 --option server_rate=0.5 --option dimension=5"
    words = f"{QUICK} --method {method} --recipe as_published --public-records 20 {own} --json --run-dir"
    assert equipoise(words, tmp_path / "run").code == 0
    statement = json.loads((tmp_path / "run" / "clients" / "000" / "statement.json").read_text())
    assert statement["recipe"] == "as_published"
    assert statement["releases"][0]["max_bound"] == 0.01


HOSPITALS = """population = 900
target = "buys"
[columns.wage]
type = "number"
low = 0
high = 100
[columns.buys]
type = "category"
values = ["no", "yes"]
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
    found = equipoise(of_hospitals(hospitals, f"{own} --run-dir {folder}"))
    assert found.code == 0, found.err
    assert [row["asked"] for row in found.value["rounds"]] == [2, 3, 3, 2]
    for row, client in zip(planned, found.value["clients"], strict=True):
        assert {name: client[name] for name in ("site", "population", "rounds")} == {
            name: row[name] for name in ("site", "population", "rounds")
        }
        step = dp_accounting.PoissonSampledDpEvent(
            0.1, dp_accounting.GaussianDpEvent(row["noise_multiplier"])
        )
        event = dp_accounting.SelfComposedDpEvent(step, 2 * row["rounds"])
        exact = dp_accounting.pld.PLDAccountant().compose(event).get_epsilon(1e-4)
        assert client["epsilon"] == pytest.approx(row["epsilon"])
        assert client["epsilon"] == pytest.approx(exact, rel=2e-3)
    assert 7.9 < found.value["clients"][2]["epsilon"] <= 8
    assert equipoise("verify", folder).code == 0
    assert "kiel" in (folder / "report.html").read_text()
    assert "--site kiel.epsilon=8" in found.value["command"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--site-column hospital --site ulm.population=900", "a row has another owner"),
        (f"--site-column hospital {SITES} --site hof.population=9", "a named owner has no row"),
        ("--site-column hospital --site ulm.epsilon=3", "--site ulm.population is missing"),
        (f"--site-column hospital {SITES} --partition shards", "no --partition"),
        ("--site 12.epsilon=3", "the owners are 0 to 9"),
        ("--site 3.population=30", "follow from --partition"),
        ("--site 3.first=1.5", "3.first=1.5"),
        ("--site 3.epsilon=-1", "a number above zero"),
    ],
)
def test_slips_of_owners_are_named(hospitals, equipoise, words, message):
    found = equipoise(of_hospitals(hospitals, f"{words} --dry-run"))
    assert (found.code, message in " ".join(found.err.split())) == (2, True), found.err
