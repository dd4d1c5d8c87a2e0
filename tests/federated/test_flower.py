"""Flower's messages around the same clients and strategies: same numbers, same refusals, same ledgers."""

import math
import multiprocessing
import socket
import subprocess
import sys
import time

import pytest
import torch
from federated_problem import (
    LOCAL_STEPS,
    ROUNDS,
    adaptive,
    away,
    charges,
    client,
    follower,
    records,
    same,
    start,
)

import equipoise as eq
from equipoise.federated import FedAvg, Request, simulate

pytest.importorskip("flwr", reason="needs the extra federated")

from flower_grid import Building, LocalGrid
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from equipoise.federated.flower import client_app, forwarding_app, serve, simulate_on_flower, stay_open
from equipoise.federated.flower.wire import refusal_of, to_record, write_request

CLIENTS = 3


def grid(folder, method=follower, **options):
    return LocalGrid(client_app(Building(folder, method, **options)), CLIENTS)


def in_process(**options):
    clients = [client(follower(), p) for p in range(CLIENTS)]
    return simulate(adaptive(), clients, start(), ROUNDS, **options)


def close(a, b):
    """Equal but for the rounding of kernels that were measured to be quickest in one process or the other."""
    assert a.keys() == b.keys()
    for name, value in a.items():
        torch.testing.assert_close(value, b[name], rtol=1e-9, atol=1e-12)
    assert not same(a, start())


def charged(folder):
    def one(number):
        opened = client(follower(), number, folder=folder / str(number))
        try:
            return charges(opened)
        finally:
            opened.close()

    return [one(p) for p in range(CLIENTS)]


def test_the_grid_gives_what_one_process_gives(tmp_path):
    options = {"clients_per_round": 2, "seed": 3}
    found = serve(grid(tmp_path), adaptive(), CLIENTS, start(), ROUNDS, **options)
    expected = in_process(**options)
    close(found.params, expected.params)
    for ours, theirs in zip(found.rounds, expected.rounds, strict=True):
        assert (ours.asked, ours.answered, ours.bytes_up) == (theirs.asked, theirs.answered, theirs.bytes_up)
        assert ours.metrics == pytest.approx(theirs.metrics)


