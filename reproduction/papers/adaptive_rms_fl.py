"""AdaptDP-FedAvg with ten clients that one point fits: a round's radius from all clients' noised squares.

Least squares in 20 directions, 1,000 records a client, each client with a covariance of its own; Poisson
batches of rate 0.1, 60 rounds of 5 local steps, delta 1e-5, the same epsilon at every client for all methods,
radius query or counts included. The error is the mean loss over the clients; with label noise 0.5 its excess
over that of least squares.

untuned    C = G = 1, rate 1, at epsilon 8 and 2
tuned      clip norm and rate as chosen for each method on other problems
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equipoise.federated import (
    AdaptDPFedAvg,
    FedAvg,
    QuantileFedAvg,
    ServerQuantile,
    ServerRMS,
    Strategy,
    simulate,
)
from equipoise.methods import DPSGD, Method, ReleasedQuantile
from equipoise.methods.adaptive_rms import RMSRadius
from equipoise.privacy import Budget, Poisson
from reproduction.findings import (
    Curve,
    Ends,
    Findings,
    PaperExperiment,
    Progress,
    Table,
    Verdict,
    end_as_before,
    over_seeds,
)
from reproduction.papers.owners import make_clients

__all__ = ["EXPERIMENT", "Run", "losses", "owners", "runs", "verdicts"]

CLIENTS, RECORDS, DIRECTIONS, ROUNDS, LOCAL_STEPS = 10, 1000, 20, 60, 5
DELTA, COUNT_NOISE = 1e-5, 0.02
MEASURED = (1, 5, 10, 20, 30, 40, 50, 60)


@dataclass(frozen=True)
class Run:
    """One line of the table."""

    part: str
    kind: str
    clip_norm: float
    rate: float
    epsilon: float = 8.0
    noise: float = 0.0


class Line(nn.Module):
    """Least squares in the span of the records; other directions would carry noise and no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(DIRECTIONS, dtype=torch.float64))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """[B] losses."""
        return 0.5 * (batch["x"] @ self.weight - batch["y"]).square()


def owners(seed: int, noise: float = 0.0) -> list[dict[str, Tensor]]:
    """The clients' records."""
    rng = torch.Generator().manual_seed(seed)
    w = torch.randn(DIRECTIONS, generator=rng, dtype=torch.float64)
    w *= DIRECTIONS**0.5 / w.norm()
    out = []
    for _ in range(CLIENTS):
        spread = 0.5 + torch.rand(DIRECTIONS, generator=rng, dtype=torch.float64)
        x = torch.randn(RECORDS, DIRECTIONS, generator=rng, dtype=torch.float64) * spread / DIRECTIONS**0.5
        y = x @ w
        if noise:
            y = y + noise * torch.randn(RECORDS, generator=rng, dtype=torch.float64)
        out.append({"x": x, "y": y})
    return out


def halves(run: Run) -> tuple[Callable[[], Method], Strategy]:
    """How a client's method is made, and the server's strategy."""
    c = run.clip_norm
    if run.kind == "DP-FedAvg":
        return lambda: DPSGD(clip_norm=c), FedAvg()
    if run.kind == "quantile":
        rule = ReleasedQuantile(c, learning_rate=0.5, count_noise=COUNT_NOISE, minimum=c * 1e-15)
        return lambda: ServerQuantile(rule), QuantileFedAvg(rule)
    return adaptive_halves(run.kind == "published", c, ROUNDS, CLIENTS, LOCAL_STEPS)


def adaptive_halves(
    published: bool, clip_norm: float, rounds: int, clients: int, local_steps: int
) -> tuple[Callable[[], Method], Strategy]:
    """Those of AdaptDP-FedAvg, as published or self-scaled."""
    share = 0.5 if published else 0.2
    rule = RMSRadius(clip_norm, offset="paper") if published else RMSRadius(clip_norm, scale="self")

    def method() -> Method:
        return ServerRMS(clip_norm, round_length=local_steps, radius_share=share)

    return method, AdaptDPFedAvg(rule, rounds, clients)


