"""Ranges of a table's numbers by one noised, booked histogram over a public grid.

A row adds m^(-1/2) to one cell of each of m columns, so that its gradient for the loss -sum(cells) has length
1 at most: a full batch of DP-SGD is the histogram, with noise of multiplier z in each cell. A range goes from
the first to the last cell that holds more than 4 standard deviations of the noise; of empty ones, one in
30,000 does.
"""

from __future__ import annotations

import math
import re
import warnings
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn

from equipoise._files import schema_file, write_atomically
from equipoise.app.default_settings import default_delta
from equipoise.app.option_checks import SettingsError
from equipoise.data.readers.schema import TO_FILL_IN, cells_of, read_schema
from equipoise.methods import DPSGD
from equipoise.privacy import Budget, FullBatch
from equipoise.training import PrivateTraining, Run

_STEPS = [digit * 10.0**power for power in range(-3, 10) for digit in (1, 2, 5)]
GRID = torch.tensor([*(-step for step in reversed(_STEPS)), 0.0, *_STEPS], dtype=torch.double)
"""0, and 1, 2 and 5 times powers of ten, from 0.001 to 5e9 and below 0; the ends hold what lies beyond."""


def fill_in_ranges(
    table: str, schema: str | None, epsilon: float, journal: str
) -> dict[str, tuple[float, float]]:
    """Write noised ranges into a schema where it leaves them to be filled in, unless noise drowns a column.

    Args:
        table, schema: the files.
        epsilon: the budget of all runs in the journal, at the delta of the population.
        journal: the file in which the release is booked.

    Raises:
        SettingsError: no range is left to be filled in, or the population is.
        DataFileError: the table or the schema cannot be used.
    """
    path = Path(schema or schema_file(table))
    values = read_schema(path)
    columns, population = values.get("columns", {}), values.get("population")
    left = [name for name, column in columns.items() if TO_FILL_IN in (column.get("low"), column.get("high"))]
    if not left or not isinstance(population, int):
        raise SettingsError(
            f"the schema {str(path)!r} leaves no range of a number to be filled in, or no population is "
            "stated. That public number comes first: population = ..."
        )
    numbers = []
    for name, cells in zip(left, map(pd.Series, cells_of(table, values, left)), strict=True):
        missing = cells.isin(columns[name].get("missing", values.get("missing", ())))
        numbers.append(pd.to_numeric(cells.mask(missing), errors="coerce").to_numpy(float))
    counts, noise = histogram(torch.tensor(numbers), population, epsilon, journal)
    found: dict[str, tuple[float, float]] = {}
    for name, held in zip(left, counts[:, :-1] > 4 * noise, strict=True):
        if bool(held.any()):  # else noise drowns it, and it stays to be filled in
            at = held.nonzero().flatten()
            found[name] = (float(GRID[at[0]]), float(GRID[at[-1] + 1]))
    open_ = [(name, key) for name in left for key, end in columns[name].items() if end == TO_FILL_IN]
    ends = (
        f"{found[name][key == 'high']:.10g}" if name in found else f'"{TO_FILL_IN}"' for name, key in open_
    )
    place = rf'(\b(?:low|high)\s*=\s*)"{TO_FILL_IN}"'  # they stand in the order of the columns
    text = re.sub(place, lambda match: match[1] + next(ends), path.read_text("utf-8"))
    write_atomically(path, text.encode(), mode=0o644)
    return found


def histogram(numbers: Tensor, population: int, epsilon: float, journal: str | None) -> tuple[Tensor, float]:
    """Noised cells [columns, cells] of numbers [columns, rows], NaN in the last, and the noise in each."""
    columns, count = len(numbers), len(GRID)
    places = torch.bucketize(numbers, GRID[1:-1], right=True).where(numbers.isfinite(), count - 1)
    model = nn.Embedding(columns * count, 1, _weight=torch.zeros(columns * count, 1))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "data holds")  # rows with the same cells are no surprise
        training = PrivateTraining(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            loss=lambda model, batch: -model(batch["cell"]).sum((1, 2)) / math.sqrt(columns),
            data={"cell": (places.t() + count * torch.arange(columns)).contiguous()},
            sampling=FullBatch(population, steps=1),
            method=DPSGD(clip_norm=1.0),
            budget=Budget(epsilon, default_delta(population)),
            run=Run(journal=journal),
        )
    training.run(progress=False)
    noise = training.plan.releases[0].noise_multiplier / population
    return model.weight.detach().view(columns, count), noise
