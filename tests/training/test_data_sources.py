"""Data that stand in files: mapped arrays and Arrow train like tensors in memory."""

import functools
import random
import re
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from small_problems import (
    FEATURES,
    RECORDS,
    OnDemand,
    check_named,
    loss,
    network,
    parameters,
    records,
    resumed,
    saved,
    training,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, Subset, TensorDataset

import equipoise as eq
from equipoise.audit.canary_scores import WithCanaryScores
from equipoise.data import Records
from equipoise.methods import PublicRecords, PublicSubspace
from equipoise.statements.assumptions import HELD, NOT_COMPARED, Assumption
from equipoise.training.record_source import DataError, RecordSource
from equipoise.training.setup.private_copies import are_copies
from equipoise.training.setup.repeated_records import check_apart, warn_of_repeats


def as_memmap(folder):
    """The small problem in two files."""
    found = {name: values.numpy() for name, values in records().items()}
    for name, values in found.items():
        values.tofile(folder / name)
    return {n: np.memmap(folder / n, v.dtype, "r", shape=v.shape) for n, v in found.items()}


def part_of_a_memmap(folder):
    return {name: rows[:] for name, rows in as_memmap(folder).items()}


def as_arrow(folder):
    datasets = pytest.importorskip("datasets")
    data = {name: values.tolist() for name, values in records().items()}
    datasets.Dataset.from_dict(data).save_to_disk(folder / "arrow")
    return datasets.load_from_disk(folder / "arrow").with_format("torch")


@pytest.mark.parametrize("form", [as_memmap, part_of_a_memmap, as_arrow])
def test_files_train_like_tensors_and_the_statement_says_what_was_not_looked_at(tmp_path, form):
    run, whole = training(data=form(tmp_path), steps=3), training(steps=3)
    for each in (run, whole):
        list(each)
    assert torch.equal(parameters(run.model), parameters(whole.model))
    assert Assumption.TRUSTED in run.statement().assumptions
    assert Assumption.TRUSTED not in whole.statement().assumptions
    assert Assumption.SCANNED not in run.statement().assumptions


class Mixing(OnDemand):
    """MixUp, as it is usually written: the partner's number comes from `choose(n)`."""

    def __init__(self, base, choose):
        self.base, self.choose = base, choose

    def __len__(self):
        return len(self.base)

    def __getitem__(self, i):
        item, other = self.base[i], self.base[int(self.choose(len(self))) % len(self)]
        return item | {"input": 0.7 * item["input"] + 0.3 * other["input"]}


#: How another record is chosen among n.
CHOICES = {
    "torch.randint": lambda n: torch.randint(0, n, (1,)),
    "torch.randperm": lambda n: torch.randperm(n)[0],
    "torch.multinomial": lambda n: torch.multinomial(torch.ones(n), 1),
    "random.randrange": random.randrange,
    "random.sample": lambda n: random.sample(range(n), 2)[1],
    "all but one": lambda n: random.randrange(n - 1),
    "np.random.randint": lambda n: np.random.randint(n),
    "np.random.choice": lambda n: np.random.choice(n),
}
CHOOSING = {name: Mixing(OnDemand(records()), choose) for name, choose in CHOICES.items()} | {
    "in a chain": ConcatDataset([OnDemand(records()), Mixing(OnDemand(records(40)), random.randrange)]),
}


@pytest.mark.parametrize("name", CHOOSING)
def test_an_item_that_chooses_another_record_is_refused(name):
    before = [random.Random._randbelow, random.choices, np.random.randint, np.random.choice]
    with pytest.raises(DataError, match="another record"):
        training(data=CHOOSING[name])
    assert before == [random.Random._randbelow, random.choices, np.random.randint, np.random.choice]


def test_other_whole_numbers_are_the_items_own():
    class Cropped(OnDemand):
        def __getitem__(self, i):
            item = super().__getitem__(i)
            place = int(torch.randint(0, 9, ())) + random.randrange(31) + np.random.randint(1000)
            return item | {"input": item["input"].roll(place)}

    training(data=Cropped(records()))


N = 300
RNG = torch.Generator().manual_seed(0)
X = torch.randn(N, 6, generator=RNG)
Y = (X[:, 0] > 1).long()
#: Each record of the smaller class five times, as an oversampler leaves it.
TIMES_FIVE = torch.cat([torch.arange(N), *[torch.where(Y == 1)[0]] * 4])
ROWS = TensorDataset(X, Y)


class Transformed(OnDemand):
    def __getitem__(self, i):
        x, y = self.data[i]
        return 2 * x, y

    def __len__(self):
        return len(self.data)


def table(columns, count=3000, kinds=6):
    """Rows of few categories, the first of which are frequent: many are equal by chance."""
    rng = torch.Generator().manual_seed(1)
    drawn = torch.rand(count, columns, generator=rng).pow(3).mul(kinds).long()
    return torch.cat([torch.nn.functional.one_hot(drawn[:, i], kinds) for i in range(columns)], 1).float()


def texts(count=2000, width=40):
    """Short ones, padded; many of two words are equal."""
    words = torch.randint(1, 30, (count, width), generator=torch.Generator().manual_seed(2))
    length = torch.randint(2, width, (count, 1), generator=torch.Generator().manual_seed(3))
    return words * (torch.arange(width) < length)


ITEMS = list(zip(X, Y, strict=True))

#: Data, and whether records occur several times.
#: Data, and whether records occur several times.
DATA = {
    "rows": ((X, Y), False),
    "rows, copied": ((X[TIMES_FIVE], Y[TIMES_FIVE]), True),
    "three columns, copied": ({"x": X[TIMES_FIVE, :3], "y": Y[TIMES_FIVE]}, True),
    "ages": ({"x": torch.arange(N)[:, None] % 50, "y": torch.arange(N) % 50 // 20}, False),
    "few categories": ((table(8),), False),
    "few categories, half of them twice": ((table(8).repeat(2, 1)[:4500],), True),
    "texts": ((texts(),), False),
    "texts, half of them twice": ((texts().repeat(2, 1)[:3000],), True),
    "Subset of a Subset": (Subset(Subset(ROWS, [3, 3, 4]), [0, 2]), False),
    "Subset of a Subset, repeated": (Subset(Subset(ROWS, [3, 4, 3]), torch.tensor([0, 2])), True),
    "ConcatDataset, repeated": (ConcatDataset([ROWS, Subset(ROWS, [3])]), True),
    "ConcatDataset of other rows": (ConcatDataset([ROWS, TensorDataset(X + 1, Y)]), False),
    "transformed, repeated": (Transformed(Subset(ROWS, TIMES_FIVE.tolist())), True),
    "list, repeated": ([*ITEMS, ITEMS[0]], True),
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
    assert "different owners" in said((X[TIMES_FIVE], Y[TIMES_FIVE]), torch.arange(len(TIMES_FIVE)))


ONES = torch.ones(1, 1000).expand(5, 1000)
APART = {
    "other halves of a set": (Subset(ROWS, range(5)), Subset(ROWS, range(5, 9)), True),
    "other slices of a tensor": ((X[:5], Y[:5]), TensorDataset(X[5:9], Y[5:9]), True),
    "of shared labels": ((Y, X), TensorDataset(Y, X + 1), True),
    "of a shared mask": ((X[:5], ONES), (X[5:], ONES), True),
    "copies": ((X, Y), TensorDataset(X.clone(), Y.clone()), True),
    "overlapping parts of a set": (Subset(ROWS, range(5)), Subset(ROWS, range(4, 9)), False),
    "overlapping slices of a tensor": ({"x": X[:5], "y": Y[:5]}, TensorDataset(X[4:9], Y[4:9]), False),
    "a set and its rows": (Subset(ROWS, [3]), X, False),
    "transformed": (ROWS, Transformed(Subset(ROWS, [3])), False),
    "items of a list": (ITEMS, [ITEMS[2]], False),
}


@pytest.mark.parametrize("name", APART)
def test_evaluated_records_that_are_known_to_be_private_are_refused(name):
    data, evaluated, are_apart = APART[name]
    with nullcontext() if are_apart else pytest.raises(ValueError, match="scores holds private records"):
        check_apart(data, [None, evaluated], "scores")


def test_a_start_warns_and_tells_no_number(tmp_path):
    data = Subset(OnDemand(records()), [*range(RECORDS)] * 2)
    with pytest.warns(UserWarning, match="data holds records several times") as caught:
        run = training(data=data, population=2 * RECORDS, folder=tmp_path / "run", steps=1)
    assert not re.search(rf"{RECORDS}|{2 * RECORDS}", str(caught[0].message))
    run.run(progress=False)
    assert "data holds" not in (tmp_path / "run" / "statement.json").read_text()


def _batch(seed: int, count: int = 20) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(count, 3, generator=rng), "y": torch.randint(2, (count,), generator=rng)}


PRIVATE = _batch(0)


def _mixed(copies: int) -> dict[str, torch.Tensor]:
    """Five public records, of which some are private ones."""
    public = _batch(1, 5)
    for name, field in public.items():
        field[:copies] = PRIVATE[name][7 : 7 + copies]
    return public


def _training(method, data=PRIVATE, **options):
    sampling = eq.Poisson(5, 20, 2)
    return training(nn.Linear(3, 2), data=data, loss=_loss, sampling=sampling, method=method, **options)


def _loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


METHODS = {
    "public-only": lambda public: eq.methods.PublicOnly(public=PublicRecords(public)),
    "inner": lambda public: eq.methods.PublicWarmStart(
        public=PublicRecords(_batch(2)),
        inner=eq.methods.GEP(source=PublicSubspace(PublicRecords(public)), noise_multiplier=1.0),
        warm_steps=1,
    ),
    "watched": lambda public: WithCanaryScores(
        eq.PCDPSGD(source=PublicSubspace(PublicRecords(public)), noise_multiplier=1.0),
        _batch(3),
    ),
}


@pytest.mark.parametrize("kind", METHODS)
def test_copies_are_counted_and_refused_before_anything_is_written(tmp_path, kind):
    run, data = tmp_path / "run", Records(PRIVATE) if kind == "inner" else PRIVATE
    with pytest.raises(DataError, match="2 records of data equal some of the 5 public ones"):
        _training(METHODS[kind](_mixed(2)), data, folder=run)
    assert not run.exists()
    assert _training(METHODS[kind](_mixed(0)), data).plan is not None


def test_the_types_may_differ_and_part_of_a_record_is_no_copy():
    public = _mixed(1)
    with pytest.raises(DataError, match="1 records of data equal some of the 5"):
        _training(eq.methods.PublicOnly(public=PublicRecords({**public, "x": public["x"].double()})))
    assert int(are_copies(PRIVATE, public).sum()) == 1
    public["y"][0] = 1 - public["y"][0]
    _training(eq.methods.PublicOnly(public=PublicRecords(public)))
    _training(eq.methods.PublicOnly(public=PublicRecords({"x": public["x"][:, :2], "y": public["y"]})))


def test_a_statement_cannot_leave_its_public_records_out(tmp_path):
    found = _training(METHODS["inner"](_mixed(0)), folder=tmp_path / "run").run(progress=False).statement
    public = [
        text for text in found.assumptions if "5 records are public" in text or "20 records are" in text
    ]
    assert len(public) == 2
    check_named(tmp_path / "run", *public)


def test_records_made_on_demand_are_not_compared_and_the_statement_says_so():
    run = _training(METHODS["public-only"](_mixed(2)), OnDemand(PRIVATE))
    assert NOT_COMPARED in run.statement().assumptions


SMALL = records()
GRAPH = SMALL["input"] @ SMALL["input"].T
GLOBAL = SMALL["input"][7:8].clone()


class Holding(nn.Module):
    """A model that adds nothing of what it holds."""

    def __init__(self, held=None, kind="attribute"):
        super().__init__()
        self.net = network()
        if kind == "buffer":
            self.register_buffer("held", held)
        elif kind == "parameter":
            self.held = nn.Parameter(held, requires_grad=False)
        else:
            self.held = held

    def forward(self, x):
        return self.net(x)

    def loss(self, model, batch):
        return loss(model, batch)


def with_global(model, batch):
    return loss(model, batch) + 0 * GLOBAL.sum()


def closing(held):
    return lambda model, batch: loss(model, batch) + 0 * held.sum()


HOLDERS = {
    "buffer": lambda held: {"model": Holding(held, "buffer")},
    "parameter": lambda held: {"model": Holding(held, "parameter")},
    "attribute": lambda held: {"model": Holding(held)},
    "array": lambda held: {"model": Holding(held.numpy())},
    "list": lambda held: {"model": Holding(held.tolist())},
    "global": lambda held: {"loss": with_global},
    "closure": lambda held: {"loss": closing(held)},
    "partial": lambda held: {
        "loss": functools.partial(lambda model, batch, held: loss(model, batch), held=held)
    },
    "method": lambda held: {"loss": Holding(held, "buffer").loss},
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_held_records_are_refused_by_the_holder_s_name(tmp_path, holder):
    with pytest.raises(DataError, match="held" if holder != "global" else "GLOBAL"):
        training(**HOLDERS[holder](SMALL["input"][3:9].clone()), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


COPIES = {
    "a record": SMALL["input"][5],
    "another type": SMALL["input"][2:4].double(),
    "half precision": F.pad(SMALL["input"][2:4].flatten(), (1, 0)).bfloat16()[1:].view(2, FEATURES),
    "in another shape": SMALL["input"][2:4].reshape(2, 3, 4),
    "labels as numbers": SMALL["label"].float()[:, None],
    "among others": torch.cat([torch.zeros(3, FEATURES), SMALL["input"][-1:]]),
}
NO_COPIES = {
    "derived": GRAPH,
    "shuffled labels": SMALL["label"][torch.randperm(RECORDS, generator=torch.Generator().manual_seed(0))],
    "numbers": torch.arange(RECORDS),
    "one-hot": torch.eye(FEATURES),
    "whole numbers that agree by chance": torch.cartesian_prod(*[torch.arange(4)] * 4),
}


@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_is_refused_whatever_its_shape_and_type(kind):
    with pytest.raises(DataError, match=r"model\.held"):
        training(Holding(COPIES[kind].clone(), "buffer"))


@pytest.mark.parametrize("kind", NO_COPIES)
def test_what_is_no_copy_trains(kind):
    """Little content is equal by chance: numbers of records, rows of few values, one row for all."""
    data = SMALL | {
        "id": torch.arange(RECORDS),
        "counts": torch.randint(4, (RECORDS, 4), generator=torch.Generator().manual_seed(0)),
        "ones": torch.ones(RECORDS, FEATURES),
        "one-hot": torch.eye(FEATURES)[torch.arange(RECORDS) % FEATURES],
        "grid": torch.randn(FEATURES).expand(RECORDS, FEATURES),
        "name": torch.randn(10, FEATURES)[torch.arange(RECORDS) % 10],
    }
    model = Holding(NO_COPIES[kind], "buffer")
    model.grid = data["grid"][0].clone()  # public: it is the same in every record
    model.names = data["name"][:10].clone()  # of their classes
    assert training(model, data=data, steps=1).run(progress=False).finished


def test_records_of_users_are_compared():
    users = {"owner": torch.arange(RECORDS) % 20, "records_per_user": 3, "rows": "mean"}
    for data in (SMALL, OnDemand(SMALL)):
        with pytest.raises(DataError, match=r"model\.held"):
            training(Holding(SMALL["input"].clone(), "buffer"), data=data, population=20, batch=4, **users)


def test_what_is_as_long_as_the_data_is_named(tmp_path):
    """A graph of all users: no epsilon covers it, and it moves every user's gradient."""
    model = Holding(GRAPH, "buffer")
    model.table = np.zeros((RECORDS, 3))
    folder = tmp_path / "run"
    run = training(model, loss=closing(torch.zeros(RECORDS, 2)), folder=folder, steps=3)
    said = f"{HELD}loss.held, model.held, model.table"
    assert run.describe().held == ["loss.held", "model.held", "model.table"]
    assert training().describe().held == []
    assert training(data=OnDemand(records())).describe().reading.startswith("compared")
    assert training().describe().reading == ""
    saved(run)
    again = resumed(folder, model, loss=closing(torch.zeros(60, 2)))
    again.run(progress=False)
    assert again.statement().assumptions.count(said) == 1
    findings = eq.verify_run(folder).findings
    assert not [finding for finding in findings if finding.ok is False]
    assert not [finding for finding in findings if finding.subject == "further assumptions"]
