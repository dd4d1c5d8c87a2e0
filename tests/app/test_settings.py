"""Settings: defaults, how records are drawn, losses, and the noise of a run beside others in one journal."""

import io
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

from equipoise.app.build import make_sampling
from equipoise.app.default_settings import default_settings
from equipoise.app.federation.participants import federation
from equipoise.app.method_settings import make_method, make_setting
from equipoise.app.option_checks import SettingsError, in_option_words, is_code
from equipoise.app.settings import FederationSettings, RunSettings, facts
from equipoise.app.tasks import in_units, loss_of, task_of
from equipoise.app.train import _say_if_clipped
from equipoise.data import DataFileError, DataSet, Records
from equipoise.methods import find
from equipoise.methods.adaptive_rms import sampling_at
from equipoise.privacy import (
    BallsInBins,
    BudgetError,
    FixedEpochs,
    FullBatch,
    Gaussian,
    Journal,
    Ledger,
    Poisson,
    PrivacyPlan,
    Release,
    TruncatedPoisson,
    WithoutReplacement,
    epsilon,
)
from equipoise.privacy.ledger.run_record import compose_events
from equipoise.privacy.sampling import SAMPLING_WORDS
from equipoise.training.folder.run_folder import RunFolder

IN_OPTIONS = {
    "by unit=Users(owner=ID, records_per_user=N): one": "by --unit user --owner ID --records-per-user N: one",
    "be, Budget(epsilon, delta, runs=52), or": "be, --runs 52, or",
    "users (rows='mean'; ...)": "users (--user-rows mean; ...)",
    "journal (run=Run(journal='a.jsonl'))": "journal (--ledger 'a.jsonl')",
    "hardened=True covers, per_layer=False.": "--hardened covers, no --per-layer.",
    "epsilon=3 at delta=0.1": "--epsilon 3 at --delta 0.1",
    "such as --grid epsilon=1,3 --grid seed=0": None,
    "give method=DPSGD(clip_norm=...)": None,
}


@pytest.mark.parametrize("said", IN_OPTIONS)
def test_the_librarys_words_become_options_that_there_are(said: str) -> None:
    assert in_option_words(said, facts(RunSettings)) == (IN_OPTIONS[said] or said)


# batch size, epochs, epsilon, clip norm, learning rate, decay of the averaged weights
MEASURED = {
    ("digits", "mlp-tanh"): (718.5, 40, 3.0, 0.1, 3.0, None),
    ("mnist", "cnn-tanh"): (2048, 40, 2.93, 0.1, 3.0, 0.98),
    ("mnist", "patches-linear"): (8192, 60, 2.93, 0.5, 5.0, 0.9),
    ("fashion-mnist", "patches-linear"): (8192, 40, 2.7, 0.1, 50.0, 0.9),
    ("cifar10", "patches-linear"): (None, 61, 3.0, 0.1, 300.0, 0.9),
    ("fashion-mnist", "cnn-tanh"): (2048, 40, 2.7, 0.1, 4.0, 0.98),
    ("notes.csv", "hashed-words"): (None, 100, 3.0, 0.2, 150.0, 0.95),
}


@pytest.mark.parametrize("pair", list(MEASURED), ids="-".join)
def test_default_settings_are_those_that_were_measured(pair: tuple[str, str]) -> None:
    defaults = default_settings(*pair)
    names = ("batch_size", "epochs", "epsilon", "clip_norm", "learning_rate", "ema")
    assert tuple(getattr(defaults, name) for name in names) == MEASURED[pair]
    assert (defaults.optimizer, defaults.momentum, defaults.schedule) == ("sgd", 0.9, "constant")
    assert defaults.clip_rule == "abadi"


@pytest.mark.parametrize("model", ["hashed-words", "statistics"])
def test_a_recipe_may_take_all_records_unless_other_draws_are_named(model: str) -> None:
    assert RunSettings(model=model).resolved().sampling == "full-batch"
    assert RunSettings(model="hashed-words", batch_size=64).resolved().sampling is None
    assert RunSettings(model="hashed-words", sampling="poisson", batch_size=64).resolved().batch_size == 64
    with pytest.raises(SettingsError, match=r"--batch-size is 64.*one release of all rows"):
        RunSettings(model="statistics", batch_size=64).resolved()


