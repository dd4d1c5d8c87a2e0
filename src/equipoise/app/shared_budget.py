"""The method that settings name, and the noise that its budget leaves it.

A shared journal (`--ledger`) holds the costs of earlier runs over the same data; the budget is that of all of
them together, and the noise of the next run is fitted to what they leave.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dp_accounting import DpEvent
from torch import Tensor

from equipoise.app.options import SettingsError, flag, parse_clip_norm
from equipoise.app.settings import Settings
from equipoise.methods import ExponentialDecay, Method, PublicRecords, ReleasedQuantile, Threshold, find
from equipoise.methods.base import Setting
from equipoise.methods.options import defaults
from equipoise.methods.public_records import NeedsPublicRecords
from equipoise.privacy import Budget, BudgetError, Journal, Poisson, PrivacyPlan, calibrate, epsilon
from equipoise.privacy.ledger.run_record import compose_events, events_of, records_of
from equipoise.training.randomness import generator

__all__ = ["make_method", "read_clip_norm"]


RELATION = "add_or_remove_one"


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
    kind = find_class(settings.method, settings.recipe)
    given = method_words(settings, kind)
    records = None if public is None else PublicRecords(public)

    def make(**noise: float) -> Method:
        return kind.from_config(
            {"name": kind.name, "recipe": settings.recipe or "library"} | given | noise, records
        )

    try:
        method = make()
    except NeedsPublicRecords:
        raise SettingsError(
            f"--method {settings.method} needs public records: give --public-records M, which takes the "
            "last M training records out of the private set. They get no protection."
        ) from None
    others = _other_runs(settings)

    def plan_of(chosen: Method, budget: Budget | None = None) -> PrivacyPlan:
        # as the training will make it: the coins of a public schedule follow the seed
        rng = generator(settings.seed, "plan")
        setting = Setting(sampling=sampling, budget=budget, relation=RELATION, public_rng=rng)
        return chosen.plan(setting).releases

    if settings.epsilon is not None:
        budget = Budget(settings.epsilon, settings.delta)
        if not others:
            return method, budget
        plan = plan_of(method, budget)
        if not plan.releases and not plan.unproven:  # it costs nothing
            return method, budget
        fitted = _fitted(plan, _free_noise(method, given, plan), others, budget)
        noise = {
            name: fitted[release].noise_multiplier
            for name, release in kind.noise_arguments.items()
            if release in _names(fitted)
        }
        method = make(**noise)
        if plan_of(method).fingerprint() != fitted.fingerprint():
            raise SettingsError(
                f"--ledger holds other runs, and the noise of --method {settings.method} with these settings "
                "cannot be fitted to what they leave: it follows from the budget in a way that its "
                "arguments cannot express. Give this run a journal of its own."
            )
        return method, budget
    found = _total(plan_of(method), others, settings.delta)
    if not math.isfinite(found):
        raise SettingsError(
            f"--noise-multiplier is {settings.noise_multiplier:g}, which is too little noise for any "
            "epsilon. Give more."
        )
    return method, Budget(found, settings.delta)


def find_class(name: str, recipe: str | None) -> type[Method]:
    """The class of a method, by the words of the command line.

    Raises:
        SettingsError: there is no such method, or it has no such recipe.
    """
    try:
        return find(name, recipe or "library")
    except ValueError as error:
        raise SettingsError(f"--method is {name!r}: {error}") from error


def method_words(settings: Settings, kind: type[Method]) -> dict[str, Any]:
    """The settings of the method, as its `from_config` takes them; what it wraps gets what it does not have.

    Raises:
        SettingsError: an option that it does not have.
    """
    known, inner = option_names(kind), {}
    if "inner" in known:
        word = settings.options.get("inner", defaults(kind)["inner"])
        inner = option_names(find_class(word if isinstance(word, str) else word["name"], None))
    words = {
        "clip_norm": read_clip_norm(settings.clip_norm or "1"),
        "clip_rule": (settings.clip_rule or "abadi").replace("-", "_"),
        "per_layer": settings.per_layer,
        "noise_multiplier": settings.noise_multiplier,
        "variant": settings.variant,
    }
    found: dict[str, Any] = {}
    for name, value in words.items():
        if name in known and not (name == "variant" and value is None):
            found[name] = value
        elif name in inner and value:
            found[f"inner.{name}"] = value
        elif value and name not in ("clip_norm", "clip_rule"):
            raise SettingsError(f"{flag(name)} is not an option of --method {settings.method}.")
    return found | check_options(settings.method, kind, settings.options)


def option_names(kind: type) -> dict[str, Any]:
    """The settings of a method by name, without those that hold public records."""
    return {name: value for name, value in defaults(kind).items() if name not in ("public", "recipe")}


def check_options(name: str, kind: type[Method], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, where the method has them all.

    Raises:
        SettingsError: one that it does not have.
    """
    known = option_names(kind)
    for option in sorted(options):
        if option.partition(".")[0] not in known:
            raise SettingsError(
                f"--option {option} is not an option of --method {name}; it has {', '.join(known)}."
            )
    return dict(options)


