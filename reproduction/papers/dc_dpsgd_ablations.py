"""DC-DPSGD's ablations: does the dimension k, the index theta or the split of epsilon change anything?

The paper varies one of them at a time, around k = 200, theta = 2 and epsilon = 4 (trace) + 4 (gradient), and
prints accuracies that rise with k and theta and are highest at the even split (`PRINTED`, for Fashion-MNIST).
The trace carries no information if the columns have symmetric laws (`tests/methods/test_tail_scores.py`), so
that neither k nor theta should matter, and of the split only what it leaves to the gradient.

Two problems, three forms; on images the values in the middle (k = 150, theta = 1) are left out.

=============  ==============================================================================================
regression     as in `dc_dpsgd`, skewed noise, but 250 features, so that there is room for 200 columns
images         Fashion-MNIST, the first 10,000 records, the network of 26,010 parameters, 200 steps of 128
Algorithm 1    as printed, with public counts; on images its columns are products vec(u w^T)
the program    of the authors: positive entries with theta = 1 whatever is asked for, one parameter tensor
top share      the library's, by the trace: a true epsilon of 8, all of it for the sum; on the regression only
=============  ==============================================================================================

"None" is not explained in the paper; here it is the same form with labels by lot. DP-SGD stands beside them,
at epsilon 8; on images at c_2, as in the paper.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from equipoise.app.models import cnn_tanh
from equipoise.data import load
from equipoise.methods import DCDPSGD, DPSGD, Method, Random, TopShare, Trace, published
from equipoise.privacy import Budget, Poisson
from equipoise.published.dc_dpsgd import average_noise, printed_multiplier, share_multipliers
from reproduction.findings import Findings, PaperExperiment, Progress, Site, Table, Verdict
from reproduction.harness import Problem, classification, follow
from reproduction.papers import dc_dpsgd

__all__ = ["ARMS", "EXPERIMENT", "PRINTED", "Arm", "measure", "verdicts"]

BUDGET, FRACTION = Budget(8.0, 1e-5), 0.1
TUNING_SEED = 100
ALGORITHM, PROGRAM, RULE, DP_SGD = "Algorithm 1", "the program", "top share", "DP-SGD"
RECORDS, STEPS = {"regression": 10_000, "images": 10_000}, {"regression": 400, "images": 200}
BATCH = {"regression": 250, "images": 128}
CLIP_NORM = {
    ("regression", ALGORITHM): 10.0,
    ("regression", PROGRAM): 320.0,
    ("regression", RULE): 40.0,
    ("regression", DP_SGD): 100.0,
}
"""c_1, that of `dc_dpsgd` but for the top share's, the best of four; 1 on images, as printed."""
RATES = {"regression": (0.001, 0.003, 0.01, 0.03), "images": (0.1, 1.0)}
"""On images those of the paper, which prints both for one setting."""
PRINTED = {
    ("k", "none"): 85.78, ("k", "100"): 87.61, ("k", "150"): 87.71, ("k", "200"): 87.80,
    ("split", "2+6"): 87.70, ("split", "4+4"): 87.80, ("split", "6+2"): 87.26,
    ("theta", "1/2"): 87.40, ("theta", "1"): 87.55, ("theta", "2"): 87.80,
}  # fmt: skip
"""Accuracy on Fashion-MNIST in percent."""
USUAL = {"k": "200", "split": "4+4", "theta": "2"}


@dataclass(frozen=True)
class Arm:
    """A form with one setting that differs from the usual ones; `what` is "" for those."""

    part: str
    form: str
    what: str = ""
    value: str = ""

    @property
    def clip_norm(self) -> float:
        """c_1; DP-SGD's own."""
        if self.part == "images":
            return 0.1 if self.form == DP_SGD else 1.0
        return CLIP_NORM[self.part, self.form]

    @property
    def sampling(self) -> Poisson:
        """Of the whole training."""
        return Poisson(BATCH[self.part], RECORDS[self.part], STEPS[self.part])

    def method(self) -> Method:
        """With its noise, or to be calibrated to the budget."""
        if self.form == DP_SGD:
            return DPSGD(clip_norm=self.clip_norm)
        here = {**USUAL, self.what: self.value}
        theta, share = {"1/2": 0.5, "1": 1.0, "2": 2.0}[here["theta"]], float(here["split"][0]) / 8
        if here["k"] == "none":
            return self._by_lot(share)
        structure: Any = "dense" if self.part == "regression" else "khatri_rao"
        trace = Trace(dimension=int(here["k"]), tail_index=theta, structure=structure)
        both: dict[str, Any] = {"clip_norm": self.clip_norm, "tail_fraction": FRACTION}
        if self.form == RULE:
            return DCDPSGD(**both, variant=TopShare(), score=trace)
        variant: Any = "alg1" if self.form == ALGORITHM else "code"
        return published.DCDPSGD(**both, variant=variant, trace=trace, trace_share=share)

    def _by_lot(self, share: float) -> Method:
        """The form's thresholds and noise, for the tail that a lot decides."""
        tail, body = self.clip_norm, self.clip_norm / 10
        both: dict[str, Any] = {"clip_norm": tail, "tail_fraction": FRACTION, "score": Random()}
        both["variant"] = TopShare()
        if self.form == RULE:
            return DCDPSGD(**both)
        sigma, _ = share_multipliers(BUDGET, self.sampling, share)
        if self.form == ALGORITHM:
            noise = printed_multiplier(sigma, tail, body, FRACTION, BATCH[self.part])
        else:
            noise = average_noise(sigma, tail, body, FRACTION) / (2 * tail - body)
        return DCDPSGD(**both, noise_multiplier=noise)


