"""Five hospitals with X-rays: over Flower and TLS, and beside Flower's own privacy and pooled data.

    python benchmarks/hospitals/run.py flower FOLDER --data-dir DIR [--each-message]
    python benchmarks/hospitals/run.py beside --data-dir DIR

`flower` prints who answered, what each owner's processes cost in a round, every epsilon beside that of
dp_accounting, and the accuracy; one hospital joins in round 5, one leaves after round 8, one is killed in
round 6. With `--each-message` every message opens the client anew. `beside` runs in one process, three times
each, with the best of a few learning rates and clip norms for everybody, chosen on the test images.
"""

import argparse
import importlib.util
import logging
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from statistics import mean

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE / "app")]


def over_flower(folder, each_message):
    """The whole story; see the module."""
    specification = importlib.util.spec_from_file_location("deployment", ROOT / "examples/federated/run.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    app = shutil.copytree(HERE / "app", folder / "app", ignore=shutil.ignore_patterns("__pycache__"))
    if each_message:
        described = (app / "pyproject.toml").read_text()
        (app / "pyproject.toml").write_text(described.replace("clinics.forward:app", "clinics.client:app"))
    made = module.Deployment(folder, app, nodes=5)
    paths = [str(ROOT), str(HERE / "app"), os.environ.get("PYTHONPATH", "")]
    made.environment |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}

    def begin(number):
        if not each_message:
            words = [sys.executable, __file__, "owner", str(folder), "--number", str(number)]
            made.start(f"client-{number}", *words)
        made.start_node(number)

    def end(number, by):
        for name in (f"owner-{number}", f"client-{number}"):
            if name in made.running:
                os.killpg(made.running[name].pid, by)
                made.running.pop(name).wait()

    try:
        made.start_link()
        for number in range(5):
            if number != LATE:
                begin(number)
        made.run()
        made.wait_for(1)
        before, names = seconds(made.running), [f"{kind}-{LEAVES}" for kind in ("owner", "client")]
        made.wait_for(3)
        after = seconds(made.running)
        spent = {name: (after[name] - before[name]) / 2 for name in names if name in before}
        begin(LATE)
        made.wait_for(5)
        time.sleep(3)
        end(KILLED, signal.SIGKILL)
        made.wait_for(6)
        begin(KILLED)
        made.wait_for(8)
        end(LEAVES, signal.SIGTERM)
        made.wait_for(ROUNDS)
    finally:
        for name in list(made.running):
            made.kill(name)
    print("processor seconds of a round, of Flower's processes and the client's own:", spent)
    finish(folder)


def seconds(running):
    """Processor seconds so far of each group of processes, of those that have ended too."""
    found = dict.fromkeys(running, 0.0)
    groups = {process.pid: name for name, process in running.items()}
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            numbers = place.read_text().rsplit(")", 1)[1].split()
        except OSError:  # it has ended
            continue
        if (name := groups.get(int(numbers[2]))) is not None:
            found[name] += sum(map(int, numbers[11:15])) / os.sysconf("SC_CLK_TCK")
    return found


def finish(folder):
    """Every owner's statement beside dp_accounting, and the accuracy of each with its own norms."""
    from dp_accounting import NeighboringRelation, dp_event
    from dp_accounting.pld import PLDAccountant
    from safetensors.torch import load_file

    networks = []
    for number, name in enumerate(HOSPITALS):
        client = opened(number, folder)
        networks.append(with_own(load_file(folder / "model.safetensors"), client))
        rounds, statement = client.rounds_done, client.finish()
        (release,) = statement.releases
        noise, sampling = release["mechanism"]["noise_multiplier"], release["sampling"]
        one = dp_event.PoissonSampledDpEvent(
            sampling["expected_batch_size"] / sampling["population"], dp_event.GaussianDpEvent(noise)
        )
        accountant = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)
        accountant.compose(dp_event.SelfComposedDpEvent(one, release["count"]))
        by_hand = accountant.get_epsilon(DELTA)
        print(f"{name}: {rounds} rounds, epsilon {statement.epsilon:.4f}, by dp_accounting {by_hand:.4f}, "
              f"the model {statement.independence['model']}")  # fmt: skip
    print(f"accuracy {accuracy(networks):.1f}")


def with_own(params, client):
    """The network that a hospital ends with."""
    network = Network()
    network.load_state_dict({**client.training.parameters, **params})
    return network


