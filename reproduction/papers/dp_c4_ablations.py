"""The ablations of DP-C4's appendix E, on Mushroom: C, C1 x C2, the four routines, the anchor batch, and p.

The paper shows them on CIFAR-10 with a ResNet20 at a printed epsilon of 5. Here a logistic regression on
Mushroom takes them, with the other settings of the paper's main table (`dp_c4_mushroom`) and the largest step
size of its grid, with the noise of Theorem 3 and with that of a true epsilon of 1, in two codings. As many
passes are taken as there: T = 50 N / (|S| + p |D'|).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.data import mushroom
from equipoise.methods import DPC4Plus
from equipoise.methods.anchored import AtRandom
from equipoise.methods.base import Setting
from equipoise.methods.dp_c4 import ReleasedNorm
from equipoise.privacy import Poisson
from equipoise.published.dp_c4 import published_noise_multipliers
from reproduction.findings import Curve, Findings, PaperExperiment, Progress, Site, Table, Verdict, reported
from reproduction.papers.dp_c4_mushroom import (
    ANCHOR_BATCH,
    BATCH,
    BUDGET,
    PASSES,
    PERIOD,
    RATES,
    THEOREM,
    TRUE,
    Sets,
    accuracy,
    noise_of,
    steps_of,
)
from reproduction.papers.linear_trainings import (
    PLUS,
    RAW,
    SGD,
    Arm,
    Design,
    LinearRecords,
    Noise,
    simulate,
)

__all__ = ["EXPERIMENT", "verdicts"]

CODED = ("one-hot", "norm 1")
RATE = RATES[0]
SIZES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
ROUTINES = (1, 2, 3, 4)
ANCHOR_BATCHES = (512, 1024, 2048, 4096, 6499)  # the paper's largest is 8192
PERIODS = (2, 4, 8, 16, 32)
BOTH = (RAW, PLUS)
KEPT = {
    "C": ("0.125", "1", "64"),
    "routine": ("1", "2", "3", "4"),
    "anchor batch": ("512", "4096"),
    "1 / p": ("2", "8", "32"),
    "C1 x C2": ("1 x 1", "0.125 x 1", "1 x 0.125", "64 x 64"),
}
"""The values that verdicts speak of."""

SPREAD = {THEOREM: 15.0, TRUE: 4.0}
"""Points around the medians of the docs; set after runs with two sets of seeds."""

Part = tuple[LinearRecords, LinearRecords]


def design_of(
    population: int, routine: int = 1, anchor_batch: int = ANCHOR_BATCH, period: int = PERIOD
) -> Design:
    """As many steps as fit into the passes."""
    steps = round(PASSES * population / (BATCH + anchor_batch / period))
    return Design(steps, BATCH, anchor_batch, period, routine)


def noise_for(kind: str, design: Design, population: int) -> Noise:
    """Theorem 3's, or the library's for the same releases."""
    takes_next = design.routine in (3, 4)
    if kind == THEOREM:
        return Noise(
            *published_noise_multipliers(
                BUDGET.epsilon,
                BUDGET.delta,
                steps=design.steps,
                batch=BATCH,
                anchor_batch=design.anchor_batch,
                probability=1 / design.period,
                takes_next=takes_next,
            )
        )
    method = DPC4Plus(
        anchor=ReleasedNorm(),
        anchor_batch_size=float(design.anchor_batch),
        schedule=AtRandom(design.period, takes_next=takes_next),
    )
    setting = Setting(sampling=Poisson(BATCH, population, design.steps), budget=BUDGET)
    z = {release.name: release.noise_multiplier for release in method.plan(setting).releases.releases}
    return Noise(z["coupled"], z["anchor"])


def of_arms(
    method: str, kind: str, part: Part, arms: Mapping[str, Arm], seeds: Sequence[int]
) -> dict[str, float]:
    """Median accuracies of settings that share draws."""
    population = len(part[0].y)
    design = design_of(population)
    noise = noise_for(kind, design, population)
    if method == SGD:
        design = Design(steps_of(SGD, population), BATCH, ANCHOR_BATCH, PERIOD)
        noise, _ = noise_of(SGD, kind, population)
    judged = partial(accuracy, part[1])
    found = [
        simulate(method, part[0], list(arms.values()), noise, design, seed, judged)[design.steps]
        for seed in seeds
    ]
    return {name: statistics.median(one) for name, one in zip(arms, zip(*found, strict=True), strict=True)}


def of_design(
    method: str, kind: str, part: Part, given: Mapping[str, int], seeds: Sequence[int]
) -> dict[str, float]:
    """The median accuracy of a routine, an anchor batch or a period."""
    population = len(part[0].y)
    design = design_of(population, **given)
    noise, arms = noise_for(kind, design, population), [Arm(RATE)]
    judged = partial(accuracy, part[1])
    found = [simulate(method, part[0], arms, noise, design, seed, judged)[design.steps][0] for seed in seeds]
    return {str(*given.values()): statistics.median(found)}


def tables() -> list[tuple[str, str, Callable[..., dict[str, float]], Mapping[str, Any]]]:
    """Ablation, method, and what measures it with which settings."""
    c = {f"{size:g}": Arm(RATE, clip_norm=size) for size in SIZES}
    pairs = itertools.product(SIZES, SIZES)
    scales = {f"{c1:g} x {c2:g}": Arm(RATE, c1=c1, c2=c2) for c1, c2 in pairs}
    found: list[tuple[str, str, Callable[..., dict[str, float]], Mapping[str, Any]]] = []
    found += [("C", method, of_arms, c) for method in (SGD, *BOTH)]
    for name, field, values in (
        ("routine", "routine", ROUTINES),
        ("anchor batch", "anchor_batch", ANCHOR_BATCHES),
        ("1 / p", "period", PERIODS),
    ):
        found += [(name, method, of_design, {field: value}) for method in BOTH for value in values]
    return found + [("C1 x C2", method, of_arms, scales) for method in BOTH]


def _run(seeds: Sequence[int], progress: Progress, site: Site) -> Findings:
    dataset = mushroom(site.data_dir or "data")
    sets = {coding: Sets.of(dataset, coding).test for coding in CODED}
    runs = [(coding, kind, *entry) for entry in tables() for coding in CODED for kind in (THEOREM, TRUE)]
    results = site.kept.finish(
        [
            (
                {"coding": coding, "noise": kind, "ablation": name, "method": method,
                 "given": " ".join(given) if measure is of_arms else dict(given), "seeds": list(seeds)},
                partial(measure, method, kind, sets[coding], given, seeds),
            )
            for coding, kind, name, method, measure, given in runs
        ],
        progress,
    )  # fmt: skip
    numbers: dict[tuple[str, ...], float] = {}
    for (coding, kind, name, method, *_), result in zip(runs, results, strict=True):
        numbers |= {(coding, kind, name, method, value): one for value, one in (result or {}).items()}
    rows: list[Sequence[str | float | int | None]] = [
        [*key, round(value, 2)] for key, value in numbers.items()
    ]
    columns = ["coding", "noise", "ablation", "method", "value", "accuracy"]
    note = f"test accuracy in percent, medians of {len(seeds)} trainings"
    by_clip_norm = [
        Curve(
            method,
            SIZES,
            [100 - numbers[coding, kind, "C", method, f"{c:g}"] for c in SIZES],
            panel=f"{coding}, {kind}",
        )
        for coding in CODED
        for kind in (THEOREM, TRUE)
        for method in (SGD, *BOTH)
        if (coding, kind, "C", method, "1") in numbers
    ]
    return Findings(
        Table(columns, rows, note), by_clip_norm, verdicts(numbers) if None not in results else [], numbers
    )


def _draw(findings: Findings) -> Any:
    from reproduction.figures import curves_figure

    return curves_figure(findings.curves, x_label="C", y_label="test error in percent")


def verdicts(numbers: Mapping[tuple[str, ...], float]) -> list[Verdict]:
    """What the paper reads off its tables, by (coding, noise, ablation, method, value) -> accuracy."""
    out = []
    for coding, kind in itertools.product(CODED, (THEOREM, TRUE)):
        here = {key[2:]: value for key, value in numbers.items() if key[:2] == (coding, kind)}
        part = f"{coding}, {kind}"
        fall = here["C", SGD, "1"] - here["C", SGD, "64"]
        out.append(
            Verdict.at_least(f"{part}: DP-SGD falls from C = 1 to 64, points (the paper: 42)", fall, 5)
        )
        for method in judged_at(kind):
            ahead, anchors = {RAW: ("8.8", "17.7"), PLUS: ("11.5", "23.4")}[method]
            lead = here["C", method, "1"] - here["C", SGD, "1"]
            out.append(
                Verdict.at_least(f"{part}: {method} less DP-SGD at C = 1 (the paper: +{ahead})", lead, 0)
            )
            found = [here["routine", method, value] for value in KEPT["routine"]]
            sentence = f"{part}: {method}, routines are alike, points between (the paper: below 1)"
            out.append(Verdict.at_most(sentence, max(found) - min(found), 1))
            one = here["C1 x C2", method, "1 x 1"]
            small = here["C1 x C2", method, "0.125 x 1"] - one
            out.append(Verdict.at_least(f"{part}: {method}, a small C1 is harmless, points", small, -2))
            small = here["C1 x C2", method, "1 x 0.125"] - one
            out.append(Verdict.at_most(f"{part}: {method}, a small C2 is fatal, points", small, -5))
            gain = here["anchor batch", method, "4096"] - here["anchor batch", method, "512"]
            sentence = f"{part}: {method}, 4,096 in an anchor less 512 (the paper: +{anchors})"
            out.append(Verdict.at_least(sentence, gain, 0))
            ends = max(here["1 / p", method, value] for value in ("2", "32"))
            inside = here["1 / p", method, "8"] - ends
            out.append(Verdict.at_least(f"{part}: {method}, p = 1/8 less the better of 1/2, 1/32", inside, 0))
    for key, before in reported("dp-c4-ablations").items():
        low, high = before - SPREAD[key[1]], before + SPREAD[key[1]]
        out.append(Verdict.within(f"{', '.join(key)}: as before", numbers[key], low, high))
    return out


def judged_at(kind: str) -> tuple[str, ...]:
    """With Theorem 3's noise DP-C4+ ends so near to a model at its start that no verdict tells them apart."""
    return BOTH if kind == TRUE else (RAW,)


EXPERIMENT = PaperExperiment(
    name="dp-c4-ablations",
    title="DP-C4's ablations, on Mushroom: C, C1 x C2, routines, anchor batch, p",
    summary="Logistic regression on Mushroom in place of CIFAR-10. Claimed: DP-SGD falls with C and DP-C4 "
    "does not; small C1 is harmless and small C2 fatal; routines are alike; anchor batch and p have a best "
    "value inside their range.",
    run_on=_run,
    draw=_draw,
    default_seeds=3,
)
