"""The papers' own tables on whole data sets: who judges, how a rate is chosen, and what the noise costs."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from equipoise.data import DataSet, Records
from equipoise.methods import DPSGD, DPSVRG, published
from equipoise.methods.anchored import AtRandom
from equipoise.privacy import Poisson
from reproduction.findings import Site
from reproduction.harness import Problem, follow
from reproduction.papers import dice_sgd_images, dp_c4_mushroom
from reproduction.papers.whole_sets import linear_problem
from reproduction.result_cache import ResultCache


def nothing(done, total, what):
    pass


class ZeroStart(nn.Linear):
    """One output without a bias, zero at first."""

    def __init__(self, width):
        super().__init__(width, 1, bias=False)
        nn.init.zeros_(self.weight)


class Unreadable:
    """Test records that nobody may read."""

    def __len__(self):
        return 10

    def __getattr__(self, name):
        raise AssertionError(name)

    __getitem__ = __getattr__


def small_set(test=None, width=6):
    rng = torch.Generator().manual_seed(1)
    inputs = torch.randn(6500, width, generator=rng)
    fields = {"input": inputs.half(), "label": (inputs[:, 0] > 0).long()}
    records = Records({name: value[:6000] for name, value in fields.items()})
    judges = Records({name: value[6000:] for name, value in fields.items()}) if test is None else test
    return DataSet("small", train=records, test=judges, population=6000, num_classes=2)


def test_no_test_record_is_read_while_the_rate_is_chosen():
    dataset = small_set()
    object.__setattr__(dataset, "test", Unreadable())
    tuning = linear_problem(dataset, "tuning")
    assert (tuning.population, len(tuning.data["label"])) == (4800, 4800)
    assert 40 < tuning.error(tuning.make_model()) < 60
    with pytest.raises(AssertionError):
        linear_problem(dataset, "test")


def test_what_theorem_3_of_dp_c4_costs_in_truth():
    """Mushroom has 6,499 training records here: 1,269 steps, and 423 of the anchored methods."""
    found = {name: dp_c4_mushroom.noise_of(name, "Theorem 3", 6499)[1] for name in dp_c4_mushroom.PRINTED}
    steps = [dp_c4_mushroom.steps_of(name, 6499) for name in found]
    assert steps == [1269, 423, 1269, 423, 423]
    expected = {"DP-SGD": 0.0098, "DP-SVRG": 0.0287, "DiceSGD": 841, "DP-C4": 0.0246, "DP-C4+": 0.0246}
    assert found == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("name", dp_c4_mushroom.PRINTED)
def test_the_methods_as_written_down_are_those_of_the_library(monkeypatch, name):
    """Without noise, on all records in every step, with a new anchor after each."""
    count, steps = 300, 12
    for setting in ("BATCH", "ANCHOR_BATCH"):
        monkeypatch.setattr(dp_c4_mushroom, setting, count)
    monkeypatch.setattr(dp_c4_mushroom, "PERIOD", 1)
    fields = small_set().train[torch.arange(count)]
    rows = dp_c4_mushroom.Rows.of({**fields, "input": 3 * fields["input"]})
    training = dp_c4_mushroom.Training(name, rows, [0.5, 0.2], dp_c4_mushroom.Noise(0.0), steps, 0)
    expected = training.run()
    anchors = {"anchor_batch_size": float(count), "schedule": AtRandom(1), "anchor_noise_multiplier": 1e-9}
    kind = {
        "DP-SGD": DPSGD,
        "DP-SVRG": partial(DPSVRG, **anchors),
        "DiceSGD": published.DiceSGD,
        "DP-C4": partial(published.DPC4, **anchors),
        "DP-C4+": partial(published.DPC4Plus, **anchors),
    }[name]

    def loss(model, batch):
        return F.binary_cross_entropy_with_logits(model(batch["x"])[:, 0], batch["y"], reduction="none")

    for rate, weights in zip((0.5, 0.2), expected, strict=True):
        problem = Problem(
            name="two classes",
            make_model=lambda: ZeroStart(rows.x.shape[1]),
            loss=loss,
            data={"x": rows.x, "y": rows.y},
            population=count,
            error=lambda model, weights=weights: float((model.weight[0].detach() - weights).norm()),
        )
        found = follow(
            kind(noise_multiplier=1e-9),
            problem,
            sampling=Poisson(count, count, steps),
            learning_rate=rate,
            seed=0,
            measure_at=[steps],
        )
        assert found[steps] < 1e-3 * float(weights.norm())


def test_what_dice_sgd_as_published_costs_in_truth():
    by_kind = {
        case.kind: case.provable(50_000)
        for case in dice_sgd_images.cases()
        if (case.epsilon, case.clip_norm) == (2.0, 1.0)
    }
    assert by_kind[dice_sgd_images.FORMULA] == pytest.approx(1.8e7, rel=0.05)
    assert by_kind[dice_sgd_images.PROGRAM] == pytest.approx(359, rel=0.02)
    assert by_kind[dice_sgd_images.DP_SGD] == by_kind[dice_sgd_images.DICE] == 2.0


def test_both_tables_from_a_small_set(monkeypatch, tmp_path):
    """Two passes over made-up records: rows, curves and verdicts of every row."""
    monkeypatch.setattr(dp_c4_mushroom, "mushroom", lambda folder: small_set())
    monkeypatch.setattr(dice_sgd_images, "cifar10_pooled", lambda folder: small_set())
    for module in (dp_c4_mushroom, dice_sgd_images):
        monkeypatch.setattr(module, "PASSES", 1)
    monkeypatch.setattr(dp_c4_mushroom, "RATES", (0.1, 0.05))
    monkeypatch.setattr(dice_sgd_images, "RATES", (0.01,))
    few = [case for case in dice_sgd_images.cases() if case.clip_norm == 1 and case.epsilon == 2][:6]
    monkeypatch.setattr(dice_sgd_images, "cases", lambda: few)
    table = dp_c4_mushroom.EXPERIMENT.carry_out((0, 1), nothing, Site(None, ResultCache(tmp_path / "a")))
    assert [row[1] for row in table.table.rows] == 4 * list(dp_c4_mushroom.PRINTED)
    assert all(0 <= row[5] <= 100 for row in table.table.rows)
    assert "public thresholds" in table.table.rows[4][2]
    assert table.to_json()["table"]["rows"][15][2] == "none"
    table = dice_sgd_images.EXPERIMENT.carry_out((0,), nothing, Site(None, ResultCache(tmp_path / "b")))
    assert [row[1] for row in table.table.rows] == [case.kind for case in few]
    assert table.verdicts
    assert table.curves
