"""Advice follows nothing but public facts."""

import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from equipoise.app import advice as advice_module
from equipoise.app.advice import advise
from equipoise.app.option_checks import SettingsError
from equipoise.app.recorded_accuracy import RecordedAccuracy
from equipoise.app.settings import AdviceSettings, RunSettings
from equipoise.data import DataSet, Records


def records(count=600):
    generator = torch.Generator().manual_seed(count)
    inputs = torch.randn(count, 6, generator=generator)
    rows = Records({"input": inputs, "label": (inputs[:, 0] > 0).long()})
    return DataSet("people", train=rows, test=rows, population=600, num_classes=2)


def fewer_records():
    return records(500)


def advice(asked=None, **settings):
    console = Console(file=io.StringIO(), width=200)
    found = advise(RunSettings(epsilon=2.0, **settings), asked or AdviceSettings(), console)
    return found, console.file.getvalue()


def own(name, **settings):
    return advice(data=f"{__name__}:{name}", population=600, model="linear", **{"batch_size": 100} | settings)


def test_plain_dp_sgd_where_its_clip_norm_is_known():
    found, said = advice(data="digits")
    assert found["method"] == "dp-sgd"
    assert "--clip-rule" not in found["command"]
    assert "97.02%" in found["reasons"][0]
    assert found["dry_run"]["epsilon"] <= 2
    assert "nothing spent yet" in said
    assert "--method sgd" in " ".join(found["worth_trying"])


def test_a_fixed_order_takes_correlated_noise():
    found, _ = advice(AdviceSettings(fixed_order=True), data="digits")
    assert found["method"] == "dp-mf"
    assert "--sampling fixed-epochs" in found["command"]
    assert found["dry_run"]["sampling"] == "FixedEpochs"


def test_normalised_gradients_where_no_clip_norm_is_known():
    found, _ = own("records")
    assert "--clip-rule auto_s" in found["command"]
    given, _ = own("records", clip_norm="0.3")
    assert "--clip-rule" not in given["command"]


def test_public_records_and_owners_of_several_are_spoken_of():
    found, _ = advice(AdviceSettings(records_per_person=3), data="digits", public_records=100)
    assert "public-warm-start" in found["worth_trying"][0]
    assert "a person's is about 6" in found["warnings"][0]


def test_a_larger_batch_is_named_where_it_has_less_noise():
    small, _ = own("records", batch_size=2)
    assert any(line.startswith("--batch-size 8 ") for line in small["worth_trying"])
    usual, _ = own("records")
    assert not any(line.startswith("--batch-size") for line in usual["worth_trying"])


def test_correlated_noise_is_named_for_many_steps_on_small_draws():
    words = (
        "--method dp-mf, since there are 6,000 steps on small draws: 34.83% against 32.32% (Tiny Shakespeare"
    )
    assert any(line.startswith(words) for line in own("records", batch_size=2)[0]["worth_trying"])
    assert not any("dp-mf" in line for line in own("records")[0]["worth_trying"])


def test_batches_that_are_advised_are_those_that_are_spoken_of(monkeypatch):
    rows = [
        RecordedAccuracy(
            "mine", "dp-sgd", 2.0, 90.0, 89.0, 91.0, "linear", 1.0, 1.0, 2, 6000, 300, "sgd", 0.9
        )
    ]
    monkeypatch.setattr(advice_module, "recorded", lambda data, epsilon, model=None: rows)
    found, _ = advice(data=f"{__name__}:records", population=600)
    assert "--model linear --epsilon 2 --epochs 20 --batch-size 2 " in found["command"]
    assert any(line.startswith("--batch-size 8 ") for line in found["worth_trying"])


def numbers(count=600):
    found = records()
    return replace(found, population=count, numeric_columns=(0, 3))


def many_numbers():
    return numbers(6000)


def few_numbers():
    return numbers()


def test_bends_are_spoken_of_where_a_table_has_numbers_and_enough_records():
    words = "a piecewise linear function of every number, and is ahead of logistic: 85.85% against 84.68%"
    place = {"data": f"{__name__}:many_numbers", "population": 6000}
    found, _ = advice(**place)
    assert f"The model has {words} (whole Adult" in " ".join(found["reasons"])
    assert "additive" not in " ".join(found["worth_trying"])
    other, _ = advice(**place, model="linear")
    assert f"--model additive, which has {words}" in " ".join(other["worth_trying"])
    assert "piecewise" not in " ".join(other["reasons"])
    few, _ = advice(data=f"{__name__}:few_numbers", population=600, batch_size=100)
    assert "piecewise" not in " ".join(few["reasons"] + few["worth_trying"])


def pictures():
    rows = Records({"input": torch.randn(300, 3, 16, 16), "label": torch.arange(300) % 2})
    return DataSet("photos", train=rows, test=rows, population=300, num_classes=2)


def large_pictures():
    rows = Records({"input": torch.randn(30, 3, 40, 40), "label": torch.arange(30) % 2})
    return DataSet("photos", train=rows, test=rows, population=30, num_classes=2)


@pytest.mark.wide
def test_drawn_features_are_named_for_pictures_of_ones_own():
    found, _ = advice(data=f"{__name__}:pictures", population=300, batch_size=100)
    words = "--model patches-linear, which has fixed features and one linear layer"
    assert any(line.startswith(words) for line in found["worth_trying"])
    large, _ = advice(data=f"{__name__}:large_pictures", population=30, batch_size=10)
    assert not any(
        "patches-linear" in line for line in large["worth_trying"] + own("records")[0]["worth_trying"]
    )


def test_no_private_record_has_a_say():
    with_all, without_some = own("records")[0], own("fewer_records")[0]
    for answer in (with_all, without_some):
        for timed in ("memory_bytes", "seconds_per_step", "seconds", "settings", "warnings"):
            answer["dry_run"].pop(timed)
    assert str(with_all).replace(":records", ":fewer_records") == str(without_some)


def test_the_budget_must_be_named():
    with pytest.raises(SettingsError, match="--epsilon is missing"):
        advise(RunSettings(), AdviceSettings(), Console(file=io.StringIO()))
