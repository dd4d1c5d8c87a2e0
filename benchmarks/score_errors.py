"""How far private scores are from the truth, by how many records are held apart.

    OMP_NUM_THREADS=1 python benchmarks/score_errors.py   # half a minute, docs/how-to/private-scores.md

Drawn records of two classes: an accuracy of 0.8, an AUC of 0.85. Ten evaluations at epsilon 3 and delta 1e-5
have a noise multiplier of 4.4. Beside the deviation of the noised scores of many data sets stands the error
that each of them states, in the middle.
"""

from __future__ import annotations

import statistics

import torch

import equipoise as eq
from equipoise.privacy.bounds.counts import histogram
from equipoise.privacy.private import Private, unwrap

DATA_SETS, NOISE = 200, 4.4
APART = {"accuracy": 1.6832, "auc": 1.4657}  # between the classes' normal laws of logits


def errors(metric: str, records: int) -> tuple[float, float]:
    """The deviation of the noised scores of many data sets, and the median of the errors that they state."""
    score, generator = eq.Score(metric, share=0.1), torch.Generator().manual_seed(records)
    found = []
    for _ in range(DATA_SETS):
        labels = torch.arange(records) % 2
        logits = torch.randn(records, generator=generator) + APART[metric] * (labels - 0.5)
        sums = histogram(Private(score.metric.places(logits, labels).float()), score.metric.bins)
        (counts,) = map(unwrap, sums.value.values())
        noise = torch.randn(counts.shape, generator=generator, dtype=torch.double)
        found.append([*score.read(counts + NOISE * noise, NOISE).values()])
    values, stated = zip(*found, strict=True)
    return statistics.stdev(values), statistics.median(stated)


if __name__ == "__main__":
    for metric in APART:
        for records in (200, 400, 1000):
            deviation, stated = errors(metric, records)
            print(
                f"{metric:8} {records:5} records: deviation {deviation:.3f}, stated {stated:.3f}", flush=True
            )
