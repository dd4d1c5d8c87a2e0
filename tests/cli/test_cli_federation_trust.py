"""verify and sign of a federation: edits of its headline are caught, by comparison or signature."""

import json
import re
import shutil

import pytest
import torch
from federated_problem import LOCAL_STEPS, RECORDS, ROUNDS, client, records, start

import equipoise as eq
from equipoise.app.federation.folder import verify_federation
from equipoise.federated import FedAvg, simulate
from equipoise.report.federation_page import _PUBLISHABLE, write_federation_report
from equipoise.statements import sign_run
from equipoise.statements.verify_federation import DISJOINT
from tests.cli.conftest import quietly, write_key

LINE = "federate --data digits --method dp-fedavg --clients 3 --rounds 2 --local-steps 1"


@pytest.fixture(scope="module")
def signed(tmp_path_factory):
    """A finished and signed federation that the tests only read: (folder, public key)."""
    place = tmp_path_factory.mktemp("federations")
    key, public = write_key(place)
    quietly(f"{LINE} --json --run-dir {place / 'run'}")
    quietly(f"sign {place / 'run'} --key {key} --json")
    return place / "run", public


@pytest.fixture
def run(signed, tmp_path):
    """A copy that a test may change, without what a stranger does not have."""
    without = shutil.ignore_patterns("private", "checkpoint", "server")
    return shutil.copytree(signed[0], tmp_path / "run", ignore=without)


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def read(run):
    return json.loads((run / "federation.json").read_text())


def headline(**values):
    return lambda run: change(run / "federation.json", **values)


def row(**values):
    def edit(run):
        first, *others = read(run)["clients"]
        change(run / "federation.json", clients=[first | values, *others])

    return edit


def drop_first(run):
    shutil.rmtree(run / "clients" / "000")
    change(run / "federation.json", clients=read(run)["clients"][1:])


def drop_last(run):
    """With the settings, as if there had never been a third client."""
    values = read(run)
    shutil.rmtree(run / "clients" / "002")
    clients = values["clients"][:2]
    worst = max(one["epsilon"] for one in clients)
    settings = values["settings"] | {"clients": 2}
    change(run / "federation.json", clients=clients, settings=settings, epsilon=worst)
    change(run / "settings.json", clients=2)


def copy_client(run):
    shutil.rmtree(run / "clients" / "001")
    shutil.copytree(run / "clients" / "002", run / "clients" / "001")
    populations = [one["population"] for one in read(run)["clients"]]
    assert len(set(populations)) == 1, "the population tells them apart already"


def better_accuracy(run):
    values, better = read(run), {"accuracy": 0.99}
    *others, last = values["rounds"]
    evaluation = values["evaluation"] | better
    change(run / "federation.json", **better, evaluation=evaluation, rounds=[*others, last | better])


def other_page(run):
    values = read(run)
    write_federation_report({**values, "test_records": 1}, run)


def append(name):
    def edit(run):
        with (run / name).open("ab") as file:
            file.write(b"\n")

    return edit


def stay_away(run):
    """As if the first client had never been picked."""
    shutil.rmtree(run / "clients" / "000")
    row(rounds=0, epsilon=0.0)(run)


def assumption_dropped(run):
    path = run / "clients" / "000" / "statement.json"
    change(path, assumptions=[t for t in json.loads(path.read_text())["assumptions"] if t != DISJOINT])


def unsign(run):
    for path in [run / "federation.sig.json", *run.glob("clients/*/statement.sig.json")]:
        path.unlink(missing_ok=True)


COMPARED = {
    "delta": (headline(delta=1e-9), "delta 1e-09, the statement of client 000 1e-05"),
    "guarantee": (headline(guarantee="worst_case"), "guarantee worst_case, its clients proven"),
    "private": (headline(private=False), "private False, the statement of client 000 True"),
    "relation": (headline(relation="replace_one"), "relation replace_one, the statement of client 000"),
    "accuracy": (headline(accuracy=0.99), "its last round"),
    "another score": (headline(evaluation={"f1": 0.99}), "says f1 0.99, its last round"),
    "rounds": (headline(rounds=[]), "each of the 2 rounds"),
    "epsilon": (headline(epsilon=0.1), "says epsilon 0.1, its clients"),
    "claim": (headline(epsilon_claimed=0.1), "epsilon_claimed 0.1, its clients None"),
    "claim of a client": (row(epsilon_claimed=0.1), "epsilon_claimed 0.1, its statement None"),
    "guarantee of a client": (row(guarantee="none"), "client 000: federation.json says guarantee none"),
    "population of a client": (row(population=10**6), "says population 1000000"),
    "first client dropped": (drop_first, "does not list each of the 3 clients"),
    "one client twice": (copy_client, "clients 001, 002: their statements are of one run"),
    "a client's assumption": (
        assumption_dropped, "client 000: its statement does not say that no person's records lie at several"
    ),
}  # fmt: skip
SIGNED = {
    "last client dropped": (drop_last, "clients/002/statement.sig.json"),
    "client never picked": (stay_away, "clients/000/statement.sig.json"),
    "accuracy everywhere": (better_accuracy, "federation.json"),
    "page": (other_page, "report.html"),
    "model": (append("model.safetensors"), "model.safetensors"),
    "settings": (append("settings.json"), "settings.json"),
    "command": (headline(command="equipoise federate"), "federation.json"),
}


