"""PCDP-SGD's table in its own schedule: 3,200 steps at clip norm 0.01, learning rate 1, the noise as printed.

10,000 training images are private, 100 others of the same set public, batches have 250: 80 epochs. The model
is that of `pcdp_sgd_images` (25,450 parameters; the paper's convolutional network has 26,010, and takes
longer). Nothing is tuned, as in the paper. PDP-SGD is PCDP-SGD with the clip
before the projection. Directions are 100 of the whole gradient in every step, as algorithm 1 prints them,
and once 100 a tensor, which its appendix counts. The public records stand for themselves as well: trained
on without noise, as many steps, at the same rate.

Whatever accuracy says, a step of PCDP-SGD and PDP-SGD lies in the span of the public gradients, noise and
all, and one of DP-SGD does not: the share of the first step's squared length in there tells them apart.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

from equipoise.methods import DPSGD, Method, PublicOnly, PublicRecords, PublicSubspace, published
from equipoise.privacy import Poisson
from reproduction.findings import Curve, Findings, PaperExperiment, Progress, Site, Table, Verdict
from reproduction.harness import follow
from reproduction.papers.pcdp_sgd_images import BATCH, CELLS, DELTA, NAMES, RECORDS, Cell, parts, problem_of

__all__ = ["ARMS", "EXPERIMENT", "measure", "verdicts"]

STEPS, CLIP_NORM, RATE = 3200, 0.01, 1.0
ARMS = ("DP-SGD", "PCDP", "public only", "PDP", "PCDP, a tensor")

PRINTED = {"DP-SGD": 0, "PDP": 1, "PCDP": 2}
"""Where a method's accuracy is in `Cell.paper`."""

INSIDE = "share of a step in the public span"

GREYS = CELLS[:4]
"""MNIST and Fashion-MNIST at z = 30 and 6."""


def _method(arm: str, noise: float, public: PublicRecords) -> Method:
    if arm == "DP-SGD":
        return DPSGD(clip_norm=CLIP_NORM, noise_multiplier=noise)
    if arm == "public only":
        return PublicOnly(public=public)
    kind = published.PDPSGD if arm == "PDP" else published.PCDPSGD
    source = PublicSubspace(public, blocks="per_tensor" if arm.endswith("tensor") else None)
    return kind(source=source, clip_norm=CLIP_NORM, noise_multiplier=noise)


