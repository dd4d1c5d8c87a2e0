"""AdaptDP-FedAvg's image tasks at epsilons that mean something: T3 (MNIST) and T4 (Fashion-MNIST).

1,500 training images a client, 2, 4 or 6 clients; 100 rounds of 15 local steps, Poisson batches of expected
size 100, delta 1e-4. The model has 512 hidden units whose weights stay as they were drawn, so that the
problem is convex: what is trained is a linear layer on 512 fixed features. The paper's own noise costs
epsilons from 33 to 510 here; these runs have 1, 3 and 8, radius query included.

Clip norm (or G) and learning rate are those of the paper's grids with the lowest training loss on other
records, for each data set, epsilon and method, with two clients.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.data import DataSet, load
from equipoise.federated import FedAvg, Strategy, iid, simulate
from equipoise.methods import DPSGD, Method
from equipoise.methods.base import Parameters
from equipoise.methods.named_tensors import copied
from equipoise.privacy import Budget, Poisson
from reproduction.findings import Curve, Findings, PaperExperiment, Progress, Site, Table, Verdict
from reproduction.papers.adaptive_rms_fl import adaptive_halves
from reproduction.papers.owners import largest_epsilon, make_clients

__all__ = ["EXPERIMENT", "Case", "Task", "run_case", "verdicts"]

RECORDS, HIDDEN, ROUNDS, LOCAL_STEPS, BATCH, DELTA = 1500, 512, 100, 15, 100, 1e-4
KINDS = ("DP-FedAvg", "published", "self-scaled")
NAMES = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST"}
CLIENTS, EPSILONS = (2, 4, 6), (1.0, 3.0, 8.0)
GRID = {"mnist": (0.1, 0.3), "fashion-mnist": (0.03, 0.1, 0.3)}
CLIP_NORMS = (0.05, 0.1, 0.5)
TUNING_SEED = 100


@dataclass(frozen=True)
class Case:
    """A training: where, with what."""

    data: str
    clients: int
    epsilon: float
    kind: str
    clip_norm: float
    rate: float


class Features:
    """The hidden layer, as it was drawn, applied to images."""

    def __init__(self, inputs: int, seed: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._layer = nn.Linear(inputs, HIDDEN)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """[B, *image] to [B, 512]."""
        return torch.relu(self._layer(images.flatten(1)))


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def _halves(case: Case) -> tuple[Callable[[], Method], Strategy]:
    c = case.clip_norm
    if case.kind == "DP-FedAvg":
        return lambda: DPSGD(clip_norm=c), FedAvg()
    return adaptive_halves(case.kind == "published", c, ROUNDS, case.clients, LOCAL_STEPS)


@dataclass(frozen=True)
class Task:
    """What the clients train on: a linear layer on the hidden units of their images.

    Attributes:
        shares: each client's records.
        x, y: all training records.
        test_x, test_y: those that judge.
        first: the layer that training begins with.
    """

    shares: Sequence[dict[str, Tensor]]
    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    first: nn.Linear

    @classmethod
    def of(cls, dataset: DataSet, clients: int, seed: int, largest: float = 1.0) -> Task:
        """Random training images for this many clients; pixels lie in [0, largest]."""
        order = torch.randperm(len(dataset.train), generator=torch.Generator().manual_seed(seed))
        chosen = dataset.train[order[: RECORDS * clients]]
        test = dataset.test[slice(None)]
        features = Features(chosen["input"][0].numel(), seed)
        x, y = features(largest * chosen["input"]), chosen["label"]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            first = nn.Linear(HIDDEN, dataset.num_classes)
        shares = [{"x": x[part], "y": y[part]} for part in iid(len(y), clients, seed)]
        return cls(shares, x, y, features(largest * test["input"]), test["label"], first)

    def start(self) -> dict[str, Tensor]:
        """The parameters that training begins with."""
        return copied(dict(self.first.named_parameters()))

    def measures(self, params: Parameters) -> dict[str, float]:
        """Training loss and test accuracy."""

        def outputs(features: Tensor) -> Tensor:
            return F.linear(features, params["weight"], params["bias"])

        right = outputs(self.test_x).argmax(1) == self.test_y
        return {
            "loss": float(F.cross_entropy(outputs(self.x), self.y)),
            "accuracy": float(right.double().mean()),
        }


def run_case(case: Case, dataset: DataSet, seed: int, rounds: int = ROUNDS) -> dict[str, Any]:
    """Training loss, test accuracy and the largest epsilon of one training."""
    task = Task.of(dataset, case.clients, seed)
    method, strategy = _halves(case)
    sampling = Poisson(BATCH, RECORDS, rounds * LOCAL_STEPS)
    clients = make_clients(
        task.shares,
        lambda: nn.Linear(HIDDEN, dataset.num_classes),
        _loss,
        sampling,
        method,
        local_steps=LOCAL_STEPS,
        budget=Budget(case.epsilon, DELTA),
        learning_rate=case.rate,
        seed=1000 * seed,
        micro_batch_size=RECORDS,
    )
    history = simulate(strategy, clients, task.start(), rounds)
    radii = [done.metrics["radius"] for done in history.rounds if "radius" in done.metrics]
    return {
        **task.measures(history.params),
        "epsilon": largest_epsilon(clients, DELTA),
        "radius": radii[-1] if radii else case.clip_norm,
    }


def _grid(data: str, epsilon: float, kind: str) -> list[Case]:
    return [Case(data, 2, epsilon, kind, c, rate) for c in CLIP_NORMS for rate in GRID[data]]


def _run(seeds: Sequence[int], progress: Progress, site: Site) -> Findings:
    datasets = {name: load(name, site.data_dir) for name in NAMES}

    def finish(planned: Sequence[tuple[Case, int]]) -> list[dict[str, Any] | None]:
        runs = [
            (
                {**asdict(case), "seed": seed, "rounds": ROUNDS},
                partial(run_case, case, datasets[case.data], seed),
            )
            for case, seed in planned
        ]
        return site.kept.finish(runs, progress)

    found: dict[Case, list[Mapping[str, Any]]] = {}
    for data in NAMES:
        for epsilon in EPSILONS:
            best = []
            for kind in KINDS:
                grid = _grid(data, epsilon, kind)
                tried = finish([(case, TUNING_SEED) for case in grid])
                losses = {c: r["loss"] for c, r in zip(grid, tried, strict=True) if r is not None}
                if len(losses) == len(grid):
                    best.append(min(losses, key=lambda case: losses[case]))
            planned = [
                (Case(data, clients, epsilon, case.kind, case.clip_norm, case.rate), seed)
                for seed in seeds
                for clients in CLIENTS
                for case in best
            ]
            for (case, _), result in zip(planned, finish(planned), strict=True):
                if result is not None:
                    found.setdefault(case, []).append(result)
    return summarise(found)


def summarise(found: Mapping[Case, Sequence[Mapping[str, Any]]]) -> Findings:
    """Table, curves and verdicts of the finished runs."""
    rows: list[list[str | float | int | None]] = []
    middle: dict[tuple[str, int, float, str], float] = {}
    for case, runs in found.items():
        accuracy = [100 * run["accuracy"] for run in runs]
        middle[case.data, case.clients, case.epsilon, case.kind] = statistics.median(accuracy)
        rows.append(
            [
                NAMES[case.data], case.clients, case.epsilon, case.kind, case.clip_norm, case.rate,
                round(statistics.median(run["loss"] for run in runs), 4),
                round(statistics.median(accuracy), 2), round(min(accuracy), 2), round(max(accuracy), 2),
                len(runs),
            ]
        )  # fmt: skip
    columns = [
        "data", "clients", "epsilon", "method", "C or G", "rate", "training loss", "accuracy %", "lowest",
        "highest", "seeds",
    ]  # fmt: skip
    curves = []
    for data, name in NAMES.items():
        for kind in KINDS:
            points = [(e, middle[data, 2, e, kind]) for e in EPSILONS if (data, 2, e, kind) in middle]
            if points:
                x, y = zip(*points, strict=True)
                curves.append(Curve(kind, x, [1 - value / 100 for value in y], panel=f"{name}, two clients"))
    note = "Medians over the seeds; delta 1e-4; curves: test errors by epsilon."
    return Findings(Table(columns, rows, note), curves, verdicts(middle), numbers=middle)


def verdicts(middle: Mapping[tuple[str, int, float, str], float]) -> list[Verdict]:
    """The paper's claim, at epsilons that mean something: the adaptive radius is the more accurate."""
    out = []
    for data, name in NAMES.items():
        for epsilon in EPSILONS:
            pair = [middle.get((data, 2, epsilon, kind)) for kind in ("published", "DP-FedAvg")]
            if pair[0] is not None and pair[1] is not None:
                sentence = f"{name}, epsilon {epsilon:g}, two clients: published less DP-FedAvg in points"
                out.append(Verdict.at_least(sentence, pair[0] - pair[1], 0))
    # what came out, in points: these bars were set after the runs that the docs report
    for (data, clients, epsilon, kind), value in middle.items():
        where = f"{NAMES[data]}, epsilon {epsilon:g}, {clients} clients"
        plain = middle.get((data, clients, epsilon, "DP-FedAvg"))
        if kind == "DP-FedAvg":
            low, high = LEVELS[data, epsilon]
            out.append(Verdict.within(f"{where}: DP-FedAvg's accuracy", value, low, high))
        elif plain is not None:
            low, high = BEHIND[epsilon] if kind == "published" else (-1.5, 0.5)
            out.append(Verdict.within(f"{where}: {kind} less DP-FedAvg", value - plain, low, high))
    return out


