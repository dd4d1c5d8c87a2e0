"""Five hospitals train together: patients as units, own norm layers, one late, one leaves, one is killed.

    python examples/consortium.py runs/consortium

On one machine, with made-up patients; `examples/federated` puts the same clients behind Flower and TLS. Each
request opens the hospital's client from its folder, in a process of its own. At the end each hospital signs
its statement, whoever keeps the server gathers them, and one place that held all records is the comparison.
"""

import argparse
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch
from torch import nn
from torch.nn import functional as F

import equipoise as eq
from equipoise.federated import Client, FedAvg, Refused, simulate

PATIENTS = {"ulm": 700, "bonn": 600, "kiel": 600, "hof": 500, "trier": 500}  # public numbers
HOSPITALS, VISITS = tuple(PATIENTS), 3  # at most three visits of a patient count
K, EPSILON, DELTA = 5, 8.0, 1e-4
LATE, LEAVES, KILLED = "kiel", "trier", "bonn"
fork = multiprocessing.get_context("fork")


def records(hospital, seed=0):
    """Visits and whose they are; every hospital has instruments of its own, with other scales."""
    number = HOSPITALS.index(hospital)
    rng = torch.Generator().manual_seed(10 * seed + number)
    visits = torch.randint(1, VISITS + 1, (PATIENTS[hospital],), generator=rng)
    owner = torch.repeat_interleave(torch.arange(PATIENTS[hospital]), visits)
    x = torch.randn(len(owner), 8, generator=rng)
    sick = (x[:, :4].sum(1) + 0.5 * torch.randn(len(owner), generator=rng) > 0).long()
    scale = 1 + torch.arange(8) * number / 16
    return {"input": scale * x + 0.5 * (number - 2), "label": sick}, owner


class Network(nn.Module):
    """What all agreed upon; `norm` is each hospital's own."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.norm, self.hidden, self.head = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.hidden(self.norm(x))))


def loss(model, batch):
    """Of each visit, [B]."""
    return F.cross_entropy(model(batch["input"]), batch["label"], reduction="none")


def settings(data, owner, patients, steps, scores=None):
    """A tenth of the patients is held apart where scores are taken, a fifth of the others drawn a step."""
    score = None if scores is None else eq.Score("accuracy", share=0.1, times=scores)
    trained = round(patients * (1 if score is None else 0.9))
    return {
        "data": eq.Data(data, score=score),
        "sampling": eq.Poisson(trained / 5, trained, steps),
        "method": eq.DPSGD(clip_norm=0.5),
        "budget": eq.Budget(EPSILON, DELTA),
        "unit": eq.Users(owner, records_per_user=VISITS, rows="mean"),
    }


def opened(folder, hospital, rounds):
    """The client of a hospital; it goes on with what its folder holds."""
    data, owner = records(hospital)
    asked = settings(data, owner, PATIENTS[hospital], rounds * K, scores=3)
    return Client(
        Network(), loss, local_steps=K, learning_rate=2.0, local=["norm.*"], run=folder / hospital, **asked
    )


class Hospital:
    """What the server reaches; the process behind it is killed in round `killed_in`."""

    def __init__(self, folder, name, rounds, killed_in=None):
        self.given, self.killed_in = (folder, name, rounds), killed_in
        self.opening, self.working = [], []  # processor seconds

    def answer(self, request):
        here, there = fork.Pipe()
        process = fork.Process(target=self.work, args=(request, there))
        process.start()
        there.close()
        try:
            found, opening, working = pickle.loads(here.recv_bytes())
        except EOFError:
            raise ConnectionError("the hospital's process is gone") from None
        finally:
            process.join()
        if request.kind == "train":
            self.opening.append(opening)
            self.working.append(working)
        if isinstance(found, Refused):
            raise found
        return found

    def work(self, request, there):
        began = time.process_time()
        client = opened(*self.given)
        if request.kind == "train" and request.round == self.killed_in:
            die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
            client.training.optimizer.register_step_post_hook(die)
        ready = time.process_time()
        try:
            found = client.answer(request)
        except Refused as refused:
            found = refused
        client.close()
        there.send_bytes(pickle.dumps((found, ready - began, time.process_time() - ready)))


def accuracy(network, hospital):
    """On other patients of the hospital."""
    data, _ = records(hospital, seed=1)
    with torch.no_grad():
        return float((network(data["input"]).argmax(1) == data["label"]).float().mean())


def pooled(rounds):
    """What one place reaches that holds all records, with as many steps."""
    given = [records(hospital) for hospital in HOSPITALS]
    before = [0, *torch.tensor(list(PATIENTS.values())).cumsum(0).tolist()]
    data = {name: torch.cat([one[name] for one, _ in given]) for name in ("input", "label")}
    owner = torch.cat([own + before[i] for i, (_, own) in enumerate(given)])
    network = Network()
    asked = settings(data, owner, sum(PATIENTS.values()), rounds * K)
    eq.PrivateTraining(
        network, torch.optim.SGD(network.parameters(), lr=2.0), loss=loss, **asked
    ).run(progress=False)  # fmt: skip
    return sum(accuracy(network, one) for one in HOSPITALS) / len(HOSPITALS)


def main(words=None):
    """Rounds, signatures, one report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=12)
    given = parser.parse_args(words)
    folder, rounds = given.folder, given.rounds
    late, last, killed = rounds // 3 + 1, 2 * rounds // 3, rounds // 2
    sites = [Hospital(folder, one, rounds, killed if one == KILLED else None) for one in HOSPITALS]
    span = {LATE: (late, rounds), LEAVES: (1, last)}

    def members(number):
        spans = (span.get(one, (1, rounds)) for one in HOSPITALS)
        return [i for i, (first, end) in enumerate(spans) if first <= number <= end]

    start = {name: p.detach() for name, p in Network().named_parameters() if not name.startswith("norm")}
    history = simulate(
        FedAvg(weights="size"), sites, start, rounds,
        folder=folder / "server", members=members, score_every=max(1, rounds // 2),
    )  # fmt: skip
    reached = []
    for hospital in HOSPITALS:
        client = opened(folder, hospital, rounds)
        network = Network()
        own = {name: p for name, p in client.training.parameters.items() if name.startswith("norm")}
        network.load_state_dict({**own, **history.params})
        reached.append(accuracy(network, hospital))
        client.finish()
        key = folder / f"{hospital}.pem"
        subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True)
        public = ["openssl", "pkey", "-in", key, "-pubout", "-out", folder / f"{hospital}.pub"]
        subprocess.run(public, check=True)
        equipoise("sign", folder / hospital, "--key", key)
    keys = [word for one in HOSPITALS for word in ("--key", folder / f"{one}.pub")]
    places = [folder / one for one in HOSPITALS]
    report = equipoise("report", *places, "--federation", folder / "server", *keys, "--json")
    equipoise("verify", folder / "server")
    values = json.loads(report)
    found = {
        "absent": {str(done.number): dict(done.absent) for done in history.rounds if done.absent},
        "epsilons": {one["site"]: round(one["epsilon"], 3) for one in values["clients"]},
        "rounds": {one["site"]: one["rounds"] for one in values["clients"]},
        "accuracy": sum(reached) / len(reached),
        "pooled": pooled(rounds),
        "opening_cpu_s": median([s for one in sites for s in one.opening[1:]]),
        "round_cpu_s": median([s for one in sites for s in one.working[1:]]),
        "page": values["report"],
    }
    print(json.dumps(found, indent=1))
    return found


def equipoise(*words):
    """What the command prints."""
    line = [sys.executable, "-m", "equipoise", *map(str, words)]
    return subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main()
