"""The settings of a training as the command line takes them, and how the gaps are filled from the recipes.

A setting that the user left open is None; `Settings.resolved` fills it from the recipe of the pair (data,
model). What is resolved is what goes into `config.json`, so that a run folder tells every number that was
used, chosen or not.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from equipoise.app.options import CLIP_RULES, SettingsError, check_choice, flag, parse_clip_norm
from equipoise.app.recipes import DEFAULT_MODEL, find_recipe

__all__ = ["Settings", "parse_option"]


OPTIMIZERS = ("sgd", "adam", "adamw")


SCHEDULES = ("constant", "linear", "cosine")


_PATHS = ("data_dir", "ledger", "run_dir")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What one training needs to know; None where the recipe decides.

    Attributes:
        data: the name of a data set, or ``package.module:function``.
        data_dir: the folder that holds the data files.
        population: the public number of training records; the named sets know theirs.
        method: the name of a training method.
        recipe: library, or as_published for the paper's own recipe; the method's default when None.
        variant: a form of the method, where it has several.
        options: further constructor arguments of the method, by name.
        subset: only the first so many training records are used; their number is public.
        public_records: that many of the training records, the last ones, are declared public.
        canaries: that many made-up records are put beside the training records, each by the toss of a coin,
            for an audit.
        model: the name of a model, or ``package.module:function``.
        epsilon: the budget, at `delta`; None with a noise multiplier.
        delta: failure probability of the guarantee.
        epochs: expected passes over the population.
        batch_size: expected records a step.
        noise_multiplier: the noise instead of the budget.
        clip_norm: a number, ``decay:START:RATE`` for a falling one, or ``quantile`` or ``quantile:SHARE`` for
            one that is learned.
        clip_rule: the name of a clip rule.
        per_layer: clip every layer on its own.
        optimizer: sgd, adam or adamw.
        learning_rate: of the optimiser.
        momentum: of sgd.
        weight_decay: of the optimiser.
        schedule: constant, linear or cosine.
        ema: decay of the averaged weights; 0 switches it off.
        views: random views of a record.
        micro_batch_size: records held in memory at once.
        seed: of the initial weights and other public randomness.
        reproducible: let noise and sampling follow the seed too, which is not private.
        hardened: exact noise on a grid of integers.
        device: where to compute.
        ledger: a journal shared by several runs over one data set.
        run_dir: the run folder.
    """

    data: str
    data_dir: str | None = None
    population: int | None = None
    method: str = "dp-sgd"
    recipe: str | None = None
    variant: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    subset: int | None = None
    public_records: int | None = None
    canaries: int | None = None
    model: str | None = None
    epsilon: float | None = None
    delta: float | None = None
    epochs: float | None = None
    batch_size: float | None = None
    noise_multiplier: float | None = None
    clip_norm: str | None = None
    clip_rule: str | None = None
    per_layer: bool = False
    optimizer: str | None = None
    learning_rate: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    schedule: str | None = None
    ema: float | None = None
    views: int | None = None
    micro_batch_size: int | None = None
    seed: int = 0
    reproducible: bool = False
    hardened: bool = False
    device: str | None = None
    ledger: str | None = None
    run_dir: str | None = None

    def resolved(self, default_model: str | None = None) -> Settings:
        """The same settings with the recipe's values in the gaps, checked.

        Args:
            default_model: the model where neither the settings nor the table of recipes name one.

        >>> Settings(data="digits").resolved().batch_size
        718.5
        >>> Settings(data="digits", epochs=-1).resolved()
        Traceback (most recent call last):
            ...
        equipoise.app.options.SettingsError: --epochs is -1, but ...
        """
        model = self.model or DEFAULT_MODEL.get(self.data) or default_model
        if model is None:
            raise SettingsError(
                f"--model is missing, and {self.data!r} has no default one. Name a model, or a function of "
                "your own as package.module:function."
            )
        recipe = find_recipe(self.data, model)
        filled: dict[str, Any] = {"model": model}
        for name in (
            "delta", "epochs", "batch_size", "clip_rule", "optimizer", "learning_rate", "momentum",
            "weight_decay", "schedule", "views",
        ):  # fmt: skip
            if getattr(self, name) is None:
                filled[name] = getattr(recipe, name)
        if self.clip_norm is None:
            filled["clip_norm"] = f"{recipe.clip_norm:g}"
        if self.epsilon is None and self.noise_multiplier is None:
            filled["epsilon"] = recipe.epsilon
        if self.ema is None and recipe.ema is not None:
            filled["ema"] = recipe.ema
        result = replace(self, **filled)
        result.check()
        return result

    def check(self) -> None:
        """Refuse values that cannot be used; what is left open passes.

        Raises:
            SettingsError: naming the option, its value, the reason and the remedy.
        """

        def positive(name: str, meaning: str) -> None:
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise SettingsError(f"{flag(name)} is {value:g}, but {meaning} is a number above 0.")

        positive("epsilon", "a privacy budget")
        positive("epochs", "the number of passes over the data")
        positive("batch_size", "the expected number of records a step")
        positive("learning_rate", "a step size")
        positive("noise_multiplier", "noise that protects anybody")
        positive("population", "the number of records")
        positive("micro_batch_size", "the number of records held at once")
        positive("views", "the number of views of a record")
        positive("subset", "the number of training records that are used")
        positive("public_records", "the number of public records")
        positive("canaries", "the number of canaries")
        if self.epsilon is not None and self.noise_multiplier is not None:
            raise SettingsError(
                f"--epsilon {self.epsilon:g} and --noise-multiplier {self.noise_multiplier:g} were both "
                "given, and each decides the other. Leave one of them out; `equipoise calibrate` "
                "translates between them."
            )
        if self.delta is not None and not 0 < self.delta < 1:
            raise SettingsError(
                f"--delta is {self.delta:g}, but it is a probability strictly between 0 and 1; it should "
                "be far below 1/population."
            )
        for name in ("momentum", "ema"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise SettingsError(f"{flag(name)} is {value:g}, but it must be at least 0 and below 1.")
        if self.weight_decay is not None and not self.weight_decay >= 0:
            raise SettingsError(f"--weight-decay is {self.weight_decay:g}, but it must be at least 0.")
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("recipe", self.recipe, ("library", "as_published"))
        check_choice("clip_rule", self.clip_rule and self.clip_rule.replace("-", "_"), CLIP_RULES)
        if self.clip_norm is not None:
            parse_clip_norm(self.clip_norm)
        if ":" in self.data and self.population is None:
            raise SettingsError(
                "--population is missing. It sets the sampling rate and the divisor of the noised sums, so "
                f"it must be a public number that you state: if it were counted from the records that "
                f"{self.data!r} returns, adding one record would change it, and the privacy proof would not "
                "hold. Give the published size of the set, or a round figure near it."
            )

    def to_json(self) -> dict[str, Any]:
        """Every setting, as plain values."""
        return asdict(self)

    def publishable(self) -> dict[str, Any]:
        """The settings that tell nothing about the machine: without paths, and without what was left open."""
        return {k: v for k, v in asdict(self).items() if k not in _PATHS and v is not None}

    def command(self) -> str:
        """The command that repeats the run, with placeholders for paths."""
        words = ["equipoise", "train"]
        for item in fields(self):
            value = getattr(self, item.name)
            if value is None or value is False or item.name == "run_dir":
                continue
            if item.name == "options":
                words += [word for n, v in value.items() for word in ("--option", f"{n}={_written(v)}")]
                continue
            words.append(flag(item.name))
            if item.name in _PATHS:
                words.append({"data_dir": "DIR", "ledger": "FILE"}[item.name])
            elif value is not True:
                words.append(f"{value:g}" if isinstance(value, float) else str(value))
        return shlex.join(words)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Settings:
        """The settings that `to_json` wrote.

        Raises:
            SettingsError: names that this version does not know.
        """
        check_saved(cls, values, needed="data")
        return cls(**values)


def check_saved(kind: type, values: Mapping[str, Any], needed: str) -> None:
    """Refuse saved values that are none of the fields of a dataclass of settings.

    Args:
        kind: the dataclass.
        values: by name of the field.
        needed: the field that has no default.

    Raises:
        SettingsError: names that this version does not know, or values of another kind.
    """
    unknown = sorted(set(values) - {item.name for item in fields(kind)})
    if unknown or needed not in values:
        raise SettingsError(
            "the saved settings have "
            f"{'the unknown names ' + ', '.join(unknown) if unknown else f'no {needed}'}; another "
            "version of equipoise wrote them, or they were edited. Use the version that began the run."
        )
    for name, allowed in get_type_hints(kind).items():
        value = values.get(name)
        if name in values and not _is_of(value, allowed):
            raise SettingsError(
                f"the saved settings have {name}={value!r:.80}, which is no {allowed}: they were edited. "
                "Restore them from a copy."
            )


def _is_of(value: Any, kind: Any) -> bool:
    """Whether a plain value has the kind that a field is declared with."""
    kinds = get_args(kind) if isinstance(kind, UnionType) else (get_origin(kind) or kind,)
    if isinstance(value, bool):
        return bool in kinds
    if isinstance(value, int):
        return abs(value) < 2**63 and (int in kinds or float in kinds)
    return isinstance(value, kinds)


def parse_option(text: str) -> tuple[str, Any]:
    """NAME=VALUE of the command line: a JSON value (a number, true, null, a list), or else a word.

    >>> parse_option("anchor_period=8"), parse_option("variant=joint")
    (('anchor_period', 8), ('variant', 'joint'))
    """
    name, equals, value = text.partition("=")
    name = name.strip().replace("-", "_")
    if not equals or not name:
        raise SettingsError(f"--option is {text!r}, but it must be NAME=VALUE, such as anchor_period=8.")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