def test_a_signed_federation_is_consistent_for_keeper_and_stranger(signed, run, equipoise):
    folder, public = signed
    for place in (folder, run):
        found = equipoise("verify", place, "--key", public, "--json")
        assert (found.code, found.value["problems"]) == (0, [])
    signature = json.loads((folder / "federation.sig.json").read_text())
    wanted = {"federation.json", "settings.json", "model.safetensors", "report.html"}
    clients = {f"clients/{name}/statement.sig.json" for name in ("000", "001", "002")}
    assert set(signature["files"]) == wanted | clients
    assert f"Signed by the key {found.value['signer']}" in equipoise("verify", run).out.replace("\n", "")
    (run / "model.safetensors").unlink()  # a published part may leave it out
    assert verify_federation(str(run), public).consistent


def test_what_the_page_lists_as_publishable_is_enough(signed, tmp_path, equipoise):
    """A copy of these files alone is verified and used; only its owner can go on with it."""
    folder, public = signed
    listed = [path for pattern in (*_PUBLISHABLE, "**/*.sig.json") for path in folder.glob(pattern)]
    page = (folder / "report.html").read_text()
    assert all(f"{pattern}</code>" in page for pattern in _PUBLISHABLE)
    place = tmp_path / "published"
    for path in listed:
        (place / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place / path.relative_to(folder))
    assert not (place / "settings.json").exists()
    verified = equipoise("verify", place, "--key", public, "--json")
    assert (verified.code, verified.value["problems"]) == (0, []), verified.err
    used = equipoise.ok("predict", place, "--json")
    assert used.value["accuracy"] == json.loads((folder / "federation.json").read_text())["accuracy"]
    assert equipoise("report", place, "--json").code == 0
    assert "holds no settings.json: it is the published part of a federation" in equipoise.refused(
        "resume", place, "--json"
    )
    over = equipoise(LINE, "--run-dir", place, "--json")
    assert (over.code, "Name a new folder" in over.value["error"]) == (2, True)


@pytest.mark.parametrize("name", COMPARED)
def test_edits_that_the_clients_statements_catch(signed, run, name):
    edit, words = COMPARED[name]
    unsign(run)
    edit(run)
    found = verify_federation(str(run))
    assert not found.consistent
    assert any(words in problem for problem in found.problems), found.problems


@pytest.mark.parametrize("name", ["delta", *SIGNED])
def test_edits_that_the_signature_catches(signed, run, name):
    edit, words = (COMPARED | SIGNED)[name]
    edit(run)
    found = verify_federation(str(run), signed[1])
    of_files = [problem for problem in found.problems if problem.startswith("files of the federation")]
    assert len(of_files) == 1
    if name in SIGNED:
        assert words in of_files[0]
        assert len(found.problems) == 1, "a comparison catches it too: it belongs in COMPARED"


def test_with_the_key_every_signature_must_be_there(signed, run):
    for gone in ("clients/001/statement.sig.json", "federation.sig.json"):
        content = (run / gone).read_text()
        (run / gone).unlink()
        assert not verify_federation(str(run), signed[1]).consistent
        (run / gone).write_text(content)
    assert verify_federation(str(run), signed[1]).consistent


def test_a_signature_of_a_run_or_of_another_key_is_not_the_federations(signed, run, equipoise, tmp_path):
    own = (run / "clients" / "000" / "statement.sig.json").read_text()
    (run / "federation.sig.json").write_text(own)
    assert any("federation.json" in text for text in verify_federation(str(run), signed[1]).problems)
    assert equipoise("sign", run, "--key", write_key(tmp_path, "other")[0], "--json").code == 0
    assert verify_federation(str(run)).consistent
    problems = verify_federation(str(run), signed[1]).problems
    assert any("not by the given one" in text for text in problems)


def test_what_is_not_consistent_is_not_signed(run, equipoise, tmp_path):
    unsign(run)
    headline(delta=1e-9)(run)
    key, _ = write_key(tmp_path)
    assert "not signed" in equipoise("sign", run, "--key", key, "--json").value["error"]
    assert not list(run.rglob("*.sig.json"))
    assert equipoise("sign", run, "--key", key, "--ledger", key, "--json").code == 2


