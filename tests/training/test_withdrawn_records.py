"""Records that are withdrawn, added or moved while a run is interrupted: the draws of the others stay.

Where a sampling assigns records to the draws of an epoch, a record that changes its draw meets a second
Gaussian in the epoch under way, or noise over steps closer than it is proved for.
"""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from small_problems import OnDemand, parameters, records, resumed, training

import equipoise as eq
from equipoise.statements.assumptions import Assumption
from equipoise.training.record_source import DataError

COUNT, EPOCH, BREAK = 200, 10, 5
DPSGD, DPMF = (
    eq.DPSGD(clip_norm=0.5, noise_multiplier=1.0),
    eq.DPMF(clip_norm=0.5, noise_multiplier=1.0, bands=EPOCH),
)
SAMPLINGS = {
    "fixed epochs": (eq.FixedEpochs(20, COUNT, 2 * EPOCH), DPSGD),
    "groups": (eq.CyclicPoisson(20, COUNT, 2 * EPOCH, EPOCH), DPSGD),
    "dp-mf in slots": (eq.FixedEpochs(20, COUNT, 2 * EPOCH), DPMF),
    "dp-mf in bins": (eq.BallsInBins(10, COUNT, 4 * EPOCH), DPMF),
    "dp-mf in groups": (eq.Poisson(10, COUNT, 2 * EPOCH), DPMF),
}


class Random(OnDemand):
    """Items of which something is random, as augmentation makes them."""

    def __getitem__(self, i):
        item = super().__getitem__(i)
        return item | {"input": item["input"] + 0.01 * torch.randn(len(item["input"]))}


def numbered():
    """Records with a number of their own, of which some hold the same but for that."""
    data = records(COUNT)
    data["input"][100:120], data["label"][100:120] = data["input"][:20], data["label"][:20]
    return data | {"record": torch.arange(COUNT)}


def chosen(data, positions):
    return {name: values[torch.as_tensor(positions)] for name, values in data.items()}


WITHOUT_7 = [i for i in range(COUNT) if i != 7]
CHANGES = {
    "withdrawn": WITHOUT_7,
    "withdrawn and moved": [*range(50, COUNT), *range(7), *range(8, 50)],
}


FORMS = {
    "in memory": lambda data: {"data": data},
    "ids": lambda data: {"data": OnDemand(data), "ids": data["record"]},
    "named column": lambda data: {"data": data, "ids": "record"},
    "texts": lambda data: {"data": Random(data), "ids": [f"record {i}" for i in data["record"].tolist()]},
}
"""What a training is given of the data."""


def drawn(run, names):
    """Who is in the draws of a run, by ordinal: these names of records or users, in the order of the data."""
    found, sample = [], run.ledger.sample

    def noting(draw, count):
        ids = sample(draw, count)
        found.append((draw.ordinal, set(names[run._setup.rows.used(ids)].tolist())))
        return ids

    run.ledger.sample = noting
    return found


def started(folder, kind, **options):
    sampling, method = SAMPLINGS[kind]
    return training(**{"sampling": sampling, "method": method, "folder": folder} | options)


def interrupted(folder, kind, before, after, names=lambda data: data["record"], **options):
    """Who is in the draws of a run that ends in its sixth step and goes on with other records.

    `before` and `after` are the records, and what the training is given of them; `names` are of who is drawn.
    """
    run = started(folder, kind, **before[1], **options)
    found = drawn(run, names(before[0]))
    for _ in range(BREAK):
        run.take_step()
    run.close()  # no checkpoint since the start: these steps are void, and charged
    run = resumed(folder, **after[1])
    more = drawn(run, names(after[0]))
    list(run)
    return found + more, run