def _arms() -> list[Arm]:
    arms = []
    for part in ("regression", "images"):
        arms.append(Arm(part, DP_SGD))
        for form in (ALGORITHM, PROGRAM, *([RULE] if part == "regression" else [])):
            arms.append(Arm(part, form))
            # the values in the middle are left out where a run takes longest
            values = [
                key for key in PRINTED if part == "regression" or key not in (("k", "150"), ("theta", "1"))
            ]
            for what, value in values:
                # the program has no theta, the top share spends nothing on the trace
                idle = {PROGRAM: "theta", RULE: "split"}.get(form)
                if what != idle and value != USUAL[what]:
                    arms.append(Arm(part, form, what, value))
    return arms


ARMS = _arms()


def _regression(seed: int) -> Problem:
    return dc_dpsgd.regression("skewed", seed, RECORDS["regression"], features=250)


@cache
def _images(data_dir: str | None) -> Problem:
    found = load("fashion-mnist", data_dir)
    train, judged = found.train[torch.arange(RECORDS["images"])], found.test[torch.arange(len(found.test))]

    def model() -> nn.Module:
        return cnn_tanh(found)

    return classification(
        "images",
        model,
        {"x": train["input"], "y": train["label"]},
        {"x": judged["input"], "y": judged["label"]},
    )


def measure(arm: Arm, rate: float, seed: int, data_dir: str | None) -> dict[str, float]:
    """The excess risk (regression) or the accuracy in percent (images) of one training."""
    steps, method = STEPS[arm.part], arm.method()
    found = follow(
        method,
        _regression(seed) if arm.part == "regression" else _images(data_dir),
        sampling=arm.sampling,
        budget=BUDGET if getattr(method, "noise_multiplier", None) is None else None,
        learning_rate=rate,
        seed=seed,
        measure_at=[steps],
        average_last=steps // 2 if arm.part == "regression" else None,
    )[steps]
    return {"result": found if arm.part == "regression" else 100 - 100 * found}


def _run(seeds: Sequence[int], progress: Progress, site: Site) -> Findings:
    def finish(planned: Sequence[tuple[Arm, float, int]]) -> list[float | None]:
        runs = [
            (
                {**asdict(arm), "clip norm": arm.clip_norm, "rate": rate, "seed": seed},
                partial(measure, arm, rate, seed, site.data_dir),
            )
            for arm, rate, seed in planned
        ]  # fmt: skip
        return [None if found is None else found["result"] for found in site.kept.finish(runs, progress)]

    rate, usual = 0.0, [0.0]
    rows: list[list[str | float | int | None]] = []
    numbers: dict[tuple[str, str, str, str], float] = {}
    for arm in ARMS:
        if not arm.what:  # the form's usual settings, which come first
            tried = finish([(arm, each, TUNING_SEED) for each in RATES[arm.part]])
            if None in tried:
                break
            better: Callable[..., Any] = min if arm.part == "regression" else max
            rate = RATES[arm.part][tried.index(better(found for found in tried if found is not None))]
        runs = [found for found in finish([(arm, rate, seed) for seed in seeds]) if found is not None]
        if len(runs) < len(seeds):
            break
        usual = usual if arm.what else runs
        gain = statistics.median(_gain(arm.part, *pair) for pair in zip(runs, usual, strict=True))
        if arm.what:
            numbers[f"{arm.part}, paired", arm.form, arm.what, arm.value] = gain
        else:
            numbers[arm.part, arm.form, "", ""] = statistics.median(runs)
        printed = PRINTED.get((arm.what, arm.value)) if arm.part == "images" else None
        rows.append(
            [arm.part, arm.form, arm.what, arm.value, rate, statistics.median(runs), min(runs), max(runs),
             gain, printed, len(runs)]
        )  # fmt: skip
    note = (
        "Excess risk (regression, less is better), test accuracy in percent (images): medians, range. "
        "Paired: median over the seeds of the ratio to, or difference from, the usual settings."
    )
    judged = verdicts(numbers) if len(rows) == len(ARMS) else []
    return Findings(Table(COLUMNS, rows, note), verdicts=judged, numbers=numbers)