DAMAGED = [
    ([1], "verify RUN", "federation.json holds a list, not a JSON object. Restore the file"),
    ({"settings": 5}, "report RUN", "federation.json hold values of another kind .* Restore the files"),
    ({"settings": 5}, "predict RUN --data digits", "federation.json holds no settings. Restore it"),
    ({"settings": {"data": 5}}, "predict RUN", "federation.json: --data is 5, but it must be"),
    ({"rounds": 5}, "verify RUN", "federation.json or a client's statement hold .* Restore the files"),
]


def test_a_published_part_that_is_damaged_is_refused_with_file_reason_and_remedy(run, equipoise):
    (run / "settings.json").unlink()
    path = run / "federation.json"
    good = json.loads(path.read_text())
    for values, line, message in DAMAGED:
        path.write_text(json.dumps(values if isinstance(values, list) else good | values))
        found = equipoise(f"{line.replace('RUN', str(run))} --json")
        assert found.code == 2
        assert re.search(message, found.value["error"])


@pytest.fixture(scope="module")
def consortium(tmp_path_factory):
    """A server's folder and three sites: two signed by keys of their own, one late and unsigned."""
    place, late, sites = tmp_path_factory.mktemp("consortium"), {1: [0, 1]}, []
    for number in range(3):
        users = eq.Users(torch.arange(RECORDS) // 2, records_per_user=2)
        data = eq.Data(records(number), score=eq.Score("accuracy", share=0.3))
        common = {
            "sampling": eq.Poisson(7, 42, ROUNDS * LOCAL_STEPS), "reproducible": False, "data": data,
            "budget": eq.Budget(8.0, 1e-3), "unit": users if number else "record",
        }  # fmt: skip
        sites.append(client(eq.DPSGD(clip_norm=0.5), folder=place / f"site-{number}", **common))
    options = {"folder": place / "server", "score_every": 1, "members": lambda r: late.get(r, range(3))}
    simulate(FedAvg(), sites, start(), ROUNDS, **options)
    for number, one in enumerate(sites):
        one.finish()
        if number < 2:
            sign_run(place / f"site-{number}", write_key(place, f"key-{number}")[0])
    return place


def gathered(equipoise, place, sites=(0, 1), keys=(0, 1), code=0):
    words = [place / f"site-{number}" for number in sites]
    for number in keys:
        words += ["--key", place / f"key-{number}.pub"]
    found = equipoise("report", *words, "--federation", place / "server", "--json")
    assert found.code == code, found.err
    return found


def test_the_statements_of_sites_become_one_report(consortium, tmp_path, equipoise):
    """The folder then verifies and is signed by whoever gathered it."""
    place = shutil.copytree(consortium, tmp_path / "consortium")
    values = gathered(equipoise, place, (0, 1, 2), ()).value
    assert [one["rounds"] for one in values["clients"]] == [ROUNDS, ROUNDS, ROUNDS - 1]
    assert [one["site"] for one in values["clients"]] == ["site-0", "site-1", "site-2"]
    assert values["epsilon"] == max(one["epsilon"] for one in values["clients"])
    for number, one in enumerate(values["clients"]):
        text = (place / f"site-{number}" / "statement.json").read_text()
        assert one["epsilon"] == json.loads(text)["epsilon"]
    page = (place / "server" / "report.html").read_text()
    assert all(f"site-{number}" in page for number in range(3))
    assert "one record or user at one client" in page
    signatures = sorted((place / "server" / "clients").glob("*/statement.sig.json"))
    assert [path.parent.name for path in signatures] == ["000", "001"]
    assert equipoise("verify", place / "server").code == 0
    equipoise("sign", place / "server", "--key", write_key(place, "own")[0])
    pem = [(place / f"{name}.pub").read_bytes() for name in ("key-0", "key-1", "own")]
    (place / "all.pub").write_bytes(b"".join(pem))
    found = equipoise("verify", place / "server", "--key", place / "all.pub")
    assert "client 002" in found.out + found.err  # which nobody signed


def test_each_site_is_verified_under_its_own_key(consortium, tmp_path, equipoise):
    place = shutil.copytree(consortium, tmp_path / "consortium")
    values = gathered(equipoise, place).value
    assert values["epsilon"] is None  # the third took part, and its statement is not here
    signers = [one.get("signer") for one in values["clients"]]
    assert len(set(signers)) == 3
    assert all(signers[:2])
    assert "client 002: took part in 2 rounds" in equipoise("verify", place / "server").out
    for sites, keys in (((0, 1), (1, 0)), ((0, 1, 2), (0,)), ((0, 0), ()), ((0, 1), (0, 1, 1))):
        found = gathered(equipoise, place, sites, keys, code=2)
        assert "so no page was made" in found.err or "keys are given" in found.err
