"""The method that settings name, and the noise that its budget leaves it.

A shared journal (`--ledger`) holds the costs of earlier runs over the same data; the budget is that of all of
them together, and the noise of the next run is fitted to what they leave.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from dp_accounting import DpEvent
from torch import Tensor

from equipoise.experiments.options import parse_clip_norm
from equipoise.experiments.settings import Settings, SettingsError
from equipoise.methods import METHODS, ExponentialDecay, Method, ReleasedQuantile, Threshold
from equipoise.privacy import Budget, Journal, Poisson, PrivacyPlan, epsilon
from equipoise.privacy.accounts import compose, other_runs

__all__ = ["make_method"]


def make_method(
    settings: Settings, sampling: Poisson, public: dict[str, Tensor] | None = None
) -> tuple[Method, Budget]:
    """The method with the options it has, and the budget; a given noise multiplier decides the budget.

    With a shared journal the budget is that of all its runs together: the noise is calibrated to what they
    leave.

    Args:
        settings: resolved.
        sampling: of the training.
        public: a batch of public records, for the methods that use some.

    Raises:
        SettingsError: an unknown method, or an option that it does not have.
    """
    assert settings.delta is not None
    if settings.method not in METHODS:
        raise SettingsError(f"--method is {settings.method!r}, but it must be one of {', '.join(METHODS)}.")
    kind = METHODS[settings.method]
    known = inspect.signature(kind).parameters
    for name in ("per_layer", "noise_multiplier", "recipe", "variant"):
        if getattr(settings, name) and name not in known:
            raise SettingsError(f"--{name.replace('_', '-')} is not an option of --method {settings.method}.")
    unknown = sorted(settings.options.keys() - known.keys())
    if unknown:
        raise SettingsError(
            f"--option {unknown[0]} is not an option of --method {settings.method}; it has "
            f"{', '.join(name for name in known if name != 'public')}."
        )
    options = {
        "clip_norm": _clip_norm(settings.clip_norm or "1"),
        "clip_rule": (settings.clip_rule or "abadi").replace("-", "_"),
        "per_layer": settings.per_layer,
        "noise_multiplier": settings.noise_multiplier,
        "recipe": settings.recipe or "library",
        **({"variant": settings.variant} if settings.variant else {}),
        **settings.options,
    }
    if "public" in known and public is not None:
        options["public"] = public
    elif "public" in known and known["public"].default is inspect.Parameter.empty:
        raise SettingsError(
            f"--method {settings.method} needs public records: give --public-records M, which takes the "
            "last M training records out of the private set. They get no protection."
        )
    method = kind(**{name: value for name, value in options.items() if name in known})
    others = _other_runs(settings)
    if settings.epsilon is not None:
        budget = Budget(settings.epsilon, settings.delta)
        if others and (
            "noise_multiplier" not in known or len(_plan_of(method, sampling, budget).releases) != 1
        ):
            raise SettingsError(
                f"--ledger holds other runs, and the noise of --method {settings.method} cannot be fitted "
                "to what they leave yet. Give this run a journal of its own."
            )
        if others:
            left = _noise_for_the_rest(method, sampling, others, budget)
            method = kind(**{n: v for n, v in {**options, "noise_multiplier": left}.items() if n in known})
        return method, budget
    found = _total(_plan_of(method, sampling), others, settings.delta)
    if not math.isfinite(found):
        raise SettingsError(
            f"--noise-multiplier is {settings.noise_multiplier:g}, which is too little noise for any "
            "epsilon. Give more."
        )
    return method, Budget(found, settings.delta)


def _plan_of(method: Method, sampling: Poisson, budget: Budget | None = None) -> PrivacyPlan:
    return method.plan(sampling, budget, "add_or_remove_one", torch.Generator().manual_seed(0))


def _other_runs(settings: Settings) -> list[DpEvent]:
    """The events of the runs that the shared journal holds."""
    if settings.ledger is None or not Path(settings.ledger).is_file():
        return []
    return list(other_runs(Journal(settings.ledger).entries(), "add_or_remove_one").values())


def _total(plan: PrivacyPlan, others: Sequence[DpEvent], delta: float) -> float:
    return epsilon(compose([plan.event(), *others]), delta, plan.relation).value


def _noise_for_the_rest(
    method: Method, sampling: Poisson, others: Sequence[DpEvent], budget: Budget
) -> float:
    """The noise multiplier with which this run and the others together just meet the budget."""
    before = epsilon(compose(others), budget.delta).value
    if before >= budget.epsilon:
        raise SettingsError(
            f"--epsilon is {budget.epsilon:g}, but it is the budget of all runs in the shared ledger, and "
            f"the earlier ones have taken {before:.4g} of it. Raise it, or stop training on these data."
        )
    plan = _plan_of(method, sampling, budget)
    alone = plan.releases[0].noise_multiplier

    def total(factor: float) -> float:
        scaled = [replace(r, noise_multiplier=r.noise_multiplier * factor) for r in plan.releases]
        return _total(PrivacyPlan(scaled, plan.sampling, plan.relation), others, budget.delta)

    low, high = 1.0, 2.0
    while total(high) > budget.epsilon:
        low, high = high, high * 2
    # one part in 500 of noise is worth less than the accountants' own precision
    while high / low > 1.002:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if total(middle) > budget.epsilon else (low, middle)
    return alone * high


def _clip_norm(text: str) -> float | Threshold:
    parsed = parse_clip_norm(text)
    if isinstance(parsed, float):
        return parsed
    word, *numbers = parsed
    return ExponentialDecay(*numbers) if word == "decay" else ReleasedQuantile(quantile=numbers[0])