def measure(cell: Cell, arm: str, seed: int, data_dir: str | None, steps: int = STEPS) -> dict[str, float]:
    """Errors along one training, by the number of steps in words."""
    public = PublicRecords(parts(cell.data, seed, data_dir)["public"])
    found = follow(
        _method(arm, cell.noise, public),
        problem_of(cell, seed, data_dir),
        sampling=Poisson(BATCH, RECORDS, steps),
        learning_rate=RATE,
        seed=seed,
        measure_at=[steps * k // 8 for k in range(9)],
    )
    return {str(step): value for step, value in found.items()}


def inside(cell: Cell, arm: str, seed: int, data_dir: str | None) -> dict[str, float]:
    """The share of the first step's squared length in the span of the public records' gradients."""
    public = parts(cell.data, seed, data_dir)["public"]
    problem = problem_of(cell, seed, data_dir)
    path: list[torch.Tensor] = []
    rows: list[torch.Tensor] = []

    @torch.enable_grad()
    def look(model: nn.Module) -> float:
        if not path:
            for k in range(len(public["y"])):
                lost = problem.loss(model, {name: value[k : k + 1] for name, value in public.items()})
                found = torch.autograd.grad(lost.sum(), list(model.parameters()))
                rows.append(parameters_to_vector(found))
        path.append(parameters_to_vector(model.parameters()).detach())
        return 0.0

    follow(
        _method(arm, cell.noise, PublicRecords(public)),
        replace(problem, error=look),
        sampling=Poisson(BATCH, RECORDS, STEPS),
        learning_rate=RATE,
        seed=seed,
        measure_at=[0, 1],
    )
    moved = (path[1] - path[0]).double()
    _, sizes, directions = torch.linalg.svd(torch.stack(rows).double(), full_matrices=False)
    span = directions[sizes > 1e-6 * sizes[0]]
    return {INSIDE: float((span @ moved).square().sum() / moved.square().sum())}


def _run(seeds: Sequence[int], progress: Progress, site: Site) -> Findings:
    planned = [(cell, arm, seed) for seed in seeds for cell in GREYS for arm in ARMS]
    runs = []
    for cell, arm, seed in planned:
        settings = {"data": cell.data, "noise": cell.noise, "arm": arm, "seed": seed}
        runs.append((settings, partial(measure, cell, arm, seed, site.data_dir)))
    found: dict[tuple[Cell, str], list[Mapping[str, float]]] = {}
    for (cell, arm, _), result in zip(planned, site.kept.finish(runs, progress), strict=True):
        if result is not None:
            found.setdefault((cell, arm), []).append(result)
    few = [(cell, arm) for cell in GREYS for arm in PRINTED]
    shares = site.kept.finish(
        [
            (
                {"data": cell.data, "noise": cell.noise, "arm": arm, "seed": seeds[0], "of": INSIDE},
                partial(inside, cell, arm, seeds[0], site.data_dir),
            )
            for cell, arm in few
        ],
        progress,
    )
    return summarise(
        found,
        {key: share[INSIDE] for key, share in zip(few, shares, strict=True) if share is not None},
    )


def summarise(
    found: Mapping[tuple[Cell, str], Sequence[Mapping[str, float]]], shares: Mapping[tuple[Cell, str], float]
) -> Findings:
    """Table, curves and verdicts of the finished runs."""
    rows: list[list[str | float | int | None]] = []
    curves = []
    middle = {(f"{cell}, {INSIDE}", arm): share for (cell, arm), share in shares.items()}
    for (cell, arm), runs in found.items():
        right = statistics.median(100 * (1 - run[str(STEPS)]) for run in runs)
        best = statistics.median(100 * (1 - min(run.values())) for run in runs)
        middle[str(cell), arm] = right
        printed = cell.paper[PRINTED[arm]] if arm in PRINTED else None
        rows.append([NAMES[cell.data], cell.noise, arm, round(right, 1), round(best, 1), printed, len(runs)])
        paths = [{int(step): value for step, value in run.items()} for run in runs]
        curves.append(Curve.of_seeds(arm, paths, str(cell)))
    columns = ["data", "z", "method", "accuracy %", "at its best", "printed %", "seeds"]
    note = f"Test accuracy after 3,200 steps, and at the best of nine places; delta {DELTA:g}."
    return Findings(Table(columns, rows, note), curves, verdicts(middle), numbers=middle)


def verdicts(middle: Mapping[tuple[str, str], float]) -> list[Verdict]:
    """The paper's claims, by (cell, method) -> median accuracy in percent."""
    out = []
    for cell in GREYS:
        # what noise alone has there is 100 / 25,450; the noise of DP-SGD is nearly all of its step
        for arm, low, high in (("DP-SGD", 0.001, 0.05), ("PDP", 0.99, 1.01), ("PCDP", 0.99, 1.01)):
            value = middle.get((f"{cell}, {INSIDE}", arm))
            if value is not None:
                out.append(Verdict.within(f"{cell}: {arm}, {INSIDE}", value, low, high))
    # what came out, in percent: these bars were set after the runs that the docs report
    for (part, arm), value in middle.items():
        if (part, arm) in FOUND:
            out.append(Verdict.within(f"{part}: {arm}, accuracy", value, *FOUND[part, arm]))
    alone = middle.get((str(GREYS[0]), "public only"))
    plain, found = (middle.get((str(GREYS[0]), arm)) for arm in ("DP-SGD", "PCDP"))
    if plain is not None and found is not None and alone is not None:
        out += [
            Verdict.within(f"{GREYS[0]}: PCDP less DP-SGD, no gain", found - plain, -4, 4),
            Verdict.within(f"{GREYS[0]}: PCDP less the public records alone, no gain", found - alone, -4, 4),
        ]
    for cell in GREYS:
        got = {arm: middle[str(cell), arm] for arm in PRINTED if (str(cell), arm) in middle}
        printed = {arm: cell.paper[number] for arm, number in PRINTED.items()}
        for arm, value in got.items():
            sentence = f"{cell}: {arm}'s accuracy less the printed {printed[arm]:g}, in points"
            out.append(Verdict.within(sentence, value - printed[arm], -5, 5))
        for other in ("DP-SGD", "PDP"):
            if {"PCDP", other} <= set(got):
                gain = printed["PCDP"] - printed[other]
                bound = Verdict.at_least if gain > 0 else Verdict.at_most
                sentence = f"{cell}: PCDP less {other} (the paper: {gain:+.1f})"
                out.append(bound(sentence, got["PCDP"] - got[other], 0))
    return out


FOUND = {(str(GREYS[0]), arm): (65.0, 75.0) for arm in ("DP-SGD", "PCDP", "public only")}
"""Bars of the accuracy in percent, of what was run."""


EXPERIMENT = PaperExperiment(
    name="pcdp-sgd-printed",
    title="PCDP-SGD's table in its own schedule of 3,200 steps",
    summary="DP-SGD, PDP-SGD and PCDP-SGD as published on MNIST and Fashion-MNIST at z = 30 and 6, clip norm "
    "0.01, learning rate 1: accuracy beside what is printed. Hours of processor time; goes on where it was "
    "stopped.",
    run_on=_run,
    default_seeds=1,
)
