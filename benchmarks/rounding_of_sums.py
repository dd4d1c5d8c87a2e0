"""How far a record in front of all others moves the clipped sum, in clip norms: 1 but for rounding.

    python benchmarks/rounding_of_sums.py [--records 100000 400000] [--rows 78 2048]

A record in front moves each other record into the next place, so that all products round anew. Two rows in
turn are the worst case found: the roundings of all products have one sign.
"""

from __future__ import annotations

import argparse
import warnings

import torch
from torch import nn

import equipoise as eq
from equipoise.privacy.private import exact

BOUND = 1.0


def sum_of(records: torch.Tensor, rows: int) -> torch.Tensor:
    """The sum of a full draw before noise, float64 [P]."""
    torch.manual_seed(0)
    model = nn.Linear(records.shape[1], 1)
    met = []

    class Looking(eq.PrivateTraining):
        class ledger_class(eq.privacy.Ledger):
            def book(self, draw, sums, parts=(), checks=()):
                (bounded,) = sums.values()
                met.append(torch.cat([exact(value).double().flatten() for value in bounded.value.values()]))
                return super().book(draw, sums, parts, checks)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = Looking(
            model,
            torch.optim.SGD(model.parameters(), lr=0.0),
            loss=lambda model, batch: (model(batch["x"])[:, 0] - batch["x"].sum(1) - 30).square(),
            data=eq.Data({"x": records}, microbatch_size=rows),
            sampling=eq.FullBatch(len(records), 1),
            method=eq.DPSGD(clip_norm=BOUND, noise_multiplier=1.0),
            run=eq.Run(reproducible=True),
        )
        training.take_step()
    return met[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", nargs="+", type=int, default=[100_000, 400_000])
    parser.add_argument("--rows", nargs="+", type=int, default=[78, 2048])
    given = parser.parse_args()
    print("| records | rows of a microbatch | random rows | two rows in turn |\n|--:|--:|--:|--:|")
    generator = torch.Generator().manual_seed(4)
    for count in given.records:
        random = torch.rand(count, 4, generator=generator) + 0.5
        for rows in given.rows:
            moved = []
            for data in (random, random[torch.arange(count) % 2]):
                front = torch.cat([data[:1] * 1.1, data])
                moved.append(float((sum_of(front, rows) - sum_of(data, rows)).norm()) / BOUND)
            print(f"| {count:,} | {rows:,} | {moved[0]:.6f} | {moved[1]:.6f} |", flush=True)


if __name__ == "__main__":
    main()
