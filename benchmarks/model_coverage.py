"""Which models train, how many of their parameters go by rules, and what a step costs beside plain training.

Every model of `architectures.py` goes through `PrivateTraining` for two steps. Its rows are compared with a
loop over single records in float64. Then steps on all records are timed beside plain ones, in processor time.
Its tables are docs/measurements/data/speed-models-small.csv and speed-models-wide.csv.

    OMP_NUM_THREADS=1 python benchmarks/model_coverage.py                      # all of them, minutes
    OMP_NUM_THREADS=1 python benchmarks/model_coverage.py --models BERT GPT-2
"""

from __future__ import annotations

import argparse
import copy
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from sys import path as import_path

import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise.gradients.capture.attributes import attributes_kept
from equipoise.gradients.capture.isolation import undisturbed

import_path.insert(0, str(Path(__file__).parent))
from architectures import ARCHITECTURES, Architecture

RECORDS, COMPARED = 16, 6


@dataclass(frozen=True)
class Coverage:
    """What came of one model.

    Attributes:
        parameters: how many values are trained.
        dense: parameters that go without rules: how many values each has.
        worst: largest distance of a row from that of a single record, by the norm of that one.
        plain, private: processor seconds of a step, if they were measured.
        start: processor seconds of the checks before the first step.
    """

    parameters: int
    dense: Mapping[str, int]
    worst: float
    start: float
    plain: float | None = None
    private: float | None = None


def training_of(
    architecture: Architecture, model: nn.Module, data: Mapping[str, Tensor], steps: int = 2
) -> eq.PrivateTraining:
    return eq.PrivateTraining(
        model,
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3),
        loss=architecture.loss,
        data=dict(data),
        sampling=eq.FullBatch(len(next(iter(data.values()))), steps),
        method=eq.DPSGD(clip_norm=0.1, noise_multiplier=1.0),
    )


def wide(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.double() if t.is_floating_point() else t for name, t in batch.items()}


def single_rows(architecture: Architecture, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Gradients of one record after another by ordinary autograd, in float64: [records, P]."""
    found = []
    model = copy.deepcopy(model).double()
    trained = [p for p in model.parameters() if p.requires_grad]
    for number in range(len(next(iter(batch.values())))):
        record = {name: t[number : number + 1] for name, t in wide(batch).items()}
        with undisturbed(model), attributes_kept(model):
            gradients = torch.autograd.grad(
                architecture.loss(model, record).sum(), trained, allow_unused=True
            )
        rows = [
            torch.zeros_like(p) if g is None else g.to_dense()
            for p, g in zip(trained, gradients, strict=True)
        ]
        found.append(torch.cat([g.flatten() for g in rows]))
    return torch.stack(found)


def worst_row(training: eq.PrivateTraining, architecture: Architecture, batch: Mapping[str, Tensor]) -> float:
    with undisturbed(training.model):
        rows = training.engine.by_plan(dict(batch)).materialise().matrix().double()
    expected = single_rows(architecture, training.model, batch)
    return float(((rows - expected).norm(dim=1) / expected.norm(dim=1)).max())


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Median processor time of a call after the first."""
    work()
    found = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return statistics.median(found)


def cover(architecture: Architecture, repeats: int = 0, count: int = RECORDS) -> Coverage:
    """Train on `count` records for two steps, compare rows, and time `repeats` steps of each kind.

    Raises:
        ValueError and its kin: the model is refused.
    """
    torch.manual_seed(0)
    model, data = architecture.model(), architecture.records(count)
    plain = copy.deepcopy(model)
    began = time.process_time()
    training = training_of(architecture, model, data, 3 + repeats)
    start = time.process_time() - began
    for _ in range(2):
        training.take_step()
    sizes = {name: p.numel() for name, p in training.parameters.items()}
    dense = {c.name: sizes[c.name] for c in training.engine.coverage() if c.how == "dense"}
    found = Coverage(
        sum(sizes.values()),
        dense,
        worst_row(training, architecture, {n: t[:COMPARED] for n, t in data.items()}),
        start,
    )
    if not repeats:
        return found
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-3)

    def plain_step() -> None:
        optimizer.zero_grad()
        architecture.loss(plain, data).mean().backward()
        optimizer.step()

    return Coverage(
        found.parameters,
        found.dense,
        found.worst,
        start,
        plain=seconds(plain_step, repeats),
        private=seconds(training.take_step, repeats),
    )


def sources() -> str:
    """Which sources run, in words."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    changed = ", with changes" if git("status", "--porcelain", ":/src", ":/benchmarks") else ""
    return f"sources of commit `{git('rev-parse', '--short=7', 'HEAD')}`{changed}"


def main() -> None:
    """Print the date, the commit and the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--records", type=int, default=64)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    today = time.strftime("%d %B %Y", time.gmtime()).lstrip("0")
    print(
        "Times are medians of processor time in milliseconds, one thread, "
        f"{given.records} records per step, {today}, {sources()}.\n"
    )
    print("| model | parameters | by rule | dense | worst row | plain, ms | private, ms | ratio | start, s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in given.models:
        try:
            row = cover(ARCHITECTURES[name], given.repeats, given.records)
        except Exception as error:
            print(f"| {name} | refused: {type(error).__name__}: {str(error)[:600]} |", flush=True)
            continue
        assert row.plain is not None
        assert row.private is not None
        dense = ", ".join(row.dense) or "-"
        print(
            f"| {name} | {row.parameters:,} | {row.parameters - sum(row.dense.values()):,} | {dense} | "
            f"{row.worst:.0e} | {1000 * row.plain:.1f} | {1000 * row.private:.1f} | "
            f"{row.private / row.plain:.2f} | {row.start:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
