"""Canaries in a real training: who is in, what is secret, and that a run without noise is seen through."""

import stat
from dataclasses import replace

import pytest
import torch
from safetensors import torch as safetensors
from torch import nn
from torch.nn import functional as F

import equipoise as eq
from equipoise import data
from equipoise.app.build import assemble
from equipoise.app.settings import RunSettings
from equipoise.app.train import insert_canaries
from equipoise.audit.canary_records import CANARIES_FILE, InsertedCanaries, choose_canaries
from equipoise.audit.canary_scores import WithCanaryScores
from equipoise.audit.one_run import guess_by_score
from equipoise.data import Records

RECORDS, WIDTH = 400, 200


def _records(seed: int = 0) -> Records:
    rng = torch.Generator().manual_seed(seed)
    label = torch.randint(2, (RECORDS,), generator=rng)
    base = torch.randn(10, WIDTH, generator=rng)
    return Records({"input": torch.randn(RECORDS, 10, generator=rng) @ base, "label": label})


def _loss(model, batch):
    return F.cross_entropy(model(batch["input"]), batch["label"], reduction="none")


def test_present_ones_come_and_everybody_else_stays():
    records = _records()
    canaries = choose_canaries(_records(seed=1), 2, 100, seed=1, reproducible=True)
    data = canaries.insert(records)
    assert len(data) == RECORDS + int(canaries.present.sum())
    for name, value in data.fields.items():
        assert torch.equal(value[:RECORDS], records.fields[name])
        assert torch.equal(value[RECORDS:], canaries.fields[name][canaries.present])


CHANGES = {
    "added": lambda value: torch.cat([value, value[:1]]),
    "removed": lambda value: value[1:],
    "replaced": lambda value: value if value.ndim == 1 else torch.cat([-1000 * value[:1], value[1:]]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_one_training_record_changes_no_canary_and_nobody_elses_part(change):
    """The sum of clipped gradients of all records moves by that record's own part and no more."""
    digits = data.load("digits")
    settings = RunSettings(data="digits", model="logistic", canaries=100, reproducible=True)
    worlds, sums = [], []
    for fields in (digits.train.fields, {n: CHANGES[change](v) for n, v in digits.train.fields.items()}):
        raw = replace(digits, train=Records(fields, num_classes=10))
        experiment = insert_canaries(assemble(settings, raw=raw))
        worlds.append(experiment.canaries)
        inputs, labels = (experiment.records.fields[name] for name in ("input", "label"))
        pull = (0.1 - F.one_hot(labels, 10).double())[:, :, None] * inputs.flatten(1).double()[:, None]
        pull = pull.flatten(1)
        sums.append((pull / pull.norm(dim=1, keepdim=True).clamp(min=1)).sum(dim=0))
    first, second = worlds
    assert first is not None
    assert second is not None
    assert torch.equal(first.present, second.present)
    assert all(torch.equal(first.fields[name], second.fields[name]) for name in first.fields)
    moved = float((sums[0] - sums[1]).norm())
    assert 0.1 < moved <= (2 if change == "replaced" else 1) + 1e-9


def test_the_file_is_the_owners_alone(tmp_path):
    canaries = choose_canaries(_records(), 2, 20, seed=1)
    canaries.save(tmp_path)
    path = tmp_path / CANARIES_FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = InsertedCanaries.load(tmp_path)
    assert torch.equal(again.present, canaries.present)
    assert torch.equal(again.fields["input"], canaries.fields["input"])
    short = safetensors.save({"field.input": canaries.fields["input"][:5], "present": canaries.present})
    for content in (b"nonsense", short):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="damaged"):
            InsertedCanaries.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="--canaries"):
        InsertedCanaries.load(tmp_path / "elsewhere")


def _trained(noise: float, watch: bool = True) -> tuple[eq.Method, InsertedCanaries, eq.PrivateTraining]:
    records = _records()
    canaries = choose_canaries(records, 2, 60, seed=0, reproducible=True)
    method: eq.Method = eq.DPSGD(clip_norm=0.1, noise_multiplier=noise)
    if watch:
        method = WithCanaryScores(method, canaries.fields)
    model = nn.Linear(WIDTH, 2)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    training = eq.PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        loss=_loss,
        data=eq.Data(canaries.insert(records), microbatch_size=RECORDS),
        sampling=eq.Poisson(100, RECORDS, 20),
        method=method,
        run=eq.Run(reproducible=True),
    )
    for _ in range(20):
        training.take_step()
    return method, canaries, training


def test_a_run_with_hardly_any_noise_is_seen_through_and_a_private_one_is_not():
    loud, canaries, training = _trained(0.2)
    assert guess_by_score(loud.scores(training.method_state), canaries.present, 1e-5).epsilon > 1
    private, canaries, training = _trained(5.0)
    found = guess_by_score(private.scores(training.method_state), canaries.present, 1e-5)
    assert found.epsilon < training.plan.epsilon(1e-5).value
    assert any(f"{len(canaries)} made-up records" in text for text in training.statement().assumptions)


def test_a_watched_method_trains_as_it_would_alone():
    _, _, watched = _trained(2.0)
    _, _, alone = _trained(2.0, watch=False)
    assert alone.config()["method"] == watched.config()["method"]
    # another noise stream would differ by more than a hundred times this
    torch.testing.assert_close(alone.model.weight, watched.model.weight, rtol=0, atol=1e-6)
