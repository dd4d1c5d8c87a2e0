"""Tables on whole data sets: which records train and which judge, and a rate from a paper's grid.

The training records are shuffled once, with a public seed. While the rate is chosen, 80% of them train and
the others judge. Then all of them train, and the test records judge.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.data import DataSet
from reproduction.findings import Progress, Site
from reproduction.harness import Problem

__all__ = ["Run", "Split", "linear_problem", "tuned"]

Split = Literal["tuning", "test"]
Run = Callable[[float, int, Split], dict[str, Any]]
"""(rate, seed, split) -> what was measured, with "accuracy" in percent."""

TUNING_SHARE = 0.8


def linear_problem(dataset: DataSet, split: Split) -> Problem:
    """A linear model that starts at zero, on features; its error is the share of false answers in percent.

    Args:
        dataset: with inputs [N, ...], taken as rows.
        split: "tuning" reads no test record.
    """
    order = torch.randperm(dataset.population, generator=torch.Generator().manual_seed(0))
    if split == "test":
        train, judges = dataset.train[order], dataset.test[torch.arange(len(dataset.test))]
    else:
        cut = round(TUNING_SHARE * dataset.population)
        train, judges = dataset.train[order[:cut]], dataset.train[order[cut:]]
    train, judges = ({**fields, "input": fields["input"].flatten(1)} for fields in (train, judges))
    width = judges["input"].shape[1]

    def start() -> nn.Module:
        layer = nn.Linear(width, dataset.num_classes)
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
        return layer

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        # features are kept with half the precision
        return F.cross_entropy(model(batch["input"].float()), batch["label"], reduction="none")

    @torch.no_grad()
    def error(model: nn.Module) -> float:
        right = sum(
            int((model(judges["input"][part].float()).argmax(1) == judges["label"][part]).sum())
            for part in torch.arange(len(judges["label"])).chunk(10)
        )
        return 100 - 100 * right / len(judges["label"])

    return Problem(dataset.name, start, loss, train, len(train["label"]), error)


def tuned(
    run: Run,
    settings: Mapping[str, Any],
    rates: Sequence[float],
    tuning_seeds: Sequence[int],
    seeds: Sequence[int],
    site: Site,
    progress: Progress,
) -> tuple[float, list[dict[str, Any]]] | None:
    """The rate of the grid that is best on held-out training records, and each seed's result at that rate.

    Args:
        run: does one training.
        settings: what else the kept results are known by.
        rates: of the grid.
        tuning_seeds: at each of the rates.
        seeds: at the best one.
        site: keeps finished runs.
        progress: called after each run.

    Returns:
        None where runs are missing, after an interrupt.
    """

    def finish(planned: Sequence[tuple[float, int, Split]]) -> list[dict[str, Any] | None]:
        runs = [
            ({**settings, "rate": rate, "seed": seed, "split": split}, partial(run, rate, seed, split))
            for rate, seed, split in planned
        ]
        return site.kept.finish(runs, progress)

    scores: dict[float, float] = {}
    for rate in rates if len(rates) > 1 else ():
        tried = [r for r in finish([(rate, seed, "tuning") for seed in tuning_seeds]) if r is not None]
        if len(tried) < len(tuning_seeds):
            return None
        scores[rate] = statistics.fmean(r["accuracy"] for r in tried)
    best = max(scores, key=lambda rate: scores[rate]) if scores else rates[0]
    found = [r for r in finish([(best, seed, "test") for seed in seeds]) if r is not None]
    return (best, found) if len(found) == len(seeds) else None