def test_delta_is_below_one_over_the_population() -> None:
    for population in (1, 1437, 99_999, 100_000, 123_456, 10**6, 10**6 + 1, 10**9):
        delta = RunSettings(data="digits").resolved(population=population).delta
        assert delta is not None
        assert delta * population < 1
        assert delta == 1e-5 or delta * population <= 0.1
    assert RunSettings(data="digits", delta=0.1).resolved(population=10**6).delta == 0.1


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("options", [True, 1, [1], {"a": float("nan")}, {"a": b"x"}]),
        ("class_weights", [True, ["yes"], {"yes": 0}, {"yes": "2"}]),
        ("clip_norm", [True, ["1"], b"1"]),
        ("epochs", [True, "1", 0, -1, 1e300, 10**400, float("nan")]),
        ("population", [True, 1.5, 0, 2**63]),
        ("sampling", ["poison", 1]),
        ("hardened", [1, "yes"]),
    ],
)
def test_values_of_another_kind_are_refused_by_name(name, values):
    for value in values:
        with pytest.raises(SettingsError, match=f"--{name.rstrip('s').replace('_', '-')}"):
            RunSettings(**{name: value})


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
        ({"batch_size": 64.5}, "--batch-size is 64.5.* whole number"),
        ({"sampling": "fixed-epochs", "batch_size": 64.5}, "--batch-size is 64.5.* whole number"),
        ({"relation": "add_or_remove_one"}, "--relation is add-or-remove-one.*only under replace-one"),
        ({"canaries": 10}, "--canaries is 10"),
    ],
)
def test_what_cannot_be_drawn_is_refused(given, words):
    usual = {"sampling": "without-replacement", "batch_size": 64.0, "epochs": 2.0}
    with pytest.raises(SettingsError, match=words):
        begin(RunSettings(**(usual | given)))


def begin(settings):
    settings.check()
    make_sampling(settings, 1000)


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


VALUES = np.random.default_rng(0).gamma(2.0, 8.0, 2000).clip(0, 99)
WEIGHTS = np.random.default_rng(1).uniform(0, 1, 2000).round(1)


def data_of(log=False, weights=None, low=0.0, high=100.0):
    shares = np.log1p(VALUES - low) / np.log1p(high - low) if log else (VALUES - low) / (high - low)
    fields = {"input": torch.zeros(2000, 1), "target": torch.tensor(2 * shares - 1)}
    if weights is not None:
        fields["weight"] = torch.tensor(weights)
    rows = Records(fields)
    return DataSet("toy", rows, rows, 2000, 1, task="regression", target_range=(low, high), target_log=log)


def heaviest_half(values, share):
    """The weighted quantile."""
    order = np.argsort(values)
    return values[order][np.searchsorted(WEIGHTS[order].cumsum(), share * WEIGHTS.sum())]


@pytest.mark.parametrize(
    ("loss", "log", "weights", "statistic"),
    [
        ("squared", False, None, VALUES.mean()),
        (None, False, WEIGHTS, np.average(VALUES, weights=WEIGHTS)),
        ("squared", True, None, np.expm1(np.log1p(VALUES).mean())),
        ("huber:0.01", False, None, np.median(VALUES)),
        ("huber:1000", True, None, np.expm1(np.log1p(VALUES).mean())),
        ("quantile:0.9", False, None, np.quantile(VALUES, 0.9)),
        ("quantile:0.25", True, WEIGHTS, heaviest_half(VALUES, 0.25)),
        ("poisson", False, None, VALUES.mean()),
        ("logistic", False, WEIGHTS, np.average(VALUES, weights=WEIGHTS)),
    ],
)
def test_the_best_constant_is_the_statistic(loss, log, weights, statistic):
    dataset = data_of(log, weights)
    task, losses = task_of(dataset, loss), loss_of(dataset, {}, loss)
    constant = torch.nn.Parameter(torch.zeros(1, 1, dtype=torch.double))
    optimizer = torch.optim.Rprop([constant], lr=0.01)
    for _ in range(400):
        optimizer.zero_grad()
        found = losses(lambda inputs: constant.expand(len(inputs), 1), dict(dataset.train.fields))
        assert found.shape == (2000,)
        found.mean().backward()
        optimizer.step()
    assert float(in_units(task.link(constant.detach()), dataset)) == pytest.approx(statistic, rel=0.01)


def test_losses_that_do_not_fit_are_refused():
    for word in ("huber", "huber:0", "quantile:1", "squared:2", "poison", "a:b:c", "quantile:0.0"):
        with pytest.raises(SettingsError, match="--loss is"):
            RunSettings(loss=word).check()
    for word in ("huber:.5", "huber:1e3", "quantile:.05", "poisson", "my.losses:tilted"):
        RunSettings(loss=word).check()
    with pytest.raises(SettingsError, match="low = 0"):
        task_of(data_of(low=-1.0), "poisson")
    labels = Records({"input": torch.zeros(2, 1), "label": torch.tensor([0, 1])})
    classes = DataSet("toy", labels, labels, 2, 2)
    with pytest.raises(SettingsError, match="made for classification"):
        task_of(classes, "huber:1")
    assert task_of(classes, "logistic").main == ("accuracy", True)
    with pytest.raises(DataFileError, match="'weight' of train"):
        data_of(weights=3 * WEIGHTS)
    assert (is_code("huber:2"), is_code("mine:loss")) == (False, True)