LEVELS = {
    ("mnist", 1.0): (74.0, 84.0),
    ("mnist", 3.0): (83.0, 89.0),
    ("mnist", 8.0): (85.0, 90.0),
    ("fashion-mnist", 1.0): (67.0, 74.0),
    ("fashion-mnist", 3.0): (73.0, 80.0),
    ("fashion-mnist", 8.0): (74.0, 81.0),
}
"""Bars of DP-FedAvg's accuracy, in percent."""

BEHIND = {1.0: (-5.0, -0.4), 3.0: (-2.5, -0.05), 8.0: (-1.0, -0.02)}
"""Bars of the published radius' accuracy less DP-FedAvg's, in points."""


def _draw(findings: Findings) -> Any:
    from reproduction.figures import curves_figure

    return curves_figure(findings.curves, x_label="epsilon", y_label="test error", log_y=False)


EXPERIMENT = PaperExperiment(
    name="adaptive-rms-images",
    title="AdaptDP-FedAvg on MNIST and Fashion-MNIST at epsilons 1, 3 and 8",
    summary="DP-FedAvg and AdaptDP-FedAvg, as published and self-scaled, with two, four and six clients of "
    "1,500 images and a hidden layer that stays as it was drawn. Hours of processor time; goes on where it "
    "was stopped.",
    run_on=_run,
    draw=_draw,
    default_seeds=3,
)
