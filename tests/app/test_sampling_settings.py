"""How records are drawn can be chosen: the sampling and the relation of a training and of a federation."""

from __future__ import annotations

import pytest

from equipoise.app.build import make_sampling
from equipoise.app.federation.participants import federation
from equipoise.app.method_settings import make_setting
from equipoise.app.option_checks import SettingsError
from equipoise.app.settings import FederationSettings, RunSettings
from equipoise.methods.adaptive_rms import sampling_at
from equipoise.privacy import (
    BallsInBins,
    FixedEpochs,
    FullBatch,
    Poisson,
    TruncatedPoisson,
    WithoutReplacement,
)
from equipoise.privacy.sampling import SAMPLING_WORDS

EXPECTED = {
    None: Poisson(64.0, 1000, 32),
    "poisson": Poisson(64.0, 1000, 32),
    "truncated-poisson": TruncatedPoisson(64.0, 1000, 32),
    "without-replacement": WithoutReplacement(64, 1000, 32),
    "full-batch": FullBatch(1000, 2),
    "balls-in-bins": BallsInBins(64, 1000, 32),
    "fixed-epochs": FixedEpochs(64, 1000, 32),
}


@pytest.mark.parametrize("word", EXPECTED)
def test_a_training_samples_as_it_is_told(word):
    """The fewest steps that make two passes, counted by what the scheme draws."""
    settings = RunSettings(batch_size=64.0, epochs=2.0, sampling=word)
    found = make_sampling(settings, 1000)
    assert found == EXPECTED[word]
    relation = "replace_one" if word == "without-replacement" else "add_or_remove_one"
    assert make_setting(settings, found).relation == relation


def test_every_scheme_has_a_word():
    assert set(EXPECTED) - {None} == set(SAMPLING_WORDS)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"sampling": "subsets"}, "--sampling is 'subsets', but it must be poisson, truncated"),
        ({"sampling": "without-replacement", "batch_size": 64.5}, "--batch-size is 64.5.* whole number"),
        ({"sampling": "fixed-epochs", "batch_size": 64.5}, "--batch-size is 64.5.* whole number"),
    ],
)
def test_what_cannot_be_drawn_is_refused(given, words):
    with pytest.raises(SettingsError, match=words):
        make_sampling(RunSettings(**{"batch_size": 64.0, "epochs": 2.0, **given}), 1000)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"relation": "add_or_remove_one"}, "--relation is add-or-remove-one.*only under replace-one"),
        ({"canaries": 10}, "--canaries is 10"),
    ],
)
def test_subsets_of_a_fixed_size_need_a_public_number_of_records(given, words):
    with pytest.raises(SettingsError, match=words):
        RunSettings(sampling="without-replacement", **given).check()


def test_a_federation_trains_under_the_assumptions_of_the_papers_proof():
    """AdaptDP-FedAvg as published is proved for subsets without replacement under replace-one."""
    base = RunSettings(
        data="digits", subset=150, method="adaptdp-fedavg", recipe="as_published", epsilon=30.0, delta=1e-3,
        sampling="without-replacement",
    )  # fmt: skip
    made = federation(FederationSettings(base=base, clients=3, rounds=1, local_steps=2).to_json())
    found = made.client(0, None).statement()
    assert not any("equation (1) is proved for subsets" in phrase for phrase in found.assumptions)
    assert found.relation == "replace_one"
    assert [release["sampling"]["scheme"] for release in found.releases] == ["WithoutReplacement"] * 2


def test_a_query_of_subsets_is_a_subset():
    """Poisson samples and subsets of a fixed size have no accountant in common."""
    assert sampling_at(0.3, WithoutReplacement(5, 50, 8), 2) == WithoutReplacement(15, 50, 2)
    assert sampling_at(0.3, Poisson(5, 50, 8), 2) == Poisson(15, 50, 2)
