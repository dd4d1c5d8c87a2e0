"""The papers' own tables on whole data sets: who judges, how a rate is chosen, and what the noise costs."""

from __future__ import annotations

import math
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
from reproduction.papers.whole_sets import linear_problem, tuned
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


def test_all_training_records_train_in_the_end():
    problem = linear_problem(small_set(), "test")
    assert problem.population == 6000
    assert problem.loss(problem.make_model(), problem.data).tolist() == pytest.approx([math.log(2)] * 6000)
    model = problem.make_model()
    with torch.no_grad():
        model.weight[1, 0] = 1.0
    assert problem.error(model) < 0.5


def test_the_rate_is_the_best_on_held_out_records_and_finished_runs_stay():
    done = []

    def run(rate, seed, split):
        done.append((rate, seed, split))
        return {"accuracy": (90 if split == "test" else 50) - abs(rate - 0.2) + seed}

    site = Site(None, ResultCache(None))
    for _ in range(2):
        rate, found = tuned(run, {"method": "m"}, (0.1, 0.2, 0.4), (100,), (0, 1), site, nothing)
        assert (rate, [result["accuracy"] for result in found]) == (0.2, [90, 91])
    assert [split for _, _, split in done] == ["tuning"] * 3 + ["test"] * 2


def test_an_interrupt_leaves_no_row():
    def run(rate, seed, split):
        raise KeyboardInterrupt

    assert tuned(run, {}, (0.1, 0.2), (100,), (0,), Site(None, ResultCache(None)), nothing) is None
    assert tuned(run, {}, (0.1,), (100,), (0,), Site(None, ResultCache(None)), nothing) is None


def test_what_theorem_3_of_dp_c4_costs_in_truth():
    """Mushroom has 6,499 training records here: 1,269 steps, and 423 of the anchored methods."""
    found = {name: dp_c4_mushroom.noise_of(name, "Theorem 3", 6499)[1] for name in dp_c4_mushroom.PRINTED}
    steps = [dp_c4_mushroom.steps_of(name, 6499) for name in found]
    assert steps == [1269, 423, 1269, 423, 423]
    expected = {"DP-SGD": 0.0098, "DP-SVRG": 0.0287, "DiceSGD": 841, "DP-C4": 0.0246, "DP-C4+": 0.0246}
    assert found == pytest.approx(expected, rel=0.01)


def test_noise_for_a_true_epsilon_of_1():
    for name in ("DP-SGD", "DP-SVRG", "DP-C4", "DP-C4+"):
        noise, epsilon = dp_c4_mushroom.noise_of(name, "epsilon 1", 6499)
        assert epsilon == pytest.approx(1, abs=0.01)
        assert (noise.anchor > 0) == (name != "DP-SGD")
    assert dp_c4_mushroom.noise_of("DiceSGD", "epsilon 1", 6499)[1] > 1e4


@pytest.mark.parametrize(
    ("epsilon", "population", "passes", "sgd", "c4"),
    [
        (5.0, 60_000, 100, 0.0044, 0.0126),
        (5.0, 50_000, 100, 0.0055, 0.0154),
        (2.0, 25_000, 50, 0.0045, 0.0129),
        (2.0, 67_349, 50, 0.0014, 0.0041),
    ],
)
def test_what_the_other_columns_of_the_table_cost_in_truth(epsilon, population, passes, sgd, c4):
    assert dp_c4_mushroom.in_truth(epsilon, population, passes) == pytest.approx((sgd, c4), rel=0.02)


def test_the_variances_of_dp_svrg_have_the_sum_that_the_paper_prints():
    noise = dp_c4_mushroom.theorem_svrg(423)
    z, share = dp_c4_mushroom.theorem_multiplier(423), 2 / 8 / 16**2
    # of means: the pair's noise is 2 z_1 over 256 records, the anchor's z_2 over 4,096
    total = (2 * noise.step / 256) ** 2 + (noise.anchor / 4096) ** 2
    assert total == pytest.approx((z / 256) ** 2 * (1 + math.sqrt(share)) ** 2)


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


def test_every_row_is_there_once():
    assert len(set(dice_sgd_images.cases())) == len(dice_sgd_images.cases())


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
