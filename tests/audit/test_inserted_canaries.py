"""Canaries in a real training: who is in, what is secret, and that a run without noise is seen through."""

from __future__ import annotations

import stat

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import equipoise as eq
from equipoise.audit.inserted import CANARIES_FILE, InsertedCanaries, choose_canaries
from equipoise.audit.one_run import guess_by_score
from equipoise.audit.watched import Watched
from equipoise.data import Records

RECORDS, WIDTH = 400, 200


def _records(integers: bool = False) -> Records:
    rng = torch.Generator().manual_seed(0)
    label = torch.randint(2, (RECORDS,), generator=rng)
    if integers:
        return Records({"input": torch.randint(9, (RECORDS, 5), generator=rng), "label": label})
    base = torch.randn(10, WIDTH, generator=rng)
    return Records({"input": torch.randn(RECORDS, 10, generator=rng) @ base, "label": label})


def _loss(model, batch):
    return F.cross_entropy(model(batch["input"]), batch["label"], reduction="none")


def test_present_ones_come_and_absent_ones_leave_a_gap():
    records = _records()
    canaries = choose_canaries(records, 2, 100, seed=1, reproducible=True)
    data = canaries.insert(records)
    assert len(data) == RECORDS - int((~canaries.present).sum())
    rows = {tuple(row.tolist()) for row in data.fields["input"]}
    there = [tuple(row.tolist()) in rows for row in canaries.inputs]
    assert there == canaries.present.tolist()
    originals = [tuple(row.tolist()) in rows for row in records.fields["input"][canaries.numbers]]
    assert not any(originals)


def test_the_data_leave_their_directions_empty():
    records = _records()
    canaries = choose_canaries(records, 2, 50, seed=1, reproducible=True)
    unit = F.normalize(canaries.inputs, dim=1) @ F.normalize(records.fields["input"], dim=1).T
    assert unit.abs().max() < 0.01


def test_tokens_stay_what_they_are_with_a_wrong_label():
    records = _records(integers=True)
    canaries = choose_canaries(records, 2, 50, seed=1)
    assert torch.equal(canaries.inputs, records.fields["input"][canaries.numbers])
    assert (canaries.labels != records.fields["label"][canaries.numbers]).all()


def test_coins_are_secret_and_places_are_not():
    first, second = (choose_canaries(_records(), 2, 100, seed=1) for _ in range(2))
    assert torch.equal(first.numbers, second.numbers)
    assert not torch.equal(first.present, second.present)


def test_the_file_is_the_owners_alone(tmp_path):
    canaries = choose_canaries(_records(), 2, 20, seed=1)
    canaries.save(tmp_path)
    path = tmp_path / CANARIES_FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = InsertedCanaries.load(tmp_path)
    assert torch.equal(again.present, canaries.present)
    assert torch.equal(again.inputs, canaries.inputs)
    path.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="damaged"):
        InsertedCanaries.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="--canaries"):
        InsertedCanaries.load(tmp_path / "elsewhere")


@pytest.mark.parametrize("count", [0, RECORDS])
def test_too_many_or_none_are_refused(count):
    with pytest.raises(ValueError, match="canaries"):
        choose_canaries(_records(), 2, count, seed=0)


def _trained(noise: float, watch: bool = True) -> tuple[eq.Method, InsertedCanaries, eq.PrivateTraining]:
    records = _records()
    canaries = choose_canaries(records, 2, 60, seed=0, reproducible=True)
    method: eq.Method = eq.DPSGD(clip_norm=0.1, noise_multiplier=noise)
    if watch:
        method = Watched(method, canaries.batch(records))
    model = nn.Linear(WIDTH, 2)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    training = eq.PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        loss=_loss,
        data=canaries.insert(records),
        sampling=eq.Poisson(100, RECORDS, 20),
        method=method,
        reproducible=True,
        epsilon_every=1000,
        micro_batch_size=RECORDS,
    )
    for _ in range(20):
        training.take_step()
    return method, canaries, training


def test_a_run_with_hardly_any_noise_is_seen_through_and_a_private_one_is_not():
    loud, canaries, _ = _trained(0.2)
    assert guess_by_score(loud.scores, canaries.present, 1e-5).epsilon > 1
    private, canaries, training = _trained(5.0)
    found = guess_by_score(private.scores, canaries.present, 1e-5)
    assert found.epsilon < training.plan.epsilon(1e-5).value


def test_a_watched_method_trains_as_it_would_alone():
    _, _, watched = _trained(2.0)
    _, _, alone = _trained(2.0, watch=False)
    assert alone.config()["method"] == watched.config()["method"]
    # another noise stream would differ by more than a hundred times this
    torch.testing.assert_close(alone.model.weight, watched.model.weight, rtol=0, atol=1e-6)
