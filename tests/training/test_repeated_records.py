"""Records that are in the data several times are warned of before anything is spent."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
from small_problems import RECORDS, OnDemand, records, training
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from equipoise.training.record_source import RecordSource
from equipoise.training.setup.repeated_records import warn_of_repeats

N = 300
RNG = torch.Generator().manual_seed(0)
X = torch.randn(N, 6, generator=RNG)
Y = (X[:, 0] > 1).long()
#: Each record of the smaller class five times, as an oversampler leaves it.
TIMES_FIVE = torch.cat([torch.arange(N), *[torch.where(Y == 1)[0]] * 4])
ROWS = TensorDataset(X, Y)


class Transformed(Dataset):
    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, i):
        x, y = self.inner[i]
        return 2 * x, y


def table(columns, count=3000, kinds=6, seed=1):
    """Rows of few categories, the first of which are frequent: many are equal by chance."""
    rng = torch.Generator().manual_seed(seed)
    drawn = torch.rand(count, columns, generator=rng).pow(3).mul(kinds).long()
    return torch.cat([torch.nn.functional.one_hot(drawn[:, i], kinds) for i in range(columns)], 1).float()


def texts(count=2000, width=40):
    """Short ones, padded; many of two words are equal."""
    words = torch.randint(1, 30, (count, width), generator=torch.Generator().manual_seed(2))
    length = torch.randint(2, width, (count, 1), generator=torch.Generator().manual_seed(3))
    return words * (torch.arange(width) < length)


ITEMS = list(zip(X, Y, strict=True))

#: Data, and whether records occur several times.
DATA = {
    "rows": ((X, Y), False),
    "rows, copied": ((X[TIMES_FIVE], Y[TIMES_FIVE]), True),
    "three columns, copied": ({"x": X[TIMES_FIVE, :3], "y": Y[TIMES_FIVE]}, True),
    "ages": ({"x": torch.arange(N)[:, None] % 50, "y": torch.arange(N) % 50 // 20}, False),
    "pictures": ((torch.randint(0, 256, (200, 3, 12, 12), dtype=torch.uint8),), False),
    "pictures, five twice": ((torch.randint(0, 256, (200, 3, 12, 12)).repeat(2, 1, 1, 1)[:205],), True),
    "few rows of few categories": ((table(10, 400, 8, seed=0),), False),
    "few categories": ((table(8),), False),
    "few categories, half of them twice": ((table(8).repeat(2, 1)[:4500],), True),
    "texts": ((texts(),), False),
    "texts, half of them twice": ((texts().repeat(2, 1)[:3000],), True),
    "Subset": (Subset(ROWS, range(0, N, 2)), False),
    "Subset, one repeated": (Subset(ROWS, [*range(N), 7]), True),
    "Subset of a Subset": (Subset(Subset(ROWS, [3, 3, 4]), [0, 2]), False),
    "Subset of a Subset, repeated": (Subset(Subset(ROWS, [3, 4, 3]), torch.tensor([0, 2])), True),
    "ConcatDataset": (ConcatDataset([Subset(ROWS, [1, 2]), Subset(ROWS, [3])]), False),
    "ConcatDataset, repeated": (ConcatDataset([ROWS, Subset(ROWS, [3])]), True),
    "ConcatDataset of other rows": (ConcatDataset([ROWS, TensorDataset(X + 1, Y)]), False),
    "transformed, repeated": (Transformed(Subset(ROWS, TIMES_FIVE.tolist())), True),
    "list": (ITEMS, False),
    "list, repeated": ([*ITEMS, ITEMS[0]], True),
    "list of numbers": ([1, 2, 2, 3], False),
}


def said(data, users=None):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_repeats(RecordSource(data), data, users)
    return " ".join(str(one.message) for one in caught)


@pytest.mark.parametrize("name", DATA)
def test_repeated_records_are_warned_of(name):
    data, is_repeated = DATA[name]
    assert ("records_per_user" in said(data)) is is_repeated
    assert "records" not in said(data, torch.zeros(len(RecordSource(data)), dtype=torch.long))  # one owner's


@pytest.mark.parametrize("data", [(X[TIMES_FIVE], Y[TIMES_FIVE]), Subset(ROWS, TIMES_FIVE.tolist())])
def test_copies_of_a_record_need_one_owner(data):
    assert said(data, TIMES_FIVE) == ""
    assert "different owners" in said(data, torch.arange(len(TIMES_FIVE)))


@pytest.mark.parametrize("data", [{n: v.repeat(2, *[1] * (v.ndim - 1)) for n, v in records().items()},
                                  Subset(OnDemand(records()), [*range(RECORDS)] * 2)])  # fmt: skip
def test_a_start_warns_and_tells_no_number(data, tmp_path):
    with pytest.warns(UserWarning, match="data holds (records several times|equal records)") as caught:
        run = training(data=data, population=2 * RECORDS, folder=tmp_path / "run", steps=1)
    assert [Path(one.filename).name for one in caught] == ["small_problems.py"]  # whoever starts it
    assert not re.search(rf"{RECORDS}|{2 * RECORDS}", str(caught[0].message))
    run.run(progress=False)
    assert "data holds" not in (tmp_path / "run" / "statement.json").read_text()