COLUMNS = [
    "problem", "form", "varied", "value", "rate", "median", "lowest", "highest", "paired", "printed", "seeds",
]  # fmt: skip


def _gain(part: str, value: float, usual: float) -> float:
    return value / usual if part == "regression" else value - usual


def verdicts(numbers: Mapping[tuple[str, str, str, str], float]) -> list[Verdict]:
    """The paper's claims, set before the runs, and the proof's.

    Args:
        numbers: (problem, form, "", "") -> median at the usual settings; (problem + ", paired", form, what,
            value) -> median over the seeds of what another value changes: a ratio of risks, or points.
    """
    out = []
    for form in (ALGORITHM, PROGRAM):
        for what, other in CLAIMS:
            if (form, what) == (PROGRAM, "theta"):
                continue
            printed = PRINTED[what, USUAL[what]] - PRINTED[what, other]
            words = f"{what} {USUAL[what]} less {other} in points (the paper: {printed:+.2f})"
            gain = -numbers["images, paired", form, what, other]
            out.append(Verdict.at_least(f"images, {form}: {words}", gain, printed / 2))
    for part, form, most in (
        ("regression", ALGORITHM, 1.02), ("regression", RULE, 1.03), ("images", ALGORITHM, 3.0),
    ):  # fmt: skip
        same = [
            value
            for (here, by, what, _), value in numbers.items()
            if (here, by) == (f"{part}, paired", form) and what != "split"
        ]
        if part == "images":
            sentence = f"images, {form}: k and theta change nothing (most points)"
            out.append(Verdict.at_most(sentence, max(map(abs, same)), most))
        else:
            sentence = f"regression, {form}: k and theta change nothing (largest over smallest risk)"
            out.append(Verdict.at_most(sentence, max([1.0, *same]) / min([1.0, *same]), most))
    for value, low, high in (("2+6", 0.0, 1.0), ("6+2", 1.0, 1.04)):
        sentence = (
            f"regression, {ALGORITHM}: the risk at {value} over that at 4+4 follows the gradient's noise"
        )
        out.append(
            Verdict.within(sentence, numbers["regression, paired", ALGORITHM, "split", value], low, high)
        )
    # what came out: these bars were set after the runs that the docs report
    for key, (low, high) in FOUND.items():
        part, form, what, value = key
        sentence = f"{part}, {form}{', ' * bool(what)}{what} {value}".rstrip() + ", as before"
        out.append(Verdict.within(sentence, numbers[key], low, high))
    return out


CLAIMS = (("k", "none"), ("theta", "1/2"), ("split", "6+2"), ("split", "2+6"))
FOUND = {
    ("regression", DP_SGD, "", ""): (0.25, 0.4),
    ("regression", ALGORITHM, "", ""): (0.9, 0.99),
    ("regression", PROGRAM, "", ""): (0.37, 0.5),
    ("regression", RULE, "", ""): (0.6, 0.95),
    ("regression, paired", PROGRAM, "k", "none"): (1.06, 1.35),
    ("regression, paired", PROGRAM, "k", "100"): (0.97, 1.03),
    ("regression, paired", PROGRAM, "k", "150"): (0.97, 1.03),
    ("regression, paired", PROGRAM, "split", "2+6"): (0.97, 1.03),
    ("regression, paired", PROGRAM, "split", "6+2"): (0.98, 1.04),
    ("images", DP_SGD, "", ""): (53.0, 64.0),
    ("images", ALGORITHM, "", ""): (30.0, 50.0),
    ("images", PROGRAM, "", ""): (64.5, 74.0),
    ("images, paired", ALGORITHM, "split", "2+6"): (0.0, 5.0),
    ("images, paired", ALGORITHM, "split", "6+2"): (-8.0, 0.0),
    ("images, paired", PROGRAM, "k", "none"): (-6.0, -0.5),
    ("images, paired", PROGRAM, "k", "100"): (-2.0, 2.0),
    ("images, paired", PROGRAM, "split", "2+6"): (-2.0, 2.0),
    ("images, paired", PROGRAM, "split", "6+2"): (-2.0, 2.0),
}


EXPERIMENT = PaperExperiment(
    name="dc-dpsgd-ablations",
    title="DC-DPSGD's ablations: dimension, tail index and split of epsilon",
    summary="Algorithm 1, the authors' program and the library's top share at the printed k, theta "
    "and split of epsilon 8, on a regression and on Fashion-MNIST. Expected by the proof: k and theta change "
    "nothing. Goes on where it was stopped.",
    run_on=_run,
    default_seeds=5,
)
