"""The rate is chosen on the validation records; the test records judge each seed once, at that rate."""

import torch

import equipoise as eq
from benchmarks import trained_contenders
from benchmarks.trained_contenders import Contender, Images, append, tuned


def records(count, seed):
    inputs = torch.randn(count, 1, 28, 28, generator=torch.Generator().manual_seed(seed))
    return {"input": inputs, "label": torch.arange(count) % 10}


def test_the_best_rate_on_validation_is_taken_to_the_test_records(monkeypatch, tmp_path):
    images = Images(records(60, 0), records(20, 1), records(30, 2))
    judged = []

    def score(model, part):
        judged.append(len(part["label"]))
        return float(len(judged) == 2)

    monkeypatch.setattr(trained_contenders, "accuracy", score)
    contender = Contender(lambda: eq.DPSGD(clip_norm=0.3), eq.Poisson(20, 60, 2), (0.5, 2.0, 8.0))
    found = tuned(contender, images, 3.0, seeds=(1, 2))
    assert judged == [20, 20, 20, 30, 30]
    assert found["rate"] == 2.0
    assert found["noise_multiplier"] > 0
    for _ in range(2):
        append(tmp_path / "rows.jsonl", found)
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 2