SAMPLING = FullBatch(2000, 20)  # accounted in closed form, and so quickly
EARLIER = PrivacyPlan([Release("gradient", 1.0, Gaussian(60.0))], SAMPLING)
DELTA = 1e-5


@pytest.fixture
def journal(tmp_path):
    path = tmp_path / "ledger.jsonl"
    Ledger(EARLIER, journal=Journal(path)).journal.close()
    return path


def beside(journal, method, **changes):
    return RunSettings(
        data="digits", method=method, ledger=str(journal), **({"epsilon": 2.0, "delta": DELTA} | changes)
    )


def plan_of(made, asked, budget):
    return made.plan(make_setting(asked, SAMPLING, budget)).releases


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("dp-sgd", {}),
        ("dp-sgd", {"clip_norm": "quantile"}),
        ("dice-sgd", {}),
        ("dp-c4-plus", {}),
        ("dp-svrg", {"options": {"schedule": "at_random", "schedule.period": 3}, "seed": 3}),
        ("adaptive-rms", {}),
        ("adaptive-rms", {"variant": "round", "options": {"variant.length": 5}}),
        ("dc-dpsgd", {}),
        ("pcdp-sgd", {"options": {"source": "moment"}}),
    ],
    ids=str,
)
def test_the_budget_is_met_together(journal, method, changes):
    asked = beside(journal, method, **changes)
    made, budget = make_method(asked, SAMPLING)
    plan = plan_of(made, asked, budget)
    together = epsilon(compose_events([plan.event(), EARLIER.event()]), DELTA).value
    assert 0.985 * budget.epsilon <= together <= budget.epsilon
    # a run that goes on has the plan that it booked, whatever others cost by now, and the same constants
    booked = PrivacyPlan.from_description(plan.describe())
    first, again = (
        find(method).from_config(made.config()).plan(replace(asked_of, booked=of))
        for asked_of, of in (
            (make_setting(asked, SAMPLING, budget), None),
            (replace(make_setting(asked, SAMPLING, budget), other_runs=()), booked),
        )
    )
    assert again.releases.fingerprint() == plan.fingerprint()
    assert repr(again.constants) == repr(first.constants)


def test_a_method_that_releases_nothing_needs_nothing(journal):
    public = {"input": torch.zeros(4, 2), "target": torch.zeros(4)}
    asked = beside(journal, "public-only")
    method, budget = make_method(asked, SAMPLING, public)
    plan = plan_of(method, asked, budget)
    assert plan.releases == ()
    assert Ledger(plan, budget, Journal(journal)).spent().value < budget.epsilon


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("dp-sgd", {"epsilon": 0.1}, "other runs over the same records count too"),
        ("dice-sgd", {"recipe": "as_published"}, "above the budget|a budget of its own"),
        ("dc-dpsgd", {"recipe": "as_published"}, "computes its noise from a budget of its own"),
        ("dc-dpsgd", {"epsilon": 0.77, "options": {"tail_threshold.count_noise": 0.011}}, "does not scale"),
    ],
    ids=str,
)
def test_what_cannot_be_fitted_is_said(journal, method, changes, message):
    asked = beside(journal, method, **changes)
    made, budget = make_method(asked, SAMPLING)
    with pytest.raises((ValueError, BudgetError), match=message):
        Ledger(plan_of(made, asked, budget), budget, Journal(journal))


@pytest.mark.parametrize(
    ("share", "model", "terminal", "speaks"),
    [
        (0.96, "logistic", True, True),
        (0.05, "logistic", True, False),
        (0.96, "mlp-tanh", True, False),
        (0.96, "logistic", False, False),  # what is private goes to a terminal alone
    ],
)
def test_it_is_said_on_a_screen_and_of_models_with_coefficients(tmp_path, share, model, terminal, speaks):
    folder = RunFolder(tmp_path)
    folder.diagnostics.parent.mkdir()
    rows = [{"step": step, "batch.gradient.clip_fraction": share} for step in range(30)] + [{"step": 30}]
    folder.diagnostics.write_text("\n".join(map(json.dumps, rows)))
    console = Console(file=io.StringIO(), force_terminal=terminal, width=300)
    _say_if_clipped(SimpleNamespace(settings=SimpleNamespace(model=model)), folder, console)
    assert ("clipped" in console.file.getvalue()) is speaks
