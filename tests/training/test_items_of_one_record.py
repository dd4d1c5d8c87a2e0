"""Items that are made on demand are of one record each: one that chooses another record is refused."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from small_problems import RECORDS, OnDemand, loss, records, training
from torch.utils.data import ConcatDataset, Subset

import equipoise as eq
from equipoise.statements.assumptions import OF_RECORD, OF_USER, STATED, Assumption
from equipoise.training.record_source import DataError

N = RECORDS


class Mixing(OnDemand):
    """MixUp, as it is usually written: the partner's number comes from `choose(n)`."""

    def __init__(self, base, choose):
        self.base, self.choose = base, choose

    def __len__(self):
        return len(self.base)

    def __getitem__(self, i):
        item, other = self.base[i], self.base[int(self.choose(len(self.base))) % len(self.base)]
        return item | {"input": 0.7 * item["input"] + 0.3 * other["input"]}


#: How another record is chosen among n.
CHOICES = {
    "torch.randint": lambda n: torch.randint(0, n, (1,)),
    "torch.random_": lambda n: torch.empty(1).random_(0, n),
    "torch.randperm": lambda n: torch.randperm(n)[0],
    "torch.multinomial": lambda n: torch.multinomial(torch.ones(n), 1),
    "random.randrange": random.randrange,
    "random.choices": lambda n: random.choices(range(n))[0],
    "random.sample": lambda n: random.sample(range(n), 2)[1],
    "all but one": lambda n: random.randrange(n - 1),
    "np.random.randint": lambda n: np.random.randint(n),
    "np.random.choice": lambda n: np.random.choice(n),
    "np.random.choice of a list": lambda n: np.random.choice(np.arange(n)),
    "np.random.permutation": lambda n: np.random.permutation(n)[0],
}


CHOOSING = {name: Mixing(OnDemand(records()), choose) for name, choose in CHOICES.items()} | {
    "of a part": Subset(Mixing(OnDemand(records()), random.randrange), range(0, N, 2)),
    "in a chain": ConcatDataset([OnDemand(records()), Mixing(OnDemand(records(40)), random.randrange)]),
}


@pytest.mark.parametrize("name", CHOOSING)
def test_an_item_that_chooses_another_record_is_refused(name):
    before = [random.Random._randbelow, random.choices, np.random.randint, np.random.choice]
    with pytest.raises(DataError, match="another record"):
        training(data=CHOOSING[name])
    assert before == [random.Random._randbelow, random.choices, np.random.randint, np.random.choice]


def test_other_whole_numbers_are_the_items_own():
    """Ranges of augmentations are as small as small data sets are: RandAugment has 31 levels."""

    class Cropped(OnDemand):
        def __getitem__(self, i):
            item = super().__getitem__(i)
            place = int(torch.randint(0, 9, ())) + random.randrange(31) + np.random.randint(1000)
            return item | {"input": item["input"].roll(place)}

    class Few(OnDemand):
        def __getitem__(self, i):
            item = super().__getitem__(i)
            return item | {"input": item["input"] * (1 + torch.randint(0, 31, ()) / 100)}

    training(data=Cropped(records()))
    training(data=Few(records(31)), population=31, batch=6)


@pytest.mark.parametrize(
    ("options", "sentence", "other", "shares"),
    [
        ({}, OF_RECORD, OF_USER, True),
        ({"owner": range(N), "records_per_user": 1}, OF_USER, OF_RECORD, False),
    ],
)
def test_every_statement_says_what_items_are_made_of(options, sentence, other, shares, tmp_path):
    def sharing(model, batch):
        return loss(model, batch) * (1 + torch.rand(()) if shares else 1)

    run = training(steps=1, loss=sharing, folder=tmp_path / "run", **options)
    run.run(progress=False)
    named = run.statement().assumptions
    assert {sentence, STATED} <= set(named)
    assert other not in named
    assert (Assumption.SHARED_NUMBERS in named) is shares  # more records than the population are refused
    assert not any(found.ok is False for found in eq.verify_run(tmp_path / "run").findings)
    path = tmp_path / "run" / "statement.json"
    statement = json.loads(path.read_text())
    statement["assumptions"].remove(sentence)
    path.write_text(json.dumps(statement))
    assert "assumptions" in [f.subject for f in eq.verify_run(tmp_path / "run").findings if f.ok is False]


@pytest.mark.parametrize("number", [1, 4])
def test_a_longer_item_anywhere_is_seen(number):
    """Also where it is one of the last ones: padding moves the others."""

    def padded(items):
        width = max(len(item["input"]) for item in items)
        pad = [torch.nn.functional.pad(item["input"], (0, width - len(item["input"]))) for item in items]
        return {"input": torch.stack(pad), "label": torch.stack([item["label"] for item in items])}

    class Ragged(OnDemand):
        def __getitem__(self, i):
            item = super().__getitem__(i)
            return item if i == N - number else item | {"input": item["input"][:8]}

    class Mean(torch.nn.Module):
        """The mean over all places, those of the padding too."""

        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(1, 3)

        def forward(self, x):
            return self.head(x.mean(1, keepdim=True))

    with pytest.raises(ValueError, match="mask"):
        training(Mean(), data=Ragged(records()), collate=padded, loss=loss)