def closest(draws):
    """How few draws lie between two draws of one record, and in how many draws of an epoch a record is."""
    met = {}
    for ordinal, names in draws:
        for name in names:
            met.setdefault(name, set()).add(ordinal)
    apart = min((b - a for those in met.values() for a, b in pairwise(sorted(those))), default=EPOCH)
    most = max(max(np.bincount([ordinal // EPOCH for ordinal in those]).tolist()) for those in met.values())
    return apart, most


CASES = [
    *((kind, "in memory", "withdrawn") for kind in SAMPLINGS),
    *(("dp-mf in slots", form, "withdrawn and moved") for form in ("ids", "named column", "texts")),
]


@pytest.mark.parametrize(("kind", "form", "change"), CASES)
@pytest.mark.filterwarnings("ignore:data hold other records")
def test_no_record_is_in_two_draws_of_an_epoch(tmp_path, kind, form, change):
    """Assigned by their places, 46 of 200 records were: one epoch was paid for, and two were met."""
    data, made = numbered(), FORMS[form]
    other = chosen(data, CHANGES[change])
    draws, run = interrupted(tmp_path / "run", kind, (data, made(data)), (other, made(other)))
    apart, most = closest(draws)
    assert most == 1
    if kind != "fixed epochs":  # which assigns slots anew in every epoch
        assert apart >= EPOCH
    named = Assumption.BY_CONTENT if form == "in memory" else Assumption.BY_NAME
    assert {named, Assumption.OTHER_DATA} <= set(run.statement().assumptions)


@pytest.mark.parametrize("rows", ["mean", None])
@pytest.mark.filterwarnings("ignore:data hold other records")
def test_no_user_is_in_more_draws_of_an_epoch_than_the_cap(tmp_path, rows):
    """User 7 goes, and so does one of the records of user 8, who owns one more than the cap."""
    data, cap = numbered(), 3
    data["user"] = data["record"] // 4
    other = chosen(data, [i for i in range(COUNT) if i // 4 != 7 and i != 32])

    users = {"records_per_user": cap, "rows": rows}

    def made(those):
        return {"data": those, "owner": "user"} | users

    def names(those):
        return those["user"].unique() if rows else those["record"]

    population = COUNT // 4 if rows else COUNT
    sampling = eq.FixedEpochs(population // EPOCH, population, 2 * EPOCH)
    pieces = [(those, made(those)) for those in (data, other)]
    draws, run = interrupted(tmp_path / "run", "fixed epochs", *pieces, names, sampling=sampling)
    met = {}
    for ordinal, those in draws:
        for name in those:
            user = (name if rows else name // 4, ordinal // EPOCH)
            met[user] = met.get(user, 0) + 1
    assert max(met.values()) == (1 if rows else cap)
    assert min(met[user, 1] for user in range(COUNT // 4) if user != 7) == (1 if rows else cap)
    assert Assumption.BY_NAME in run.statement().assumptions


def ended(folder, data, steps=BREAK):
    """A run in epochs that ends after some steps, without a checkpoint since its start."""
    run = started(folder, "fixed epochs", data=data)
    for _ in range(steps):
        run.take_step()
    run.close()
    return run


def test_items_under_other_numbers_are_refused(tmp_path):
    ended(tmp_path / "run", OnDemand(numbered()))
    booked = (tmp_path / "run/private/journal.jsonl").read_bytes()
    with pytest.raises(DataError, match=r"journal=.*ids="):
        resumed(tmp_path / "run", data=OnDemand(chosen(numbered(), WITHOUT_7)))
    assert (tmp_path / "run/private/journal.jsonl").read_bytes() == booked
    again = resumed(tmp_path / "run", data=OnDemand(numbered()))
    again.take_step()
    assert Assumption.BY_NUMBER in again.statement().assumptions


def test_an_item_that_was_read_counts_and_one_that_was_not_does_not(tmp_path):
    """What no draw has held may be another record: it was in no draw."""
    ended(tmp_path / "run", OnDemand(numbered()), steps=1)
    rows = map(json.loads, (tmp_path / "run/private/items.jsonl").read_text().splitlines())
    read = {int(number) for row in rows for number in row if number != "count"}
    assert 5 < len(read) < 50
    data = numbered()
    data["input"][min(set(range(COUNT)) - read)] += 1
    resumed(tmp_path / "run", data=OnDemand(data)).close()
    data["input"][min(read)] += 1
    with pytest.raises(DataError, match="ids="):
        resumed(tmp_path / "run", data=OnDemand(data))


def test_random_items_go_on_and_the_statement_says_what_was_not_compared(tmp_path):
    run = ended(tmp_path / "run", Random(numbered()))
    with pytest.warns(UserWarning, match="ids="):
        again = resumed(tmp_path / "run", data=Random(numbered()))
    for _ in range(BREAK):
        again.take_step()
    assert torch.equal(parameters(again.model), parameters(run.model))  # the same steps, to the bit
    assert again.ledger.record.num_draws == BREAK
    assert Assumption.BY_NUMBER_UNCOMPARED in again.statement().assumptions
    ended(tmp_path / "other", Random(numbered()))
    with pytest.raises(DataError, match="ids="):
        resumed(tmp_path / "other", data=Random(chosen(numbered(), WITHOUT_7)))


def test_a_run_goes_on_by_what_it_began_with(tmp_path):
    """Otherwise every record would change its draw."""
    started(tmp_path / "run", "fixed epochs", data=numbered()).close()
    for given in (FORMS["ids"](numbered()), {"data": OnDemand(numbered())}):
        with pytest.raises(ValueError, match="give ids"):
            resumed(tmp_path / "run", **given)


def scaled(data):
    values = data["input"]
    return data | {"input": (values - values.mean(0)) / values.std(0)}


@pytest.mark.parametrize(
    ("form", "change"),
    [
        ("in memory", lambda data: scaled(chosen(data, WITHOUT_7))),
        ("texts", lambda data: data | {"record": data["record"] + COUNT}),
    ],
)
def test_a_run_whose_records_are_all_new_is_refused(tmp_path, form, change):
    """Each would get another draw, as in a run without names; half of them may be new."""
    started(tmp_path / "run", "fixed epochs", **FORMS[form](numbered())).close()
    booked = (tmp_path / "run/private/journal.jsonl").read_bytes()
    with pytest.raises(DataError, match=r"journal=.*ids="):
        resumed(tmp_path / "run", **FORMS[form](change(numbered())))
    assert (tmp_path / "run/private/journal.jsonl").read_bytes() == booked
    data = numbered()
    data["record"][: COUNT // 2 - 5] += COUNT
    resumed(tmp_path / "run", **FORMS[form](data)).close()


def test_a_run_of_draws_that_are_fresh_needs_no_names(tmp_path):
    """Poisson sampling takes whatever stands at a place: no draw rests on another one."""
    run = training(data=OnDemand(numbered()), folder=tmp_path / "run", steps=4, population=COUNT)
    run.take_step()
    run.close()
    run = resumed(tmp_path / "run", data=OnDemand(chosen(numbered(), WITHOUT_7)))
    list(run)
    assert not (tmp_path / "run/private/items.jsonl").exists()
    assert not [text for text in run.statement().assumptions if text.startswith("draws are assigned")]
    # The repeated step had other answers: it is void, and charged.
    assert (run.steps_done, run.ledger.record.num_draws) == (3, 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ids": list(range(COUNT - 1))}, "ids has another length"),
        ({"ids": [0, *range(COUNT - 1)]}, "ids names two records alike"),
        ({"ids": torch.zeros(COUNT)}, "ids holds values of type torch.float32"),
    ],
)
def test_ids_that_name_no_records_are_refused(given, message):
    with pytest.raises(DataError, match=message):
        training(data=numbered(), **given)
