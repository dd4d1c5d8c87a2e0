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

from equipoise.app.options import SettingsError, check_choice, flag, parse_clip_norm
from equipoise.app.recipes import DEFAULT_MODEL, find_recipe

__all__ = ["Settings", "parse_option", "read_options", "setting"]


OPTIMIZERS = ("sgd", "adam", "adamw")


SCHEDULES = ("constant", "linear", "cosine")


def setting(default: Any, help: str, **facts: Any) -> Any:
    """A field of `Settings`: its default, its help text, and what else is known of it.

    Args:
        default: of the field.
        help: what the command line says of it.
        facts: ``above_zero`` (what the number is, where it must be above 0), ``choices``, ``share`` (at
            least 0 and below 1), ``from_recipe`` (the recipe fills it), ``path`` (its placeholder),
            ``metavar``, ``read`` (from the words of the command line to the value), ``form`` (their type).
    """
    return field(default=default, metadata={"help": help, **facts})


def read_options(words: list[str] | None) -> dict[str, Any]:
    """The NAME=VALUE words of the command line, by name."""
    return dict(map(parse_option, words or []))


def _underscored(word: str | None) -> str | None:
    return word and word.replace("-", "_")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What one training needs to know; None where the recipe decides.

    The one declaration of these settings: options of the command line, help texts, checks, the saved file and
    the command that repeats a run are made from it.
    """

    data: str = setting("digits", "Name of a data set, or package.module:function.")
    data_dir: str | None = setting(
        None, "Folder that holds the data files.", path="DIR", envvar="EQUIPOISE_DATA"
    )
    population: int | None = setting(
        None, "Public number of training records (own data only).", above_zero="the number of records"
    )
    method: str = setting("dp-sgd", "Training method: a name, or package.module:Class.")
    recipe: str | None = setting(
        None,
        "library (default), or as_published: the paper's algorithm, including its privacy flaws.",
        choices=("library", "as_published"),
        read=_underscored,
    )
    variant: str | None = setting(None, "Form of the method, where it has several.")
    options: dict[str, Any] = field(
        default_factory=dict,
        metadata={
            "help": "Further setting of the method; repeatable.",
            "option": "option",
            "metavar": "NAME=VALUE",
            "form": list[str] | None,
            "read": read_options,
        },
    )
    subset: int | None = setting(
        None,
        "Use only the first so many training records; their number is public.",
        above_zero="the number of training records that are used",
    )
    public_records: int | None = setting(
        None,
        "Declare the last so many training records public.",
        above_zero="the number of public records",
    )
    canaries: int | None = setting(
        None,
        "Insert N synthetic canary records, each with probability 1/2, for auditing.",
        above_zero="the number of canaries",
        metavar="N",
    )
    model: str | None = setting(None, "Name of a model, or package.module:function.")
    epsilon: float | None = setting(None, "Privacy budget.", above_zero="a privacy budget")
    delta: float | None = setting(None, "Failure probability of the guarantee.", from_recipe=True)
    noise_multiplier: float | None = setting(
        None, "Noise, instead of a budget.", above_zero="noise that protects anybody"
    )
    epochs: float | None = setting(
        None,
        "Expected passes over the data.",
        above_zero="the number of passes over the data",
        from_recipe=True,
    )
    batch_size: float | None = setting(
        None,
        "Expected number of records per step.",
        above_zero="the expected number of records a step",
        from_recipe=True,
    )
    learning_rate: float | None = setting(None, "Learning rate.", above_zero="a step size", from_recipe=True)
    clip_norm: str | None = setting(
        None, "Bound on one record's gradient: a number, decay:START:RATE, quantile or quantile:SHARE."
    )
    clip_rule: str | None = setting(None, "Name of a clip rule, such as abadi or psac.", from_recipe=True)
    per_layer: bool = setting(False, "Clip every layer on its own.")
    optimizer: str | None = setting(None, "sgd, adam or adamw.", choices=OPTIMIZERS, from_recipe=True)
    momentum: float | None = setting(None, "Momentum of sgd.", share=True, from_recipe=True)
    weight_decay: float | None = setting(None, "Weight decay.", from_recipe=True)
    schedule: str | None = setting(
        None, "Learning rate: constant, linear or cosine.", choices=SCHEDULES, from_recipe=True
    )
    ema: float | None = setting(None, "Decay of averaged weights; 0 for none.", share=True)
    views: int | None = setting(
        None,
        "Random views of a record, averaged.",
        above_zero="the number of views of a record",
        from_recipe=True,
    )
    micro_batch_size: int | None = setting(
        None, "Records held in memory at once.", above_zero="the number of records held at once"
    )
    device: str | None = setting(None, "Where to compute: cpu, cuda, cuda:1, mps.")
    seed: int = setting(0, "Initial weights and other public randomness.")
    reproducible: bool = setting(False, "Noise follows the seed too: NOT PRIVATE.")
    hardened: bool = setting(False, "Exact noise on a grid of integers; slower.")
    ledger: str | None = setting(
        None, "Journal shared by runs over one data set.", path="FILE", metavar="FILE"
    )
    run_dir: str | None = setting(
        None, "The run folder to make; runs/DATA-TIME by default.", path="DIR", metavar="DIR"
    )

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
        for item in fields(self):
            if item.metadata.get("from_recipe") and getattr(self, item.name) is None:
                filled[item.name] = getattr(recipe, item.name)
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

        for item in fields(self):
            value, meaning = getattr(self, item.name), item.metadata.get("above_zero")
            if value is None:
                continue
            if meaning is not None and not (math.isfinite(value) and value > 0):
                raise SettingsError(f"{flag(item.name)} is {value:g}, but {meaning} is a number above 0.")
            if "share" in item.metadata and not 0 <= value < 1:
                raise SettingsError(f"{flag(item.name)} is {value:g}, but it must be at least 0 and below 1.")
            if "choices" in item.metadata:
                check_choice(item.name, value, item.metadata["choices"])
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
        if self.weight_decay is not None and not self.weight_decay >= 0:
            raise SettingsError(f"--weight-decay is {self.weight_decay:g}, but it must be at least 0.")
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
        paths = {item.name for item in fields(self) if "path" in item.metadata}
        return {k: v for k, v in asdict(self).items() if k not in paths and v is not None}

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
            if "path" in item.metadata:
                words.append(item.metadata["path"])
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

    >>> parse_option("schedule.period=8"), parse_option("variant=joint")
    (('schedule.period', 8), ('variant', 'joint'))
    """
    name, equals, value = text.partition("=")
    name = name.strip().replace("-", "_")
    if not equals or not name:
        raise SettingsError(f"--option is {text!r}, but it must be NAME=VALUE, such as schedule.period=8.")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