@pytest.mark.slow
def test_flowers_simulation_gives_what_one_process_gives(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flower"))
    build = Building(tmp_path / "clients", follower)
    found = simulate_on_flower(adaptive(), build, CLIENTS, start(), ROUNDS, processes=2)
    close(found.params, in_process().params)
    assert charged(tmp_path / "clients") == [ROUNDS * (1 + LOCAL_STEPS)] * CLIENTS


def scored(context, folder):
    """A client that holds a share of its records apart."""
    number = context.node_config["partition-id"]
    data = eq.Data(records(number), score=eq.Score("accuracy", share=0.3))
    budget, sampling = eq.Budget(8.0, 1e-3), eq.Poisson(20, 42, ROUNDS * LOCAL_STEPS)
    options = {"data": data, "budget": budget, "sampling": sampling, "folder": folder / str(number)}
    return client(eq.DPSGD(clip_norm=0.5), number, **options)


class SlowGrid(LocalGrid):
    """Node 102 works longer than the server waits in round 2: its answer comes, and too late.

    As Flower's grid, which gives back what answers the messages of one call within its time.
    """

    timeouts = ()

    def send_and_receive(self, messages, *, timeout=None):
        self.timeouts = (*self.timeouts, timeout)
        replies = super().send_and_receive(messages, timeout=timeout)
        rounds = [m.content["extras"]["round"] for m in messages if m.metadata.message_type == "train"]
        return [r for r in replies if 2 not in rounds or r.metadata.src_node_id != 102]


def test_a_straggler_past_the_timeout_is_charged_once_and_its_answer_is_not_used(tmp_path):
    nodes = SlowGrid(client_app(Building(tmp_path, follower)), CLIENTS)
    found = serve(nodes, adaptive(), CLIENTS, start(), ROUNDS, timeout=7.0)
    assert set(nodes.timeouts) == {7.0}
    assert [done.answered for done in found.rounds] == [(0, 1, 2), (0, 1), (0, 1, 2)]
    assert found.rounds[1].absent == {2: "no answer"}
    assert charged(tmp_path) == [ROUNDS * (1 + LOCAL_STEPS)] * CLIENTS  # it did release: its ledger says so
    clients = [client(follower(), p) for p in range(CLIENTS)]
    away(clients[2], "train", 2, after=True)
    close(found.params, simulate(adaptive(), clients, start(), ROUNDS).params)


def test_only_released_numbers_leave(tmp_path):
    """All that answers hold: parameters, the noised mean and its public noise, a number, a refusal."""
    nodes = grid(tmp_path)
    serve(nodes, adaptive(), CLIENTS, start(), ROUNDS + 1)
    seen = set()
    for _, content in nodes.replies:
        for name, record in content.items():
            keys = tuple(sorted(record)) if not isinstance(record, ArrayRecord) else tuple(sorted(start()))
            seen.add((name, type(record).__name__, keys))
    assert seen == {
        ("client", "ConfigRecord", ("number",)),
        ("reports", "MetricRecord", ("squares", "squares_noise")),
        ("model", "ArrayRecord", tuple(sorted(start()))),
        ("refusal", "ConfigRecord", ("reason",)),
    }
    assert all(not context.state for context in nodes.contexts.values())


def spoilt(change):
    content = write_request(Request(1, start(), {"clip_norm": 0.1}))
    change(content)
    return content


def huge_header(content):
    array = content["model"]["0.bias"]
    array.data = array.data.replace(b"(5,)", b"(9,)")


NONSENSE = {
    "no round": lambda c: c["extras"].pop("round"),
    "a round in words": lambda c: c["extras"].update({"round": "one"}),
    "no values": lambda c: c.pop("extras"),
    "a metric for a model": lambda c: c.update({"model": MetricRecord({"a": 1.0})}),
    "bytes": lambda c: setattr(c["model"]["0.bias"], "data", b"nonsense"),
    "a shape that lies": huge_header,
    "a name too many": lambda c: c["extras"].update({"learning_rate": 10.0}),
    "a group too many": lambda c: c.update({"group.control": to_record(start())}),
    "no radius": lambda c: c["extras"].pop("clip_norm"),
    "NaN": lambda c: c["extras"].update({"clip_norm": math.nan}),
    "a radius in words": lambda c: c["extras"].update({"clip_norm": "large"}),
}


def test_nonsense_from_the_server_is_refused_and_costs_nothing(tmp_path):
    nodes = LocalGrid(client_app(Building(tmp_path, follower)), 1)
    for name, change in NONSENSE.items():
        reply = nodes.deliver("train", 100, spoilt(change))
        assert reply.content["refusal"]["reason"].startswith("Refused:"), name
    opened = client(follower(), 0, folder=tmp_path / "0")
    assert (charges(opened), opened.rounds_left) == (0, ROUNDS)


class Strange:
    """An app whose answers cannot be read."""

    def __init__(self, content):
        self.content = content

    def __call__(self, message, context):
        from flwr.app import Message

        kind = message.metadata.message_type
        number = context.node_config["partition-id"]
        hello = RecordDict({"client": ConfigRecord({"number": number})})
        return Message(hello if kind == "query.introduce" else self.content, reply_to=message)


UNREADABLE = {
    "nothing": {},
    "a number": {"client": ConfigRecord({"number": 1})},
    "half": {"reports": MetricRecord({"squares": 1.0})},
    "no reports": {"reports": ConfigRecord({"squares": 1.0}), "model": to_record(start())},
    "no model": {"model": MetricRecord({"squares": 1.0})},
    "no reason": {"refusal": ConfigRecord()},
}


def test_answers_that_cannot_be_read_count_as_none():
    for name, content in UNREADABLE.items():
        done = serve(LocalGrid(Strange(RecordDict(content)), 2), FedAvg(), 2, start(), 1).rounds[0]
        assert (done.answered, set(done.absent)) == ((), {0, 1}), name


def test_scores_come_over_the_grid_as_in_one_process(tmp_path):
    nodes = LocalGrid(client_app(lambda context: scored(context, tmp_path)), 2)
    found = serve(nodes, FedAvg(), 2, start(), 2, score_every=2)
    with_folders = [scored(nodes.contexts[100 + p], tmp_path / "here") for p in range(2)]
    expected = simulate(FedAvg(), with_folders, start(), 2, score_every=2)
    assert [done.scores for done in found.rounds] == [done.scores for done in expected.rounds]
    assert [len(done.scores) for done in found.rounds] == [0, 2]


# ---- clients that stay open


def resident(folder, number):
    torch.set_num_threads(1)  # threads of before the fork are not here
    stay_open(client(follower(), number, folder=folder / str(number)), folder / f"{number}.socket")


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="needs Unix sockets")
def test_clients_that_stay_open_give_what_others_give_and_may_be_killed(tmp_path):
    reached = LocalGrid(forwarding_app(), CLIENTS)
    for number, context in enumerate(reached.contexts.values()):
        context.node_config["socket"] = str(tmp_path / f"{number}.socket")
    client(follower())  # what is imported on first use is imported before the processes fork
    fork = multiprocessing.get_context("fork")
    running = {}

    def begin(number):
        running[number] = fork.Process(target=resident, args=(tmp_path, number), daemon=True)
        running[number].start()

    def again(done):  # client 1 is killed after each round, its socket left behind
        running[1].kill()
        running[1].join()
        before, path = (tmp_path / "1.socket").stat().st_mtime_ns, tmp_path / "1.socket"
        begin(1)
        wait_for(lambda: path.exists() and path.stat().st_mtime_ns != before)

    try:
        for number in range(CLIENTS):
            begin(number)
        wait_for(lambda: all((tmp_path / f"{number}.socket").is_socket() for number in range(CLIENTS)))
        assert (tmp_path / "0.socket").stat().st_mode & 0o777 == 0o600
        found = serve(reached, adaptive(), CLIENTS, start(), ROUNDS, on_round=again)
        refused = reached.deliver("train", 100, RecordDict({"model": to_record(start())}))
        nonsense = reached.deliver("query.score", 100, RecordDict())
    finally:
        for process in running.values():
            process.kill()
            process.join()
    assert all(done.answered == tuple(range(CLIENTS)) for done in found.rounds)
    close(found.params, in_process().params)
    assert all("Refused: the request names no round" in refusal_of(one) for one in (refused, nonsense))
    nobody = reached.deliver("train", 100, RecordDict())
    assert "its own log says why" in refusal_of(nobody)


def wait_for(reached, seconds=60):
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_who_passes_messages_on_needs_no_torch():
    words = (
        "import sys, equipoise.federated.flower as f; f.forwarding_app(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", words], check=True)