def losses(run: Run, seed: int) -> dict[int, float]:
    """The error after some of the rounds."""
    shares = owners(seed, run.noise)
    method, strategy = halves(run)
    clients = make_clients(
        shares,
        Line,
        lambda model, batch: model(batch),
        Poisson(RECORDS // 10, RECORDS, ROUNDS * LOCAL_STEPS),
        method,
        local_steps=LOCAL_STEPS,
        budget=Budget(run.epsilon, DELTA),
        learning_rate=run.rate,
        seed=100 * seed,
        micro_batch_size=RECORDS,
    )
    x, y = torch.cat([data["x"] for data in shares]), torch.cat([data["y"] for data in shares])
    best = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    least = float(0.5 * (x @ best - y).square().mean()) if run.noise else 0.0
    found: dict[int, float] = {}
    rounds = [0]

    def evaluate(params: Mapping[str, Tensor]) -> Mapping[str, float]:
        rounds[0] += 1
        if rounds[0] in MEASURED:
            found[rounds[0]] = float(0.5 * (x @ params["weight"] - y).square().mean()) - least
        return {}

    start = {"weight": torch.zeros(DIRECTIONS, dtype=torch.float64)}
    simulate(strategy, clients, start, ROUNDS, evaluate=evaluate)
    return found


def runs() -> list[Run]:
    """All lines of the table."""
    tuned, noisy, two = "tuned, epsilon 8", "label noise, epsilon 8", "untuned, epsilon 2"
    return [
        Run("untuned, epsilon 8", "DP-FedAvg", 1.0, 1.0),
        Run("untuned, epsilon 8", "published", 1.0, 1.0),
        Run(two, "DP-FedAvg", 1.0, 1.0, 2.0),
        Run(two, "published", 1.0, 1.0, 2.0),
        Run(tuned, "DP-FedAvg", 0.01, 10.0),
        Run(tuned, "published", 0.03, 6.0),
        Run(tuned, "self-scaled", 1.0, 6.0),
        Run(tuned, "quantile", 1.0, 6.0),
        Run(noisy, "DP-FedAvg", 1.0, 1.0, noise=0.5),
        Run(noisy, "published", 1.0, 1.0, noise=0.5),
        Run(noisy, "self-scaled", 3.0, 1.0, noise=0.5),
        Run(noisy, "quantile", 1.0, 1.0, noise=0.5),
    ]


def _run(seeds: Sequence[int], progress: Progress) -> Findings:
    rows: list[list[str | float | int | None]] = []
    curves: list[Curve] = []
    ends: dict[tuple[str, str], float] = {}
    for run, paths in over_seeds(runs(), losses, lambda run: f"{run.part}: {run.kind}", seeds, progress):
        last = [path[ROUNDS] for path in paths]
        ends[run.part, run.kind] = statistics.median(last)
        rows.append(
            [run.part, run.kind, run.clip_norm, run.rate, ends[run.part, run.kind], min(last), max(last)]
        )
        drawn = [{k: max(v, 1e-33) for k, v in path.items()} for path in paths]
        curves.append(Curve.of_seeds(run.kind, drawn, run.part))
    note = f"{len(seeds)} seeds; medians of the loss, ten clients, 60 rounds of 5 steps."
    columns = ["part", "method", "C or G", "rate", "loss", "lowest", "highest"]
    return Findings(Table(columns, rows, note), curves, verdicts(ends), numbers=ends)


def verdicts(ends: Ends) -> list[Verdict]:
    """The claims and their bars."""

    def of(part: str, kind: str) -> float:
        return ends[part, kind]

    def gain(part: str) -> float:
        return of(part, "DP-FedAvg") / of(part, "published")

    tuned, noisy = "tuned, epsilon 8", "label noise, epsilon 8"
    out = [
        Verdict.within("untuned, epsilon 8: DP-FedAvg over published", gain("untuned, epsilon 8"), 5, 250),
        Verdict.within("untuned, epsilon 2: DP-FedAvg over published", gain("untuned, epsilon 2"), 2, 60),
        Verdict.within("tuned: DP-FedAvg over published", gain(tuned), 5, 50),
        Verdict.at_most("tuned: self-scaling goes on", of(tuned, "self-scaled"), 1e-20),
        Verdict.at_most("tuned: one learned quantile goes on", of(tuned, "quantile"), 1e-12),
        Verdict.within("label noise: DP-FedAvg over published: no gain", gain(noisy), 0.5, 1.25),
        Verdict.within(
            "label noise: self-scaled over DP-FedAvg: no gain",
            of(noisy, "self-scaled") / of(noisy, "DP-FedAvg"),
            0.6,
            2,
        ),
    ]
    return [*out, *end_as_before("adaptive-rms-fl", ends)]


EXPERIMENT = PaperExperiment(
    name="adaptive-rms-fl",
    title="AdaptDP-FedAvg with ten clients",
    summary="DP-FedAvg at a fixed clip norm and at one learned quantile, AdaptDP-FedAvg as published and "
    "self-scaled, on ten clients that one point fits, and on noisy labels.",
    run=_run,
    default_seeds=3,
)