def beside():
    """Mean, least and largest accuracy of three trainings, each at its best settings."""
    logging.disable(logging.CRITICAL)  # Flower tells of every message
    rates = (0.5, 1.0, 2.0)
    clips = (0.03, 0.1, 0.3, 1.0)
    for name, train, grid in (
        ("clients of this library", of_clients, [(rate,) for rate in rates]),
        ("all records in one place", pooled, [(rate,) for rate in rates]),
        ("Flower, no privacy", by_flower, [("none", rate, 1.0) for rate in (0.1, 0.3)]),
        ("Flower, noise at the server", by_flower, [("server", 0.1, clip) for clip in clips]),
        ("Flower, noise at the clients", by_flower, [("client", 0.1, clip) for clip in clips]),
    ):
        found = {given: [train(*given, seed=seed) for seed in range(3)] for given in grid}
        best = max(found, key=lambda given: mean(found[given]))
        low, high = min(found[best]), max(found[best])
        print(f"{name}: {mean(found[best]):.1f} ({low:.1f} to {high:.1f}) with {best}", flush=True)


def of_clients(rate, seed):
    from equipoise.federated import FedAvg, simulate

    clients = [opened(number, rate=rate) for number in range(5)]
    history = simulate(FedAvg(weights="size"), clients, shared(Network()), ROUNDS, members=members)
    return accuracy([with_own(history.params, client) for client in clients])


def pooled(rate, seed):
    held = [records(number) for number in range(5)]
    data = {name: torch.cat([one[name] for one, _ in held]) for name in ("input", "label")}
    ends = torch.tensor([0, *[int(owner.max()) + 1 for _, owner in held]]).cumsum(0)
    owner = torch.cat([own + first for (_, own), first in zip(held, ends[:-1], strict=True)])
    network = Network()
    optimizer = torch.optim.SGD(network.parameters(), lr=rate)
    eq.PrivateTraining(network, optimizer, loss=loss, **settings(data, owner)).run(progress=False)
    return accuracy([network] * 5)


def by_flower(where, rate, clip, seed):
    """Flower's FedAvg; whole hospitals at the same epsilon: Gaussian noise on the clipped update of each.

    The multiplier is that of 12 releases without sampling, for hospitals that are added or removed.
    """
    sys.path[:0] = [str(ROOT / "tests" / name) for name in ("federated", "training", "")]
    import numpy as np
    from flower_grid import LocalGrid
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.clientapp.mod import LocalDpMod
    from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg

    from equipoise.privacy import FullBatch, calibrate_noise_multiplier

    torch.manual_seed(seed)
    np.random.seed(seed)
    noise = calibrate_noise_multiplier(FullBatch(5, ROUNDS), eq.Budget(EPSILON, DELTA))
    # LocalDpMod takes sensitivity * sqrt(2 log(1.25 / delta)) / epsilon as the noise's deviation.
    local = LocalDpMod(clip, clip, float(np.sqrt(2 * np.log(1.25 / DELTA)) / noise), DELTA)
    networks, held = [Network() for _ in range(5)], [records(number) for number in range(5)]
    app = ClientApp(mods=[local] if where == "client" else [])

    @app.train()
    def train(message, context):
        number = context.node_config["partition-id"]
        network, (data, owner) = networks[number], held[number]
        given = {name: torch.from_numpy(a.numpy().copy()) for name, a in message.content["arrays"].items()}
        network.load_state_dict({**network.state_dict(), **given})
        optimizer = torch.optim.SGD(network.parameters(), lr=rate)
        for _ in range(K):
            drawn = torch.rand(len(owner)) < 0.2
            optimizer.zero_grad()
            loss(network, {name: values[drawn] for name, values in data.items()}).mean().backward()
            optimizer.step()
        content = {"arrays": ArrayRecord(shared(network)), "metrics": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(content), reply_to=message)

    strategy = FedAvg(fraction_evaluate=0.0)
    if where == "server":
        strategy = DifferentialPrivacyServerSideFixedClipping(strategy, noise, clip, 5)
    ended = strategy.start(LocalGrid(app, 5), ArrayRecord(shared(Network())), num_rounds=ROUNDS)
    params = {name: torch.from_numpy(array.numpy().copy()) for name, array in ended.arrays.items()}
    for network in networks:
        network.load_state_dict({**network.state_dict(), **params})
    return accuracy(networks)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("flower", "beside", "owner"))
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--data-dir", default=os.environ.get("CLINICS_DATA", "data"))
    parser.add_argument("--each-message", action="store_true")
    parser.add_argument("--number", type=int, help="of the owner, whose process this is")
    given = parser.parse_args()
    os.environ["CLINICS_DATA"] = str(Path(given.data_dir).resolve())

    import torch
    from clinics.agreed import (
        DELTA,
        EPSILON,
        HOSPITALS,
        KILLED,
        LATE,
        LEAVES,
        ROUNDS,
        K,
        Network,
        accuracy,
        loss,
        members,
        opened,
        records,
        settings,
        shared,
    )  # fmt: skip

    import equipoise as eq

    if given.what == "beside":
        beside()
    elif given.what == "flower":
        over_flower(given.folder.resolve(), given.each_message)
    else:
        from equipoise.federated.flower import stay_open

        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        stay_open(opened(given.number, given.folder), given.folder / f"{given.number}.socket")
