"""SIGKILL at a client and at the server in the middle of rounds: real processes, no clean-up, no goodbye.

Every client is a process of its own behind a socket, the server another. The training goes on; afterwards
every ledger holds each noise draw once, and the model is the one of an undisturbed training.
"""

import contextlib
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Client as Connection
from multiprocessing.connection import Listener

import pytest
from federated_problem import LOCAL_STEPS, ROUNDS, adaptive, charges, client, follower, same, start

from equipoise.federated import simulate

CLIENTS = 2
fork = multiprocessing.get_context("fork")
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def opened(folder, number, reproducible=True, **form):
    return client(follower(**form), number, folder=folder / str(number), reproducible=reproducible)


def work(folder, number, fatal, reproducible, form):
    """A client process: answers one request a connection; `fatal` prepares the client for its death."""
    one = opened(folder, number, reproducible, **form)
    if fatal is not None:
        fatal(one)
    path = folder / f"socket-{number}"
    path.unlink(missing_ok=True)
    with Listener(str(path)) as door:
        while True:
            with door.accept() as caller:
                name, arguments = caller.recv()
                found = getattr(one, name)
                caller.send(found(*arguments) if callable(found) else found)


class Remote:
    """The client behind the socket; a dead one raises ConnectionError."""

    def __init__(self, folder, number):
        self.path = str(folder / f"socket-{number}")

    def _call(self, name, *arguments):
        try:
            with Connection(self.path) as line:
                line.send((name, arguments))
                return line.recv()
        except EOFError as error:
            raise ConnectionError("the client is dead") from error

    def answer(self, request):
        return self._call("answer", request)


@pytest.fixture
def begin(tmp_path):
    """Start a client process, and stop all of them in the end."""
    running = []
    client(follower())  # what is imported on first use is imported before the processes fork

    def run(number, fatal=None, reproducible=True, **form):
        task = (tmp_path, number, fatal, reproducible, form)
        process = fork.Process(target=work, args=task, daemon=True)
        process.start()
        running.append(process)
        end = time.monotonic() + 120
        while time.monotonic() < end:
            with (
                contextlib.suppress(OSError, EOFError),
                Connection(str(tmp_path / f"socket-{number}")) as line,
            ):
                line.send(("rounds_left", ()))
                line.recv()
                return process
            time.sleep(0.01)
        raise TimeoutError("the client process does not answer")

    yield run
    for process in running:
        process.kill()
        process.join()


def at_call(target, name, count, after=False):
    """Die at the count-th call of `target.name`, before or after it."""
    calls, inner = [], getattr(target, name)

    def dying(*arguments, **options):
        calls.append(1)
        if len(calls) == count and not after:
            die()
        answer = inner(*arguments, **options)
        if len(calls) == count:
            die()
        return answer

    setattr(target, name, dying)


WHOLE = ROUNDS * (1 + LOCAL_STEPS)
CLIENT_DEATHS = {
    "after the query's release": lambda one: at_call(one._log, "write", 3),
    "before the second step of round 2": lambda one: at_call(one.training, "take_step", LOCAL_STEPS + 2),
    "before the checkpoint of round 2": lambda one: at_call(one.training, "save_checkpoint", 2),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("reproducible", [True, False])
@pytest.mark.parametrize("when", CLIENT_DEATHS)
def test_a_client_process_is_killed(tmp_path, begin, when, reproducible):
    """It misses round 2 and is started again: its ledger holds what it released, each draw once."""
    begin(0, None, reproducible)
    victim = begin(1, CLIENT_DEATHS[when], reproducible)
    revived = []

    def revive(done):
        if done.number == 2:
            victim.join(120)
            revived.append(begin(1, None, reproducible))

    remotes = [Remote(tmp_path, p) for p in range(CLIENTS)]
    history = simulate(adaptive(CLIENTS), remotes, start(), ROUNDS, on_round=revive)
    assert victim.exitcode == -signal.SIGKILL
    assert [done.answered for done in history.rounds] == [(0, 1), (0,), (0, 1)], history.rounds
    for process in (*revived, *multiprocessing.active_children()):
        process.kill()
        process.join()
    ledgers = [opened(tmp_path, p, reproducible) for p in range(CLIENTS)]
    booked = [
        [entry.draw.index for entry in one.training.ledger.journal.entries() if entry.kind == "release"]
        for one in ledgers
    ]
    assert all(len(set(indices)) == len(indices) for indices in booked)
    assert charges(ledgers[0]) == WHOLE
    # what had been released in round 2 when it died: the query, and the steps before its death
    steps = {"after the query's release": 0, "before the second step of round 2": 1}.get(when, LOCAL_STEPS)
    assert charges(ledgers[1]) == WHOLE - LOCAL_STEPS + steps


def serve(folder, fatal):
    strategy, remotes = adaptive(CLIENTS), [Remote(folder, p) for p in range(CLIENTS)]
    fatal(strategy, remotes)
    simulate(strategy, remotes, start(), ROUNDS, folder=folder / "server")


SERVER_DEATHS = {
    "after one training of round 2": lambda s, r: at_call(r[0], "answer", 4, True),
    "before round 2 is on disk": lambda s, r: at_call(s, "state_dict", 2),
    "after round 2 is on disk": lambda s, r: at_call(s, "round", 3),
}


@pytest.mark.parametrize("when", SERVER_DEATHS)
def test_the_server_process_is_killed(tmp_path, begin, when):
    """The next server asks the same again and gets the same answers: the model of an undisturbed training."""
    for number in range(CLIENTS):
        begin(number)
    server = fork.Process(target=serve, args=(tmp_path, SERVER_DEATHS[when]))
    server.start()
    server.join()
    assert server.exitcode == -signal.SIGKILL
    remotes = [Remote(tmp_path, p) for p in range(CLIENTS)]
    history = simulate(adaptive(CLIENTS), remotes, start(), ROUNDS, folder=tmp_path / "server")
    clients = [client(follower(), p) for p in range(CLIENTS)]
    undisturbed = simulate(adaptive(CLIENTS), clients, start(), ROUNDS)
    assert same(history.params, undisturbed.params)
    assert [done.number for done in history.rounds] == [1, 2, 3]
    assert history.rounds[-1].metrics == undisturbed.rounds[-1].metrics
    for process in multiprocessing.active_children():
        process.kill()
        process.join()
    assert [charges(opened(tmp_path, p)) for p in range(CLIENTS)] == [WHOLE] * CLIENTS
