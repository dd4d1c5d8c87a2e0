"""Shadow models: the score on laws that are known, the bound, and a small attack from end to end."""

import json
import math
import stat
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from equipoise.app.settings import RunSettings
from equipoise.audit.roc import bound_on_roc, roc

PATH = Path(__file__).parents[2] / "examples" / "shadow_models.py"
SPECIFICATION = spec_from_file_location("example_shadow_models", PATH)
shadow_models = sys.modules["example_shadow_models"] = module_from_spec(SPECIFICATION)
SPECIFICATION.loader.exec_module(shadow_models)
audit_shadow, likelihood_ratios = shadow_models.audit_shadow, shadow_models.likelihood_ratios

MODELS, RECORDS = 300, 200


def _synthetic(shift: float, spread: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """phi ~ N(a_i, 1) outside and N(a_i + shift, spread^2) inside, with a level a_i of every record."""
    rng = np.random.default_rng(0)
    inside = rng.random((MODELS, RECORDS)) < 0.5
    noise = rng.normal(size=inside.shape)
    return 5 * rng.normal(size=RECORDS) + np.where(inside, shift + spread * noise, noise), inside


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("shift", [0.0, 1.0, 2.0])
def test_a_known_shift_gives_the_rates_of_two_gaussians(shift, shared):
    """TPR(f) = Phi(Phi^-1(f) + shift), area Phi(shift / sqrt 2): the best that any attack can do."""
    phi, inside = _synthetic(shift)
    found = roc(likelihood_ratios(phi, inside, shared_variance=shared), inside)
    assert found.area == pytest.approx(stats.norm.cdf(shift / math.sqrt(2)), abs=0.01)
    for level in (0.1, 0.01):
        truth = stats.norm.cdf(stats.norm.ppf(level) + shift)
        assert found.at(level) == pytest.approx(truth, rel=0.15)


@pytest.mark.parametrize("models", [4, 6])
def test_the_targets_own_coin_does_not_leak(models):
    """Few models, nothing to see: fits that held the target would find it, balanced halves the opposite."""
    rng = np.random.default_rng(1)
    inside = rng.random((models, 20_000)) < 0.5
    found = roc(likelihood_ratios(rng.normal(size=inside.shape), inside), inside)
    assert found.area == pytest.approx(0.5, abs=5 * math.sqrt(1 / (3 * inside.size)))


def test_the_bound_is_attained_by_randomised_response():
    """A coin told truly with probability e^eps / (1 + e^eps): FPR 1 / (1 + e^eps), TPR the rest."""
    epsilon = 1.3
    rate = 1 / (1 + math.exp(epsilon))
    assert bound_on_roc(rate, epsilon, 0.0) == pytest.approx(1 - rate)
    rates = np.linspace(0, 1, 101)
    assert bound_on_roc(rates, 0.0, 0.0) == pytest.approx(rates)
    # a Gaussian mechanism stays below the bound of its own (epsilon, delta)
    delta = stats.norm.cdf(0.5 - 1.0) - math.exp(1.0) * stats.norm.cdf(-0.5 - 1.0)
    truth = stats.norm.cdf(stats.norm.ppf(rates) + 1.0)
    assert (truth <= bound_on_roc(rates, 1.0, delta) + 1e-12).all()


def test_a_small_attack_from_end_to_end(tmp_path):
    settings = RunSettings(data="digits", subset=40, epochs=1, batch_size=20, epsilon=2.0, delta=1e-5)
    done = []
    found = audit_shadow(settings, 4, str(tmp_path), lambda *count: done.append(count))
    assert done[-1] == (8, 8)
    private, plain = (found["trainings"][name] for name in ("private", "not private"))
    assert private["epsilon"] <= 2.0
    assert plain["epsilon"] is None
    assert plain["steps"] == 4 * private["steps"]
    assert found["allowed"]["0.01"] == pytest.approx(0.01 * math.exp(private["epsilon"]) + 1e-5)
    figure, numbers = tmp_path / "private" / "roc.png", tmp_path / "private" / "shadow.json"
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert {stat.S_IMODE(path.stat().st_mode) for path in (figure, numbers)} == {0o600}
    curves = json.loads(numbers.read_text())["curves"]
    assert [curve["label"].split(" (")[0] for curve in curves] == [
        "private", "not private", "allowed by epsilon 2", "guessing",
    ]  # fmt: skip


@pytest.mark.slow
def test_privacy_hides_members_and_plain_training_does_not(tmp_path):
    found = audit_shadow(RunSettings(data="digits", epsilon=2.0, delta=1e-5), 16, str(tmp_path))
    private, plain = (found["trainings"][name] for name in ("private", "not private"))
    assert abs(private["area_under_curve"] - 0.5) < 0.02
    assert plain["area_under_curve"] > private["area_under_curve"] + 0.03
    # allowed in expectation; the rates scatter by about a tenth of a percent
    assert private["true_positives"]["0.01"] < found["allowed"]["0.01"] + 0.003
