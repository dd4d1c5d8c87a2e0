"""The objects that a training takes: each checks itself, no field stands in two, old names lead to new."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch
from small_problems import RECORDS, loss, network, records, resumed, saved, training

import equipoise as eq
from equipoise.training.arguments import MOVED, TrainingInputs

OBJECTS = (eq.Data, eq.Run, eq.Users)

WRONG = {
    "collate": (lambda: eq.Data([0], collate=3), TypeError, "collate=3.*give collate"),
    "workers": (lambda: eq.Data([0], workers=-1), ValueError, "workers=-1"),
    "workers in words": (lambda: eq.Data([0], workers="two"), TypeError, "workers='two'.*give an int"),
    "augmentation": (lambda: eq.Data([0], augmentation="flip"), TypeError, "augmentation='flip'.*give"),
    "views": (lambda: eq.Data([0], views=0), ValueError, "views=0"),
    "ids": (lambda: eq.Data({"x": torch.zeros(2)}, ids="name"), eq.training.DataError, "ids='name'"),
    "weights": (lambda: eq.Data({"x": torch.zeros(2)}, weights="w"), eq.training.DataError, "weights='w'"),
    "microbatch_size": (lambda: eq.Data([0], microbatch_size=0), ValueError, "microbatch_size=0"),
    "score": (lambda: eq.Data([0], score="auc"), TypeError, "score='auc'.*give a Score"),
    "folder": (lambda: eq.Run(3), TypeError, "folder=3.*give a path"),
    "journal": (lambda: eq.Run(journal=3), TypeError, "journal=3.*give a path"),
    "seed": (lambda: eq.Run(seed="a"), TypeError, "seed='a'"),
    "reproducible": (lambda: eq.Run(reproducible=1), TypeError, "reproducible=1"),
    "diagnostics": (lambda: eq.Run(diagnostics=print), ValueError, "reproducible=True"),
    "secret_seed": (lambda: eq.Run(secret_seed=__file__, reproducible=True), ValueError, "public seed"),
    "starts_from": (lambda: eq.Run(starts_from="imagenet"), ValueError, "starts_from='imagenet'.*'public'"),
    "ema_decay": (lambda: eq.Run(ema_decay=1.0), ValueError, r"ema_decay=1\.0"),
    "hardened": (lambda: eq.Run(hardened="yes"), TypeError, "hardened='yes'"),
    "trust": (lambda: eq.Run(trust="router"), TypeError, r"trust='router'.*\('router',\)"),
    "owner": (lambda: eq.Users(None, records_per_user=2), TypeError, "owner=None.*give"),
    "records_per_user": (lambda: eq.Users([0], records_per_user=0), ValueError, "records_per_user=0"),
    "rows": (lambda: eq.Users([0], records_per_user=2, rows="max"), ValueError, "rows='max'.*'mean'"),
    "relation": (lambda: eq.Record(relation="swap"), ValueError, "relation='swap'.*give"),
    "relation of users": (lambda: eq.Users([0], records_per_user=2, relation="x"), ValueError, "relation"),
    "unit": (lambda: training(unit="user"), TypeError, r"unit='user'.*Users\(owner"),
    "run": (lambda: training(run=3), TypeError, r"run=3.*Run\(folder"),
    "compile": (lambda: training(compile="yes"), TypeError, "compile='yes'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_named_with_its_remedy(name):
    make, error, words = WRONG[name]
    with pytest.raises(error, match=words):
        make()


def test_each_field_is_in_the_table_of_wrong_values():
    checked_elsewhere = {"records", "scheduler", "writers"}  # with the optimizer; by their use
    names = [f.name for kind in OBJECTS for f in dataclasses.fields(kind)]
    assert {*names} - checked_elsewhere <= WRONG.keys()
    arguments = inspect.signature(eq.PrivateTraining).parameters
    assert len(names) == len({*names, *arguments} - arguments.keys())  # no name stands twice
    assert {field.name for field in dataclasses.fields(TrainingInputs)} == arguments.keys() - {"moved"}


@pytest.mark.parametrize("name", MOVED)
def test_an_old_keyword_leads_to_the_new_place(tmp_path, name):
    model = network()
    model_and_optimizer = model, torch.optim.SGD(model.parameters(), lr=0.1)
    given, sampling = {"loss": loss, "data": records(), name: None}, eq.Poisson(12, RECORDS, 3)
    begin = [eq.PrivateTraining, eq.PrivateTraining.start_or_resume]
    for call in begin:
        with pytest.raises(TypeError, match=rf"^{name}= is (now|gone)"):
            call(*model_and_optimizer, sampling=sampling, **given)
    if name != "folder":
        with pytest.raises(TypeError, match=rf"^{name}= is (now|gone)"):
            eq.PrivateTraining.resume(tmp_path, *model_and_optimizer, **given)


def begun(folder, **options):
    saved(training(steps=4, run=eq.Run(folder, reproducible=True, seed=3), **options))


def test_a_run_that_goes_on_has_the_settings_of_its_folder(tmp_path):
    begun(tmp_path / "run", data=eq.Data(records(), views=2))
    run = resumed(tmp_path / "run")
    settings = run.config()["settings"]
    assert (settings["seed"], settings["reproducible"], settings["views"]) == (3, True, 2)
    run.close()
    resumed(tmp_path / "run", data=eq.Data(records(), views=2), run=eq.Run(tmp_path / "run", seed=3)).close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"run": eq.Run(seed=4)}, "seed=4 differs from the seed=3"),
        ({"run": eq.Run(ema_decay=0.9)}, "ema_decay=0.9"),
        ({"run": eq.Run("elsewhere")}, "folder="),
        ({"data": eq.Data(records(), views=3)}, "views=3"),
        ({"unit": eq.Record(relation="replace_one")}, "relation='replace_one'"),
        ({"unit": eq.Users(range(RECORDS), records_per_user=1)}, "unit='user'"),
    ],
)
def test_a_setting_that_the_run_has_not_is_refused_by_name(tmp_path, options, words):
    begun(tmp_path / "run")
    with pytest.raises(ValueError, match=words):
        resumed(tmp_path / "run", **options)
