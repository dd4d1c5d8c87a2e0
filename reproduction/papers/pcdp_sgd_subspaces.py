"""What directions are worth, by where they come from: tilted, too many, public, random, released, private.

The problem is that of `pcdp_sgd`, means in 1,000 dimensions with ten true directions U and records of unequal
norm; the error is |w - w*|^2 / 2, 0.29 at the start. V stays for the whole training, except where it is made
of releases.

=========  ============================================================================================
tilt       U turned out of itself by an angle: 0.29 sin^2 of it is a bias that no step removes
columns    the first k of U and then random ones; one column misses the second mean
public     leading directions of m public records of the same law, raw or scaled to norm one
random     ten random columns, alone and with the residual (GEP)
epsilon    V from private records (half the budget) or from earlier releases, beside DP-SGD
=========  ============================================================================================

Parts without an epsilon of their own have z = 4, epsilon 0.313 at delta = 1e-5. Thresholds and learning rates
were chosen on another seed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equipoise.methods import (
    DPSGD,
    GEP,
    PCDPSGD,
    PDPSGD,
    IterationSubspace,
    Method,
    MomentSubspace,
    PublicRecords,
    PublicSubspace,
    RandomProjection,
    RandomSubspace,
    ReleasedSubspace,
)
from equipoise.privacy import Budget, Poisson
from reproduction.findings import Curve, Ends, Findings, PaperExperiment, Progress, Table, Verdict
from reproduction.harness import Problem, follow
from reproduction.papers.pcdp_sgd import (
    CORE,
    DIMENSIONS,
    NEVER,
    RECORDS,
    STEPS,
    drawn,
    means,
    span,
    tilted,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT", "Arm", "arms", "measure", "public_records", "verdicts", "widened"]

NOISE, DELTA, EPSILONS = 4.0, 1e-5, (0.5, 2.0)
TILTS, WIDTHS = (0, 5, 10, 20, 45), (1, 2, 10, 50, 100, 200, 500)
POOLS = ((100, 10), (400, 10), (400, 100), (1600, 2))  # public records, columns


@dataclass(frozen=True)
class Arm:
    """One line of the table; `at` is its place on the axis of its part."""

    part: str
    label: str
    make: Callable[[int], Method]
    learning_rate: float = 0.03
    epsilon: float | None = None
    at: float = math.nan


def widened(seed: int, k: int) -> dict[str, Tensor]:
    """Public records that are the first columns of U, then random ones orthogonal to it."""
    U, rng = span(seed).double(), torch.Generator().manual_seed(4000 + seed)
    if k <= CORE:
        return {"x": U[:k].float()}
    other = torch.randn(k - CORE, DIMENSIONS, generator=rng, dtype=torch.float64)
    other = torch.linalg.qr((other - other @ U.t() @ U).t())[0].t()
    return {"x": torch.cat([U, other]).float()}


def public_records(seed: int, count: int) -> dict[str, Tensor]:
    """Further records of the law of the private ones."""
    return {"x": drawn(span(seed), count, torch.Generator().manual_seed(5000 + seed))}


def _fixed(
    kind: type[PCDPSGD] | type[PDPSGD], clip_norm: float, records: Callable[[int], Any], **options: Any
) -> Callable[[int], Method]:
    def make(seed: int) -> Method:
        source = PublicSubspace(PublicRecords(records(seed)), refresh_every=NEVER, basis="held", **options)
        return kind(source=source, clip_norm=clip_norm, noise_multiplier=NOISE)

    return make


def _public_arms() -> list[Arm]:
    out = [Arm("all directions", "DP-SGD", lambda seed: DPSGD(clip_norm=3.0, noise_multiplier=NOISE), 0.01)]
    for kind, clip_norm in ((PCDPSGD, 3.0), (PDPSGD, 10.0)):
        for degrees in TILTS:
            label = f"{'PCDP' if kind is PCDPSGD else 'PDP'}, {degrees} degrees"
            make = _fixed(kind, clip_norm, lambda seed, d=degrees: tilted(seed, d))  # type: ignore[misc]
            out.append(Arm("tilt", label, make, at=degrees))
    for k in WIDTHS:
        make = _fixed(PCDPSGD, 3.0, lambda seed, k=k: widened(seed, k), dimension=k)  # type: ignore[misc]
        out.append(Arm("columns", f"PCDP, k = {k}", make, at=k))
    for m, k in POOLS:
        for normalise in (False, True):
            make = _fixed(
                PCDPSGD,
                3.0,
                lambda seed, m=m: public_records(seed, m),  # type: ignore[misc]
                dimension=k,
                normalise=normalise,
            )
            label = f"{'normalised' if normalise else 'raw'}, m = {m}, k = {k}"
            out.append(Arm("public", label, make))
    return out


def _random_arms() -> list[Arm]:
    def gep(seed: int) -> Method:
        return GEP(
            source=RandomSubspace(dimension=CORE, refresh_every=NEVER),
            clip_norm=1.0,
            residual_clip_norm=0.3,
            noise_multiplier=NOISE * 2**0.5,
        )

    def pcdp(seed: int) -> Method:
        return RandomProjection(
            source=RandomSubspace(dimension=CORE, refresh_every=NEVER), clip_norm=3.0, noise_multiplier=NOISE
        )

    return [Arm("random", "PCDP", pcdp), Arm("random", "GEP", gep)]


def _paid_arms() -> list[Arm]:
    def private(kind: type[MomentSubspace] | type[IterationSubspace]) -> Callable[[int], Method]:
        return lambda seed: PCDPSGD(
            source=kind(dimension=2, refresh_every=NEVER, share=0.5, batch_size=RECORDS)
        )

    def released(clip_norm: float) -> Callable[[int], Method]:
        return lambda seed: PCDPSGD(
            source=ReleasedSubspace(dimension=2, history=20, explore_every=2), clip_norm=clip_norm
        )

    out = []
    for epsilon, clip_norm in zip(EPSILONS, (3.0, 10.0), strict=True):
        rows: list[tuple[str, Callable[[int], Method], float]] = [
            ("DP-SGD", lambda seed, clip_norm=clip_norm: DPSGD(clip_norm=clip_norm), 0.01),  # type: ignore[misc]
            ("second moment", private(MomentSubspace), 0.03),
            ("noisy iteration", private(IterationSubspace), 0.03),
            ("released", released(clip_norm), 0.01),
        ]
        part = f"epsilon {epsilon:g}"
        out += [Arm(part, label, make, rate, epsilon) for label, make, rate in rows]
    return out


def arms() -> list[Arm]:
    """All lines of the table."""
    return [*_public_arms(), *_random_arms(), *_paid_arms()]


def measure(arm: Arm, problem: Problem, seed: int, points: int = 10) -> dict[int, float]:
    """Errors along one training on the problem of a seed."""
    return follow(
        arm.make(seed),
        problem,
        sampling=Poisson(250, RECORDS, STEPS),
        budget=None if arm.epsilon is None else Budget(arm.epsilon, DELTA),
        learning_rate=arm.learning_rate,
        seed=seed,
        measure_at=sorted({round(STEPS * k / points) for k in range(points + 1)}),
    )


FOUND: dict[tuple[str, str], tuple[float, float]] = {
    ("tilt", "PCDP, 0 degrees"): (3e-5, 6e-4),
    ("tilt", "PCDP, 5 degrees"): (1e-3, 4e-3),
    ("tilt", "PCDP, 10 degrees"): (5e-3, 0.015),
    ("tilt", "PCDP, 20 degrees"): (0.025, 0.045),
    ("tilt", "PCDP, 45 degrees"): (0.11, 0.2),
    ("tilt", "PDP, 0 degrees"): (4e-4, 5e-3),
    ("tilt", "PDP, 5 degrees"): (2e-3, 8e-3),
    ("tilt", "PDP, 10 degrees"): (5e-3, 0.02),
    ("tilt", "PDP, 20 degrees"): (0.025, 0.05),
    ("tilt", "PDP, 45 degrees"): (0.11, 0.2),
    ("columns", "PCDP, k = 1"): (0.03, 0.07),
    ("columns", "PCDP, k = 2"): (3e-6, 1e-4),
    ("columns", "PCDP, k = 10"): (3e-5, 6e-4),
    ("columns", "PCDP, k = 50"): (5e-4, 2.5e-3),
    ("columns", "PCDP, k = 100"): (1e-3, 6e-3),
    ("columns", "PCDP, k = 200"): (5e-3, 0.025),
    ("columns", "PCDP, k = 500"): (0.02, 0.06),
    ("public", "raw, m = 100, k = 10"): (0.2, 0.2895),
    ("public", "raw, m = 400, k = 10"): (0.012, 0.06),
    ("public", "raw, m = 400, k = 100"): (0.012, 0.05),
    ("public", "raw, m = 1600, k = 2"): (4e-3, 0.02),
    ("public", "normalised, m = 100, k = 10"): (0.02, 0.06),
    ("public", "normalised, m = 400, k = 10"): (8e-3, 0.03),
    ("public", "normalised, m = 400, k = 100"): (8e-3, 0.03),
    ("public", "normalised, m = 1600, k = 2"): (2e-3, 9e-3),
}


def verdicts(ends: Ends) -> list[Verdict]:
    """The sentences that were expected to hold, by (part, label) -> median error at the end."""
    plain = ends["all directions", "DP-SGD"]
    normalising = min(
        ends["public", f"raw, m = {m}, k = {k}"] / ends["public", f"normalised, m = {m}, k = {k}"]
        for m, k in POOLS
    )
    out = [
        Verdict.at_most(
            "10 degrees off, PCDP is ahead of DP-SGD (ratio)", ends["tilt", "PCDP, 10 degrees"] / plain, 1
        ),
        Verdict.at_least(
            "20 degrees off, PCDP is behind DP-SGD (ratio)", ends["tilt", "PCDP, 20 degrees"] / plain, 1
        ),
        Verdict.at_least("normalised public gradients are ahead of raw ones (least ratio)", normalising, 1),
        Verdict.within("random directions: PCDP stays where it began", ends["random", "PCDP"], 0.25, 0.2895),
        Verdict.within("all directions: DP-SGD ends at", plain, 0.02, 0.045),
        Verdict.within(
            "random directions: GEP, which releases the residual too, ends at",
            ends["random", "GEP"],
            0.025,
            0.06,
        ),
        Verdict.at_least(
            "PDP over PCDP, no tilt", ends["tilt", "PDP, 0 degrees"] / ends["tilt", "PCDP, 0 degrees"], 4
        ),
        Verdict.at_least(
            "few long public rows: raw over normalised",
            ends["public", "raw, m = 100, k = 10"] / ends["public", "normalised, m = 100, k = 10"],
            4,
        ),
    ]
    # the bars of these were set after the runs that the docs report
    for (part, label), (low, high) in FOUND.items():
        out.append(Verdict.within(f"{part}: {label}, ends at", ends[part, label], low, high))
    for epsilon in EPSILONS:
        part = f"epsilon {epsilon:g}"
        best = min(("second moment", "noisy iteration", "released"), key=lambda label: ends[part, label])
        ratio = ends[part, best] / ends[part, "DP-SGD"]
        for label in ("second moment", "noisy iteration", "released"):
            over = ends[part, label] / ends[part, "DP-SGD"]
            sentence = f"{label}, over DP-SGD, {part}"
            out.append(Verdict.within(sentence, over, *((1.02, 3) if label == "released" else (1.3, 7))))
        out.append(Verdict.within(f"DP-SGD ends at, {part}", ends[part, "DP-SGD"], 0.005, 0.04))
        out.append(
            Verdict.at_least(
                f"no private or released directions beat DP-SGD (best, {best}, ratio), {part}", ratio, 1
            )
        )
    return out


def _curves(runs: Mapping[tuple[str, str], tuple[Arm, list[dict[int, float]]]]) -> list[Curve]:
    """Over the tilt and the number of columns, else over the steps."""
    out = []
    spread = {key: sorted(run[STEPS] for run in found) for key, (_, found) in runs.items()}
    plain = spread["all directions", "DP-SGD"]
    for part, labels in (("tilt", ("PCDP", "PDP")), ("columns", ("PCDP",))):
        panel = {"tilt": "tilt of the directions, degrees", "columns": "number of columns"}[part]
        for label in labels:
            keys = [key for key in runs if key[0] == part and key[1].startswith(label + ",")]
            x = [runs[key][0].at for key in keys]
            values = [spread[key] for key in keys]
            out.append(_line(label, x, values, panel))
        ends = [x[0], x[-1]]
        out.append(_line("DP-SGD", ends, [plain, plain], panel))
    for (part, label), (_, found) in runs.items():
        if part not in ("tilt", "columns", "all directions"):
            out.append(Curve.of_seeds(label, found, f"{part}, over the steps"))
    return out


def _line(label: str, x: Sequence[float], values: Sequence[Sequence[float]], panel: str) -> Curve:
    middle = [statistics.median(v) for v in values]
    return Curve(label, x, middle, [min(v) for v in values], [max(v) for v in values], panel)


def _draw(findings: Findings) -> Figure:
    from reproduction.figures import curves_figure

    return curves_figure(findings.curves, x_label="", y_label="distance to the answer")


def _run(seeds: Sequence[int], progress: Progress) -> Findings:
    lines = arms()
    paths: list[list[dict[int, float]]] = [[] for _ in lines]
    for position, seed in enumerate(seeds):
        problem = means(seed)  # the costly part, shared by all methods
        for number, arm in enumerate(lines):
            paths[number].append(measure(arm, problem, seed))
            done = position * len(lines) + number + 1
            progress(done, len(lines) * len(seeds), f"{arm.part}: {arm.label}")
    rows: list[list[str | float | int | None]] = []
    runs, ends = {}, {}
    for arm, found in zip(lines, paths, strict=True):
        last = [path[STEPS] for path in found]
        runs[arm.part, arm.label] = (arm, found)
        ends[arm.part, arm.label] = statistics.median(last)
        rows.append([arm.part, arm.label, statistics.median(last), min(last), max(last)])
    note = f"{len(seeds)} seeds; median distance to the answer, 0.29 at the start, and the range."
    table = Table(["part", "method", "error", "lowest", "highest"], rows, note)
    return Findings(table, _curves(runs), verdicts(ends), numbers=ends)


EXPERIMENT = PaperExperiment(
    name="pcdp-sgd-subspaces",
    title="Where the directions of a projection come from",
    summary="PCDP-SGD with tilted, too many, public, random, released, private directions, GEP with random "
    "ones, beside DP-SGD. Expected: normalised public gradients ahead of raw ones; behind DP-SGD from about "
    "18 degrees; no private or released directions ahead of it.",
    run=_run,
    draw=_draw,
    default_seeds=3,
)
