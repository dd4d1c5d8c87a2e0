"""Ranges of a table's numbers by one noised, booked histogram over a public grid.

A row adds m^(-1/2) to one cell of each of m columns, so that its gradient for the loss -sum(cells) has length
1 at most: a full batch of DP-SGD is the histogram, with noise of multiplier z in each cell. A range goes from
the first to the last cell that holds more than `HELD` standard deviations of the noise. Of a user that
`owner` names the rows together add the mean of what they add alone.
"""

from __future__ import annotations

import math
import re
import tomllib
import warnings
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from equipoise._files import schema_file, write_atomically
from equipoise.app.default_settings import default_delta
from equipoise.app.option_checks import SettingsError
from equipoise.data.readers.schema import TO_FILL_IN, cells_of, read_schema
from equipoise.methods import DPSGD
from equipoise.privacy import Budget, FullBatch
from equipoise.training import PrivateTraining, Run, Users

_STEPS = [digit * 10.0**power for power in range(-3, 10) for digit in (1, 2, 5)]
GRID = torch.tensor([*(-step for step in reversed(_STEPS)), 0.0, *_STEPS], dtype=torch.double)
"""0, and 1, 2 and 5 times powers of ten, from 0.001 to 5e9 and below 0; the ends hold what lies beyond."""

HELD = 5.0
"""An empty cell passes once in 3.5 million, so that 1 column in 40,000 gets an end that no record has: at 4,
one in 400 does, and a range up to 5e9 spoils a column. A larger one loses ends that few records hold."""


def fill_in_ranges(
    table: str, schema: str | None, epsilon: float, journal: str, owner: str | None = None, most: int = 1
) -> dict[str, tuple[float, float]]:
    """Write noised ranges into a schema where it leaves them to be filled in, unless noise drowns a column.

    Args:
        table, schema: the files.
        epsilon: the budget of all runs in the journal, at the delta of the population.
        journal: the file in which the release is booked.
        owner: the column that names the user of a row, where users are protected.
        most: of a user so many rows are looked at, drawn in secret.

    Raises:
        SettingsError: no range is left to be filled in, or the population is, or a place is not found.
        DataFileError: the table or the schema cannot be used.
        OSError: the schema cannot be written. Nothing is spent then, or after the others.
    """
    path = Path(schema or schema_file(table))
    values = read_schema(path)
    columns, population = values.get("columns", {}), values.get("population")
    ends = (
        (name, key) for name, one in columns.items() if one.get("type") != "date" for key in ("low", "high")
    )
    open_ = [(name, key) for name, key in ends if columns[name].get(key) == TO_FILL_IN]
    left = list(dict.fromkeys(name for name, _ in open_))
    if not left or not isinstance(population, int):
        raise SettingsError(
            f"the schema {str(path)!r} leaves no range of a number to be filled in, or no population is "
            "stated. That public number comes first: population = ..."
        )
    text = path.read_bytes().decode("utf-8-sig", "replace")
    places = _places(text, values, open_)
    if lost := [f"{key} of {name!r}" for name, key in open_ if (name, key) not in places]:
        raise SettingsError(
            f"the schema {str(path)!r} leaves {', '.join(lost)} to be filled in, in words that cannot be "
            f'replaced. Write "{TO_FILL_IN}" there, in plain quotes.'
        )
    numbers, of_users = [], cells_of(table, values, [owner])[0] if owner else None
    for name, cells in zip(left, map(pd.Series, cells_of(table, values, left)), strict=True):
        missing = cells.isin(columns[name].get("missing", values.get("missing", ())))
        numbers.append(pd.to_numeric(cells.mask(missing), errors="coerce").to_numpy(float))
    write_atomically(path, text.encode(), mode=0o644)  # where that fails, nothing is spent yet
    unit = "record" if of_users is None else Users(of_users, records_per_user=most, rows="mean")
    counts, noise = histogram(torch.from_numpy(np.array(numbers)), population, epsilon, journal, unit)
    found: dict[str, tuple[float, float]] = {}
    for name, held in zip(left, counts[:, :-1] > HELD * noise, strict=True):
        stated = (columns[name].get(key) for key in ("low", "high"))
        low, high = (end if isinstance(end, int | float) else None for end in stated)
        held &= GRID[1:] > (-math.inf if low is None else low)
        held &= GRID[:-1] < (math.inf if high is None else high)
        if bool(held.any()):  # else noise drowns it, and it stays to be filled in
            first, last = held.nonzero().flatten()[[0, -1]].tolist()
            least, largest = float(GRID[first]), float(GRID[last + 1])
            found[name] = (least if low is None else low, largest if high is None else high)
    for (name, key), (start, stop) in sorted(places.items(), key=lambda place: place[1], reverse=True):
        if name in found:
            text = f"{text[:start]}{found[name][key == 'high']:.10g}{text[stop:]}"
    write_atomically(path, text.encode(), mode=0o644)
    return found


def _places(
    text: str, values: Mapping[str, Any], open_: list[tuple[str, str]]
) -> dict[tuple[str, str], tuple[int, int]]:
    """Where in a schema's text the open ends stand: a number put there changes this end and nothing else."""
    wanted: Any = deepcopy(values)
    found = {}
    for match in re.finditer(rf"""(["']){TO_FILL_IN}\1""", text):
        with suppress(tomllib.TOMLDecodeError):
            tried = tomllib.loads(f"{text[: match.start()]}0{text[match.end() :]}")
            for name, key in open_:
                wanted["columns"][name][key] = 0
                if tried == wanted:
                    found[name, key] = match.span()
                wanted["columns"][name][key] = TO_FILL_IN
    return found


def histogram(
    numbers: Tensor, population: int, epsilon: float, journal: str | None, unit: Users | str = "record"
) -> tuple[Tensor, float]:
    """Noised cells [columns, cells] of numbers [columns, rows], NaN in the last, and the noise in each."""
    columns, count = len(numbers), len(GRID)
    places = torch.bucketize(numbers, GRID[1:-1], right=True).where(numbers.isfinite(), count - 1)
    model = nn.Embedding(columns * count, 1, _weight=torch.zeros(columns * count, 1))
    with warnings.catch_warnings():
        # rows with the same cells are no surprise, nor are fewer users than rows
        warnings.filterwarnings("ignore", "data holds|the population is stated")
        training = PrivateTraining(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            loss=lambda model, batch: -model(batch["cell"]).sum((1, 2)) / math.sqrt(columns),
            data={"cell": (places.t() + count * torch.arange(columns)).contiguous()},
            sampling=FullBatch(population, steps=1),
            method=DPSGD(clip_norm=1.0),
            budget=Budget(epsilon, default_delta(population)),
            run=Run(journal=journal),
            unit=unit,
        )
    training.run(progress=False)
    noise = training.plan.releases[0].noise_multiplier / population
    return model.weight.detach().view(columns, count), noise