def _other_runs(settings: Settings) -> list[DpEvent]:
    """The events of the runs that the shared journal holds."""
    if settings.ledger is None or not Path(settings.ledger).is_file():
        return []
    return list(events_of(records_of(Journal(settings.ledger).entries()), RELATION).values())


def _total(plan: PrivacyPlan, others: Sequence[DpEvent], delta: float) -> float:
    return epsilon(compose_events([plan.event(), *others]), delta, plan.relation).value


def _names(plan: PrivacyPlan) -> set[str]:
    return {release.name for release in plan.releases}


def _free_noise(method: Method, given: Mapping[str, Any], plan: PrivacyPlan) -> set[str]:
    """The releases whose noise an argument can fix that was not given, and those that share their noise.

    Raises:
        SettingsError: there are none.
    """
    free = {r for name, r in method.noise_arguments.items() if given.get(name) is None} & _names(plan)
    if not free:
        raise SettingsError(
            f"--ledger holds other runs, and --method {method.name} with these settings has no noise that "
            "could be fitted to what they leave. Give this run a journal of its own."
        )
    return free | {name for release in free for name in plan[release].mechanism.shared_by}


def _fitted(plan: PrivacyPlan, free: set[str], others: Sequence[DpEvent], budget: Budget) -> PrivacyPlan:
    """The plan with so much more noise in the free releases that it and the others just meet the budget.

    Raises:
        SettingsError: the others leave nothing, or the releases that keep their noise take all of it.
    """
    before = epsilon(compose_events(others), budget.delta).value
    if before >= budget.epsilon:
        raise SettingsError(
            f"--epsilon is {budget.epsilon:g}, but it is the budget of all runs in the shared ledger, and "
            f"the earlier ones have taken {before:.4g} of it. Raise it, or stop training on these data."
        )

    def scaled(factor: float) -> PrivacyPlan:
        releases = [r.scaled(factor) if r.name in free else r for r in plan.releases]
        return PrivacyPlan(releases, plan.sampling, plan.relation, plan.unproven)

    try:
        return calibrate(scaled, budget, other_events=others)
    except BudgetError:
        raise SettingsError(
            f"--epsilon is {budget.epsilon:g}; the earlier runs in the shared ledger have taken "
            f"{before:.4g} of it, and the releases of this method whose noise is a setting (such as "
            "counts) take the rest. Give them more noise, or raise it."
        ) from None


def read_clip_norm(text: str) -> float | Threshold:
    """The clip norm, or its schedule, that the words of the command line mean."""
    parsed = parse_clip_norm(text)
    if isinstance(parsed, float):
        return parsed
    word, *numbers = parsed
    return ExponentialDecay(*numbers) if word == "decay" else ReleasedQuantile(quantile=numbers[0])
