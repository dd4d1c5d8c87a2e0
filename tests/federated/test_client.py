"""A client: its ledger holds what left, whatever the server does and whenever the process dies."""

import json
import math
import shutil

import pytest
import torch
from federated_problem import (
    FEATURES,
    LOCAL_STEPS,
    RECORDS,
    ROUNDS,
    ask,
    central,
    charges,
    client,
    follower,
    records,
    same,
    start,
    train,
)

import equipoise as eq
from equipoise._run_files import RunFolderError
from equipoise.federated import FedAvg, Refused, Reply, Request
from equipoise.federated.methods.server_radius import SQUARES
from equipoise.federated.round_protocol import RoundProtocol
from equipoise.methods.named_tensors import copied
from equipoise.privacy import BudgetError, Journal, Ledger, Secrets
from equipoise.statements import Statement
from equipoise.statements.verify import verify_run
from equipoise.training.folder.checkpoint import Checkpoints
from tests.methods.table import EXAMPLES


class SentElsewhere(RoundProtocol, eq.DPSGD):
    def reply(self, state, start, end):
        return Reply({})


def rounds_of(one, params, count=ROUNDS):
    for number in range(1, count + 1):
        params = train(one, number, params)
    return params


def test_one_client_is_centralised_training_bit_for_bit():
    for method, sampling in (
        (eq.methods.ClipSGD(clip_norm=math.inf), eq.FullBatch(RECORDS, 4)),
        (eq.DPSGD(clip_norm=0.5, noise_multiplier=1.0), eq.Poisson(20, RECORDS, 4)),
    ):
        _, expected = central(method, sampling)
        for steps in (1, 2):
            one = client(method, sampling=sampling, local_steps=steps)
            assert same(rounds_of(one, start(), 4 // steps), expected)


def test_a_server_that_asks_again_and_again_learns_one_number_a_round():
    one = client(follower())
    first = ask(one, 1, start(), 0.25)
    assert ask(one, 1, start(), 0.25) == first
    assert charges(one) == 1
    moved = {name: value + 0.1 for name, value in start().items()}
    for params, limit in ((start(), 0.1), (moved, 0.25)):
        with pytest.raises(Refused, match="answered once"):
            ask(one, 1, params, limit)
    assert charges(one) == 1
    train(one, 1, start(), clip_norm=1e-9)  # extreme, and harmless: the noise shrinks with it
    assert charges(one) == 1 + LOCAL_STEPS
    with pytest.raises(Refused, match="answered once"):
        ask(one, 1, moved, 0.25)
    assert ask(one, 2, moved, 0.25) != first
    with pytest.raises(Refused, match="gone on to round 2"):
        train(one, 1, start(), clip_norm=1e-9)
    assert charges(one) == 2 + LOCAL_STEPS


@pytest.mark.parametrize("reproducible", [True, False])
@pytest.mark.parametrize("lost", ["before the checkpoint", "in the middle", "after the query"])
def test_killed_in_a_round(tmp_path, monkeypatch, lost, reproducible):
    """Whatever had left the ledger is given again, with the same noise, and nothing is charged twice.

    Without a public seed there is no run to compare with: the reference is what the client had computed.
    """
    options = {"folder": tmp_path / "a", "reproducible": reproducible}
    one = client(follower(), **options)
    known = {}
    if reproducible:
        reference = client(follower())
        known = {"asked": ask(reference, 1, start(), 0.25)}
        known["trained"] = train(reference, 1, start(), clip_norm=0.2)

    def die(*args, **kwargs):
        raise SystemExit

    if lost == "after the query":  # the answer is in the ledger, not yet in the log
        monkeypatch.setattr(
            one._log, "write", lambda entry: known.update(asked=entry["reports"][SQUARES]) or die()
        )
        with pytest.raises(SystemExit):
            ask(one, 1, start(), 0.25)
    else:
        asked = ask(one, 1, start(), 0.25)
        assert known.setdefault("asked", asked) == asked
        if lost == "before the checkpoint":
            monkeypatch.setattr(one.training, "save_checkpoint", die)
            with pytest.raises(SystemExit):
                train(one, 1, start(), clip_norm=0.2)
            known.setdefault("trained", copied(one.training.parameters))
        else:
            kill_after_a_step(one, monkeypatch, lambda: train(one, 1, start(), clip_norm=0.2))
    one.close()
    again = client(follower(), **options)
    assert ask(again, 1, start(), 0.25) == known["asked"]
    trained = train(again, 1, start(), clip_norm=0.2)
    assert same(trained, known.get("trained", trained))
    assert same(train(again, 1, start(), clip_norm=0.2), trained)
    assert charges(again) == 1 + LOCAL_STEPS


@pytest.mark.parametrize(("repeats_query", "reproducible"), [(True, False), (False, False), (False, True)])
def test_killed_in_a_round_whose_scale_is_another(tmp_path, monkeypatch, repeats_query, reproducible):
    """A query moves U, and a restart answers it from the log: the steps that follow are not charged anew."""
    options = {"folder": tmp_path, "reproducible": reproducible}
    one = client(follower(), **options)
    ask(one, 1, start(), 0.25)
    params = train(one, 1, start(), clip_norm=0.2)
    asked = ask(one, 2, params, 0.04)
    kill_after_a_step(one, monkeypatch, lambda: train(one, 2, params, clip_norm=0.1))
    again = client(follower(), **options)
    if repeats_query:
        assert ask(again, 2, params, 0.04) == asked
    ended = train(again, 2, params, clip_norm=0.1)
    assert charges(again) == 2 * (1 + LOCAL_STEPS)
    ask(again, 3, ended, 0.01)
    train(again, 3, ended, clip_norm=0.05)
    assert charges(again) == ROUNDS * (1 + LOCAL_STEPS)


def kill_after_a_step(one, monkeypatch, request):
    """The request is killed when the client has taken one step; the folder is free again."""
    step, taken = one.training.take_step, []

    def die():
        raise SystemExit

    monkeypatch.setattr(one.training, "take_step", lambda: die() if taken else taken.append(step()))
    with pytest.raises(SystemExit):
        request()
    one.close()


STARTS = {
    "before the key": (Secrets, "__init__"),
    "before the journal's head": (Journal, "append"),
    "before the checkpoint": (Checkpoints, "save"),
}


@pytest.mark.parametrize("shared", [False, True])
def test_without_a_checkpoint_a_run_that_released_is_not_started_anew(tmp_path, shared):
    options = {"folder": tmp_path / "a", "reproducible": False}
    if shared:
        options["journal"] = tmp_path / "ledger.jsonl"
    one = client(follower(), **options)
    ask(one, 1, start(), 0.25)
    one.close()
    shutil.rmtree(tmp_path / "a" / "checkpoint")
    journal = options.get("journal", tmp_path / "a" / "private" / "journal.jsonl")
    before = journal.read_bytes()
    with pytest.raises(RunFolderError, match="no checkpoint"):
        client(follower(), **options)
    assert journal.read_bytes() == before


def test_the_journal_is_on_the_device_before_an_answer_leaves(tmp_path, monkeypatch):
    one, synced, sync = client(follower(), folder=tmp_path / "a"), [], Journal.sync
    monkeypatch.setattr(Journal, "sync", lambda self: (synced.append(len(self.entries())), sync(self))[1])
    for answered in (lambda: ask(one, 1, start(), 0.25), lambda: train(one, 1, start(), clip_norm=0.2)):
        answered()
        assert synced[-1] == len(one.training.ledger.journal.entries())


@pytest.mark.parametrize("rows", [None, "mean"])
def test_a_client_protects_patients_with_all_of_their_records(rows):
    """Bit for bit the training of one process with the same users, and its epsilon."""
    sampling = eq.Poisson(20, RECORDS, 4) if rows is None else eq.Poisson(7, RECORDS // 3, 4)
    unit = eq.Users([n // 3 for n in range(RECORDS)], records_per_user=3, rows=rows)
    method = eq.DPSGD(clip_norm=0.5, noise_multiplier=2.0)
    training, expected = central(method, sampling, unit=unit)
    one = client(method, sampling=sampling, unit=unit)
    assert same(rounds_of(one, start(), 2), expected)
    assert (one.statement().unit, one.statement().epsilon) == ("user", training.statement().epsilon)


def test_local_parameters_are_trained_and_never_sent(tmp_path):
    """The rest goes to the server; what stays survives rounds and a restart, whatever the server sends."""
    one = client(folder=tmp_path, local=["2.*"], reproducible=False)
    shared = {name: value for name, value in start().items() if name.startswith("0.")}
    first = train(one, 1, shared)
    assert first.params.keys() == shared.keys()
    head = copied({name: p for name, p in one.training.parameters.items() if name.startswith("2.")})
    assert not any(torch.equal(head[name], start()[name]) for name in head)
    with pytest.raises(Refused, match="tensors"):
        train(one, 2, start())
    one.close()
    with pytest.raises(ValueError, match=r"local=.* differs from"):
        client(folder=tmp_path, reproducible=False)
    again = client(folder=tmp_path, local=["2.*"], reproducible=False)
    assert all(torch.equal(again.training.parameters[name], head[name]) for name in head)
    train(again, 2, {name: value + 1 for name, value in first.params.items()})
    assert charges(again) == 2 * LOCAL_STEPS


def test_weights_by_size_are_those_of_the_stated_populations():
    """Two sites of 60 and 180 records count 1 to 3; the mean of one size is the plain mean, bit for bit."""
    sites = [
        client(number=0, sampling=eq.Poisson(20, RECORDS, LOCAL_STEPS)),
        client(number=1, sampling=eq.Poisson(60, 3 * RECORDS, LOCAL_STEPS), data=records(1, 3 * RECORDS)),
    ]
    replies = [site.answer(Request(1, start(), FedAvg(weights="size").extras())) for site in sites]
    found = FedAvg(weights="size").aggregate(start(), replies)
    for name, value in found.items():
        wanted = 0.25 * replies[0].params[name] + 0.75 * replies[1].params[name]
        assert torch.allclose(value, wanted, rtol=1e-14, atol=0)
        plain = FedAvg().aggregate(start(), replies)[name]  # whatever the sizes
        assert torch.equal(plain, (replies[0].params[name] + replies[1].params[name]) / 2)
    alike = [Reply(reply.params, {"population": 60.0}) for reply in replies]
    assert same(FedAvg(weights="size").aggregate(start(), alike), FedAvg().aggregate(start(), alike))
    told = FedAvg(weights="size").refusal(Request(1, start()), Reply(start()))
    assert "states no population" in str(told)


@pytest.mark.parametrize(
    ("local", "method", "said"),
    [
        (["hat.*"], eq.DPSGD, "matches no trainable parameter"),
        (["*"], eq.DPSGD, "every trainable parameter"),
        (["2.*"], SentElsewhere, "something else than parameters"),
    ],
)
def test_local_parameters_that_make_no_sense_are_refused(local, method, said):
    with pytest.raises(ValueError, match=said):
        client(method(clip_norm=0.5, noise_multiplier=1.0), local=local)


@pytest.mark.few(8)
@pytest.mark.parametrize("name", [name for name in EXAMPLES if " " not in name])
def test_any_method_trains_at_a_client(name):
    one = client(EXAMPLES[name](), steps=4, budget=eq.Budget(8.0, 1e-3))
    params = train(one, 1, start()).params
    params = train(one, 2, {parameter: value + 0.01 for parameter, value in params.items()}).params
    assert all(bool(torch.isfinite(value).all()) for value in params.values())
    assert one.rounds_left == 0
    assert one.method.card.guarantee != "proven" or one.epsilon() <= 8


def test_a_client_that_goes_on_with_other_settings_is_told_which(tmp_path):
    options = {"budget": eq.Budget(8.0, 1e-3), "folder": tmp_path}
    one = client(**options)
    train(one, 1, start())
    one.close()
    before = contents(tmp_path)
    for name, value in {
        "budget": eq.Budget(0.5, 1e-3), "sampling": eq.Poisson(20, RECORDS, 2 * ROUNDS * LOCAL_STEPS),
        "relation": "replace_one", "reproducible": False, "local_steps": 1, "hardened": True,
        "journal": "another.jsonl",
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=rf"{name}=.* differs from the .*new folder"):
            client(**(options | {name: value}))
        assert contents(tmp_path) == before
    assert client(**options).rounds_left == ROUNDS - 1


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def wide():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return torch.nn.Linear(FEATURES, 500).double()


def restorable(folder):
    """A private client, whose noise is a thousand times what it hides."""
    method = follower(noise_multiplier=1000.0, radius_noise_multiplier=1000.0)
    squares = {"loss_function": lambda model, batch: model(batch["input"]).square().mean(dim=1)}
    return client(method, model=wide(), folder=folder, reproducible=False, **squares)


@pytest.mark.parametrize("other", ["parameters", "radius", "none"])
def test_a_folder_put_back_from_an_older_copy_gives_another_question_noise_of_its_own(tmp_path, other):
    begin = {name: p.detach().clone() for name, p in wide().named_parameters()}
    moved = {name: p + 1e-9 for name, p in begin.items()}
    restorable(tmp_path / "old").close()
    shutil.copytree(tmp_path / "old", tmp_path / "copy")

    def answers(folder, params, radius):
        one = restorable(folder)
        asked = ask(one, 1, params, radius**2)
        ends = train(one, 1, params, clip_norm=radius).params
        one.close()
        assert charges(restorable(folder)) == 1 + LOCAL_STEPS  # it knows nothing of the other folder
        step = torch.cat([(ends[name] - params[name]).flatten() for name in sorted(ends)])
        return asked, step / radius

    first = answers(tmp_path / "old", begin, 0.2)
    question = {"parameters": (moved, 0.2), "radius": (begin, 0.1), "none": (begin, 0.2)}[other]
    second = answers(tmp_path / "copy", *question)
    alike = float(torch.corrcoef(torch.stack([first[1], second[1]]))[0, 1])
    if other == "none":
        assert second[0] == first[0]
        assert torch.equal(second[1], first[1])
    else:
        assert abs(second[0] - first[0]) > 1e-3  # of a standard deviation of 50
        assert abs(alike) < 5 / len(first[1]) ** 0.5


ENDS = {
    "before the entry": lambda one: (one._log, "write"),
    "before the end is booked": lambda one: (Ledger, "close"),
    "before the key goes": lambda one: (Secrets, "delete"),
}


@pytest.mark.parametrize("reproducible", [True, False])
@pytest.mark.parametrize("when", ENDS)
def test_killed_while_it_finishes(tmp_path, monkeypatch, when, reproducible):
    """It ends as it would have, and refuses everything from then on; its statement stays."""
    options = {"folder": tmp_path, "reproducible": reproducible}
    one = client(follower(), **options)
    asked, answer = ask(one, 1, start(), 0.25), train(one, 1, start(), clip_norm=0.2)
    epsilon, statement = one.epsilon(), one.statement()
    stopped_at_its_end(one, monkeypatch, when)
    one.close()
    assert (tmp_path / "private" / "key").exists() is not reproducible
    again = client(follower(), **options)
    if when == "before the entry":
        assert ask(again, 1, start(), 0.25) == asked
        assert same(train(again, 1, start(), clip_norm=0.2), answer)
    else:
        assert not (tmp_path / "private" / "key").exists()
        assert again.rounds_left == 0
    assert again.finish() == statement
    assert Statement.from_json((tmp_path / "statement.json").read_text()) == statement
    assert not (tmp_path / "private" / "key").exists()
    before = contents(tmp_path)
    for found in (again, client(follower(), **options)):
        assert (found.epsilon(), found.statement(), found.rounds_done) == (epsilon, statement, 1)
        for number in (1, 2):  # neither an old answer again nor a new one
            for kind, extras in (("query", {"square_limit": 0.25}), ("train", {"clip_norm": 0.2})):
                with pytest.raises(Refused, match="has finished"):
                    found.answer(Request(number, start(), extras, kind))
        assert found.finish() == statement
    assert contents(tmp_path) == before
    kinds = [json.loads(line)["type"] for line in (tmp_path / "private" / "journal.jsonl").open()]
    assert kinds == ["run", *["release"] * (1 + LOCAL_STEPS), "close"]
    assert verify_run(tmp_path).consistent


def stopped_at_its_end(one, monkeypatch, when, fixed=False):
    def die(*args):
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(*ENDS[when](one), die)
        with pytest.raises(SystemExit):
            one.finish(stop_fixed_beforehand=fixed)


@pytest.mark.parametrize("when", ENDS)
def test_what_a_client_gives_up_at_its_end_is_spent_once(tmp_path, monkeypatch, when):
    """Two runs of one owner, whose budget is for one and a bit: B has what A gave up, or A has it."""
    budget = eq.Budget(1.35 * client().training.plan.epsilon(1e-3).value, 1e-3)
    options = {"journal": tmp_path / "ledger.jsonl", "reproducible": False, "budget": budget}
    a = client(folder=tmp_path / "a", **options)
    train(a, 1, start())
    alone = a.training.statement(stop_fixed_beforehand=True)
    stopped_at_its_end(a, monkeypatch, when, fixed=True)
    a.close()
    if when == "before the key goes":  # its end is booked: B may begin before A is seen to
        b = client(folder=tmp_path / "b", **options)
        a = client(folder=tmp_path / "a", **options)
    else:
        with pytest.raises(BudgetError, match="other runs"):
            client(folder=tmp_path / "b", **options)
        a = client(folder=tmp_path / "a", **options)
        if when == "before the entry":
            a.finish(stop_fixed_beforehand=True)
        b = client(folder=tmp_path / "b", **options)
    assert not (tmp_path / "a" / "private" / "key").exists()
    with pytest.raises(Refused, match="has finished"):
        train(a, 2, start())
    rounds_of(b, start())
    assert a.finish() == alone
    assert alone.epsilon < b.epsilon() == b.finish().epsilon <= budget.epsilon


@pytest.mark.parametrize("when", STARTS)
def test_killed_at_its_start_it_leaves_no_reservation_in_a_shared_ledger(tmp_path, monkeypatch, when):
    """The budget is for one run; the files are put back as they were when the process died."""
    budget = eq.Budget(1.01 * client().training.plan.epsilon(1e-3).value, 1e-3)
    now, then = tmp_path / "now", tmp_path / "then"
    options = {"folder": now / "a", "journal": now / "ledger.jsonl", "reproducible": False}

    def die(*args, **kwargs):
        shutil.copytree(now, then)
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(*STARTS[when], die)
        with pytest.raises(SystemExit):
            client(budget=budget, **options)
    shutil.rmtree(now)
    then.rename(now)
    assert (now / "a" / "config.json").exists()
    reserved = (now / "ledger.jsonl").exists() and (now / "ledger.jsonl").stat().st_size > 0
    assert reserved is (when == "before the checkpoint")
    one = client(budget=budget, **options)
    rounds_of(one, start())
    assert one.statement().other_runs == reserved
    assert one.finish().epsilon <= budget.epsilon


def test_epsilon_of_clients_that_share_a_ledger_is_that_of_their_statements(tmp_path):
    budget = eq.Budget(20.0, 1e-3)
    options = {"journal": tmp_path / "ledger.jsonl", "reproducible": False, "budget": budget}
    a = client(folder=tmp_path / "a", **options)
    train(a, 1, start())
    alone = a.epsilon()
    b = client(folder=tmp_path / "b", **options)
    rounds_of(b, start())
    assert a.epsilon() > 1.5 * alone
    # What a has planned and not released yet is in its statement, and in what b counts.
    assert a.epsilon() < a.statement().epsilon == b.statement().epsilon == b.epsilon()
    for number in range(2, ROUNDS + 1):
        train(a, number, start())
    assert a.epsilon() == a.statement().epsilon == b.epsilon()
