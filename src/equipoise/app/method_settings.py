"""The method that settings name, and the noise that its budget leaves it.

A shared journal (`--ledger`) holds the costs of earlier runs over the same data; the budget is that of all of
them together, and the noise of the next run is fitted to what they leave.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from equipoise.app.option_checks import SettingsError, flag, parse_clip_norm
from equipoise.app.settings import RunSettings
from equipoise.methods import Method, PublicRecords, ReleasedQuantile, find
from equipoise.methods.base import Setting
from equipoise.methods.configuration import defaults
from equipoise.methods.public_records import NeedsPublicRecords
from equipoise.privacy import Budget, Sampling, Unit, epsilon
from equipoise.privacy.ledger.journal_records import other_runs
from equipoise.privacy.ledger.run_record import compose_events
from equipoise.training.randomness import derive_seed


def make_method(
    settings: RunSettings, sampling: Sampling, public: dict[str, Tensor] | None = None
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
    kind = find(settings.method, settings.recipe or "library")
    config = {"name": kind.name, **method_words(settings, kind)}
    if settings.recipe:
        config["recipe"] = settings.recipe
    try:
        method: Method = kind.from_config(config, None if public is None else PublicRecords(public))
    except NeedsPublicRecords:
        raise SettingsError(
            f"--method {settings.method} needs public records: give --public-records M, which takes the last "
            "M training records out of the private set. They get no protection."
        ) from None
    if settings.epsilon is not None:
        return method, Budget(settings.epsilon, settings.delta, settings.runs or 1)
    setting = make_setting(settings, sampling)
    plan = method.plan(setting)
    total = compose_events([plan.releases.protecting(setting.unit).event(), *setting.other_runs])
    found = epsilon(total, settings.delta, settings.neighbours()).value
    if found == 0:
        # Nothing that the plan releases is proven, so the noise has no epsilon. The budget is then what the
        # paper claims for it, as it is where --epsilon is given; the statement says that it is not proven.
        found = method.claimed_epsilon(plan, settings.delta) or math.inf
    if not math.isfinite(found):
        raise SettingsError(
            f"--noise-multiplier is {settings.noise_multiplier:g}, which is too little noise for any "
            "epsilon. Give more."
        )
    return method, Budget(found, settings.delta)


def make_setting(settings: RunSettings, sampling: Sampling, budget: Budget | None = None) -> Setting:
    """What the method's plan is made from, as the training will make it."""
    return Setting(
        sampling=sampling,
        budget=budget,
        relation=settings.neighbours(),
        unit=(unit := unit_of(settings)),
        other_runs=other_runs(settings.ledger, settings.neighbours(), unit.name),
        public_seed=derive_seed(settings.seed, "plan"),
    )


def unit_of(settings: RunSettings) -> Unit:
    """The unit of privacy that the settings name."""
    return Unit(settings.unit or "record", settings.records_per_user or 1, settings.user_rows)


def method_words(settings: RunSettings, kind: type[Method]) -> dict[str, Any]:
    """The settings of the method, as its `from_config` takes them; what it wraps gets what it does not have.

    Raises:
        SettingsError: an option that it does not have.
    """
    known, inner = option_names(kind), {}
    if "inner" in known:
        word = settings.options.get("inner", defaults(kind)["inner"])
        inner = option_names(find(word if isinstance(word, str) else word["name"]))
    words = {
        "clip_norm": read_clip_norm(settings.clip_norm or "1"),
        "clip_rule": (settings.clip_rule or "abadi").replace("-", "_"),
        "per_layer": settings.per_layer,
        "noise_multiplier": settings.noise_multiplier,
        "variant": settings.variant,
    }
    found: dict[str, Any] = {}
    for name, value in words.items():
        if name in known and value is not None:
            found[name] = value
        elif name in inner and value:
            found[f"inner.{name}"] = value
        elif value and name not in ("clip_norm", "clip_rule"):
            raise SettingsError(f"{flag(name)} is not an option of method {settings.method}.")
    return found | check_options(settings.method, known, settings.options)


def option_names(kind: type) -> dict[str, Any]:
    """The settings of a method by name, without those that hold public records."""
    return {name: value for name, value in defaults(kind).items() if name not in ("public", "recipe")}


def check_options(
    name: str, known: Iterable[str], options: Mapping[str, Any], *, nested: bool = True
) -> dict[str, Any]:
    """The options, where the method has them all.

    Args:
        name: of the method.
        known: the options that it has.
        nested: whether an option may have parts of its own, as in inner.clip_norm.

    Raises:
        SettingsError: one that it does not have.
    """
    for option in sorted(options):
        if (option.partition(".")[0] if nested else option) not in known:
            raise SettingsError(
                f"--option {option} is not an option of method {name}; it has {', '.join(known) or 'none'}."
            )
    return dict(options)


def read_clip_norm(text: str) -> float | str | ReleasedQuantile:
    """The clip norm that the words of the command line mean; those of a schedule as methods read them."""
    parsed = parse_clip_norm(text)
    return ReleasedQuantile(quantile=parsed[1]) if isinstance(parsed, tuple) else parsed
