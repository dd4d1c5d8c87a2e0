"""The settings of each command, declared once: options, help texts, checks and saved files come from here.

A setting that the user left open is None; `RunSettings.resolved` fills it from the default settings of data
and model. What is resolved is what goes into `config.json`, so that a run folder tells every number that was
used, chosen or not. Nothing here needs torch.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from equipoise._extras import lacking
from equipoise._relations import RELATIONS
from equipoise._run_files import read_json
from equipoise.app.default_settings import DEFAULT_MODEL, default_delta, default_settings
from equipoise.app.model_table import MODELS
from equipoise.app.option_checks import (
    LARGEST,
    SettingsError,
    check_choice,
    check_federated,
    data_form,
    flag,
    parse_clip_norm,
)
from equipoise.methods.registry import registered

__all__ = [
    "EXPORTS",
    "GROUPS",
    "OF_OWN_DATA",
    "AuditSettings",
    "CalibrationSettings",
    "FederationSettings",
    "RunSettings",
    "check_saved",
    "parse_option",
    "parse_weight",
    "setting",
]


OPTIMIZERS = ("sgd", "adam", "adamw")
FEATURES = tuple(dict.fromkeys(name for entry in MODELS.values() for name in entry.features))
SCHEDULES = ("constant", "linear", "cosine")
DRIVERS = ("inline", "flower")
PARTITIONS = ("iid", "dirichlet", "one-class")
SUBSETS = "without-replacement"
UNITS = ("record", "user")
ROWS = ("sum", "mean")
EXPORTS = {"safetensors": "model.safetensors", "state-dict": "model.pt", "onnx": "model.onnx"}
"""The forms in which a model is exported, each with the name of its file."""

MOST_STEPS = 10**7

USUAL_DELTA = "1e-5, and less from a population of 100,000 on"

_NOISE = "noise that protects anybody (equipoise train --method sgd and clip-sgd have none)"
_OF_NUMBERS = frozenset({"above_zero", "share", "at_least_zero", "at_least_one"})


def setting(default: Any, help: str, **facts: Any) -> Any:
    """A field of a class of settings: its default, its help text, and what else is known of it.

    Args:
        default: of the field; MISSING where it must be given.
        help: what the command line says of it.
        facts: ``above_zero`` (what the number is, where it must be above 0), ``choices``, ``share`` (at
            least 0 and below 1), ``at_least_zero``, ``at_least_one``, ``of_data`` (its default follows from
            data set and model), ``path`` (its placeholder), ``shown`` (words for the default in help),
            ``metavar``, ``envvar``, ``read`` (from the words of the command line to the value), ``form``
            (their type).
    """
    return field(default=default, metadata={"help": help, **facts})


def _options(help: str, option: str = "option", parse: Callable[[str], tuple[str, Any]] | None = None) -> Any:
    """A field that takes NAME=VALUE words by --option, or by an option and a parser of its own."""
    facts = {"option": option, "metavar": "NAME=VALUE", "form": list[str] | None}
    read = {"read": lambda words: dict(map(parse or parse_option, words or []))}
    return field(default_factory=dict, metadata={"help": help, **facts, **read})


def _underscored(word: str | None) -> str | None:
    return word and word.replace("-", "_")


def _hyphenated(word: str | None) -> str | None:
    return word and word.replace("_", "-")


def _check_number(name: str, value: float) -> None:
    """Refuse NaN, infinity, and numbers that are infinite in the 32 bits of a model's numbers."""
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise SettingsError(f"{flag(name)} has {len(str(abs(value)))} digits, but 2^63 - 1 is the most.")
    elif not abs(value) <= LARGEST:
        without = " Without noise train --method sgd or clip-sgd." * (name == "epsilon")
        raise SettingsError(
            f"{flag(name)} is {value:g}, but it must be a finite number, of {LARGEST:g} at most.{without}"
        )


def _check_fields(settings: Any) -> None:
    """Refuse values that contradict the facts in the declaration; what is left open passes."""
    for item in fields(settings):
        value, facts = getattr(settings, item.name), item.metadata
        if value is None:
            continue
        if facts.keys() & _OF_NUMBERS and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise SettingsError(f"{flag(item.name)} is {value!r:.80}, but it must be a number.")
        if isinstance(value, int | float):
            _check_number(item.name, value)
        if "above_zero" in facts and not value > 0:
            raise SettingsError(
                f"{flag(item.name)} is {value:g}, but {facts['above_zero']} is a number above 0."
            )
        if "share" in facts and not 0 <= value < 1:
            raise SettingsError(f"{flag(item.name)} is {value:g}, but it must be at least 0 and below 1.")
        if "at_least_zero" in facts and value < 0:
            raise SettingsError(f"{flag(item.name)} is {value:g}, but it must be at least 0.")
        if "at_least_one" in facts and value < 1:
            raise SettingsError(f"{flag(item.name)} is {value}, but it must be at least 1.")
        if "choices" in facts:
            check_choice(item.name, value, facts["choices"])


def _check_delta(delta: float | None) -> None:
    if delta is not None and not 0 < delta < 1:
        raise SettingsError(
            f"--delta is {delta:g}, but it is a probability strictly between 0 and 1; it should be far below "
            "1/population."
        )


GROUPS: Mapping[str, tuple[str, ...]] = {
    "Data": (
        "data", "data_dir", "population", "target", "schema", "test", "test_share", "task", "class_weights",
        "subset", "public_records", "image_size", "canaries",
    ),
    "Privacy": (
        "epsilon", "delta", "noise_multiplier", "sampling", "relation", "unit", "owner", "records_per_user",
        "user_rows", "hardened", "ledger", "reproducible",
    ),
    "Method": ("method", "recipe", "variant", "options", "clip_norm", "clip_rule", "per_layer"),
    "Model and optimiser": (
        "model", "epochs", "steps", "batch_size", "learning_rate", "optimizer", "momentum", "weight_decay",
        "schedule", "ema", "views", "features", "seed",
    ),
    "Federation": (
        "clients", "rounds", "clients_per_round", "local_steps", "partition", "alpha", "driver",
    ),
    "Run": ("micro_batch_size", "evaluate_every", "device", "run_dir"),
}  # fmt: skip
"""The headings under which ``--help`` shows the settings, by name of the field."""


OF_OWN_DATA = (
    "population", "target", "schema", "test", "test_share", "task", "class_weights", "image_size",
)  # fmt: skip
"""The settings that say how files and functions of the user's own are read, and what is learnt of them."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What one training needs to know; None where the default settings decide."""

    data: str = setting(
        "digits", "Data set: a name, a CSV or Parquet file, a folder of images, or package.module:function."
    )
    data_dir: str | None = setting(
        None, "Folder that holds the data files.", path="DIR", envvar="EQUIPOISE_DATA"
    )
    population: int | None = setting(
        None, "Public number of records (own data only).", above_zero="the number of records"
    )
    target: str | None = setting(None, "Column of a table to learn; several separated by commas.")
    schema: str | None = setting(
        None, "Declared columns of a table; TABLE.schema.toml by default.", path="FILE", metavar="FILE"
    )
    test: str | None = setting(
        None, "Table or folder to evaluate on; the result is published.", path="FILE", metavar="FILE"
    )
    test_share: float | None = setting(
        None,
        "Share of the rows to evaluate on, and not to train on; the result is published, and no epsilon "
        "covers these rows.",
        above_zero="a share of the rows",
        share=True,
    )
    image_size: str | None = setting(
        None,
        "What images of a folder are brought to: 32x32, or 28x28x1 for grey.",
        metavar="HxW[x1]",
    )
    task: str | None = setting(
        None,
        "classification, regression or multi-label; by default what the target's column is.",
        choices=("classification", "regression", "multi-label"),
    )
    class_weights: dict[str, Any] = _options(
        "Weight of a class in the loss, a public number; repeatable.",
        option="class_weight",
        parse=lambda text: parse_weight(text),
    )
    method: str = setting("dp-sgd", "Training method: a name, or package.module:Class.")
    recipe: str | None = setting(
        None,
        "library (default), or as_published: the paper's algorithm, including its privacy flaws.",
        choices=("library", "as_published"),
        read=_underscored,
    )
    variant: str | None = setting(None, "Form of the method, where it has several.")
    options: dict[str, Any] = _options("Further setting of the method; repeatable.")
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
    epsilon: float | None = setting(
        None, "Privacy budget.", above_zero="a privacy budget", shown="by data and model"
    )
    delta: float | None = setting(None, "Failure probability of the guarantee.", shown=USUAL_DELTA)
    noise_multiplier: float | None = setting(
        None,
        "Noise, instead of a budget.",
        above_zero=_NOISE,
    )
    epochs: float | None = setting(
        None,
        "Expected passes over the data.",
        above_zero="the number of passes over the data",
        of_data=True,
    )
    batch_size: float | None = setting(
        None,
        "Expected number of records per step.",
        above_zero="the expected number of records per step",
        of_data=True,
    )
    sampling: str | None = setting(
        None,
        "poisson (default), truncated-poisson, without-replacement, full-batch or fixed-epochs.",
        read=_hyphenated,
    )
    relation: str | None = setting(
        None,
        "Neighbours: add-or-remove-one or replace-one; by default what the sampling is accounted under.",
        choices=RELATIONS,
        read=_underscored,
    )
    unit: str | None = setting(
        None, "Whom the guarantee covers: one record (default), or one user with all records.", choices=UNITS
    )
    owner: str | None = setting(
        None, "With --unit user: the column that names the user of each row.", metavar="COLUMN"
    )
    records_per_user: int | None = setting(
        None,
        "With --unit user: the most records of a user that are used, a public number.",
        at_least_one=True,
    )
    user_rows: str | None = setting(
        None,
        "With --unit user: draw users, and clip the sum or mean over their records.",
        choices=ROWS,
    )
    learning_rate: float | None = setting(None, "Learning rate.", above_zero="a step size", of_data=True)
    clip_norm: str | None = setting(
        None,
        "Bound on one record's gradient: a number, decay:START:RATE, quantile or quantile:SHARE.",
        shown="by data and model",
    )
    clip_rule: str | None = setting(None, "Name of a clip rule, such as abadi or psac.", of_data=True)
    per_layer: bool = setting(False, "Clip every layer on its own.")
    optimizer: str | None = setting(None, "sgd, adam or adamw.", choices=OPTIMIZERS, of_data=True)
    momentum: float | None = setting(None, "Momentum of sgd.", share=True, of_data=True)
    weight_decay: float | None = setting(None, "Weight decay.", at_least_zero=True, of_data=True)
    schedule: str | None = setting(
        None, "Learning rate: constant, linear or cosine.", choices=SCHEDULES, of_data=True
    )
    ema: float | None = setting(None, "Decay of averaged weights; 0 for none.", share=True)
    views: int | None = setting(
        None,
        "Random views of a record, averaged.",
        above_zero="the number of views of a record",
        of_data=True,
    )
    features: str | None = setting(
        None,
        f"Of models that have some to choose from: {', '.join(FEATURES)}.",
        choices=FEATURES,
        of_data=True,
    )
    micro_batch_size: int | None = setting(
        None, "Records per forward, at most.", above_zero="the number of records held at once"
    )
    evaluate_every: int | None = setting(
        None, "Steps between evaluations; ten in all by default.", above_zero="the number of steps"
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

    def resolved(self, default_model: str | None = None, population: int = 1) -> RunSettings:
        """The same settings with the default settings in the gaps, checked.

        Args:
            default_model: the model where neither the settings nor those of the data set name one.
            population: of the data, which delta must suit.

        >>> RunSettings(data="digits").resolved().batch_size
        718.5
        >>> RunSettings(data="digits", epochs=-1).resolved()
        Traceback (most recent call last):
            ...
        equipoise.app.option_checks.SettingsError: --epochs is -1, but ...
        """
        model = self.model or DEFAULT_MODEL.get(self.data) or default_model
        if model is None:
            raise SettingsError(
                f"--model is missing, and {self.data!r} has no default one. Name a model, or a function of "
                "your own as package.module:function."
            )
        defaults = default_settings(self.data, model, self.epsilon)
        filled: dict[str, Any] = {"model": model}
        for item in fields(self):
            if item.metadata.get("of_data") and getattr(self, item.name) is None:
                filled[item.name] = getattr(defaults, item.name)
        if self.learning_rate is None and "clip_norm" in self._no_use():
            # A clipped gradient has at most this length; longer steps than it leads to would differ in kind.
            filled["learning_rate"] = defaults.learning_rate * defaults.clip_norm
        if self.clip_norm is None:
            filled["clip_norm"] = f"{defaults.clip_norm:g}"
        if self.epsilon is None and self.noise_multiplier is None:
            filled["epsilon"] = defaults.epsilon
        if self.delta is None:
            filled["delta"] = default_delta(population)
        if self.ema is None and defaults.ema is not None:
            filled["ema"] = defaults.ema
        result = replace(self, **filled)
        result.check()
        return result

    def check(self) -> None:
        """Refuse values that cannot be used; what is left open passes.

        Raises:
            SettingsError: naming the option, its value, the reason and the remedy.
        """
        _check_fields(self)
        if self.epsilon is not None and self.noise_multiplier is not None:
            raise SettingsError(
                f"--epsilon {self.epsilon:g} and --noise-multiplier {self.noise_multiplier:g} were both "
                "given, and each decides the other. Leave one of them out; `equipoise calibrate` translates "
                "between them."
            )
        _check_delta(self.delta)
        if self.clip_norm is not None:
            parse_clip_norm(self.clip_norm)
        if self.clip_rule is not None and ":" in self.clip_rule:
            raise SettingsError(
                f"--clip-rule is {self.clip_rule!r}, but it takes the kind of a rule, such as psac. A rule "
                "of your own needs a method in the same module, such as a subclass of eq.DPSGD with a name "
                "of its own: give --method module:Class, and the rule by its kind."
            )
        offered = [name for name, entry in MODELS.items() if self.features in entry.features]
        if self.features is not None and self.model not in offered:
            raise SettingsError(
                f"--features is {self.features}, but only {' and '.join(offered)} can be trained on these. "
                f"Give --model {' or '.join(offered)}, or leave --features out."
            )
        self._check_data()
        self._check_unit()
        if self.sampling == SUBSETS and self.relation == "add_or_remove_one":
            raise SettingsError(
                "--relation is add-or-remove-one, but --sampling without-replacement draws subsets of a "
                "fixed size, which are accounted only under replace-one. Leave --relation out, or sample "
                "by poisson."
            )
        if self.sampling == SUBSETS and self.canaries is not None:
            raise SettingsError(
                f"--canaries is {self.canaries}, but each canary is there or not by chance, and --sampling "
                "without-replacement needs a public number of records. Sample by poisson."
            )

    def _check_unit(self) -> None:
        names = ("owner", "records_per_user", "user_rows")
        given = [flag(name) for name in names if getattr(self, name) is not None]
        if self.unit != "user":
            if given:
                belong, them = ("belongs", "it") if len(given) == 1 else ("belong", "them")
                raise SettingsError(
                    f"{' and '.join(given)} {belong} to --unit user, and without it single records are "
                    f"protected. Give --unit user, or leave {them} out."
                )
            return
        for name, meant in (
            ("owner", "the column that names the user of each row"),
            ("records_per_user", "the most records of a user that are used, a public number that you state"),
        ):
            if getattr(self, name) is None:
                raise SettingsError(f"--unit user needs {flag(name)}: {meant}.")
        for name, taken, instead in (
            ("subset", "first", "give a file with fewer users"),
            ("public_records", "last", "give them to the method from Python"),
        ):
            if (count := getattr(self, name)) is not None:
                raise SettingsError(
                    f"{flag(name)} is {count}, which takes the {taken} rows, whosever they are, and --unit "
                    f"is user: some users would be cut in two. Leave {flag(name)} out, or {instead}."
                )
        if data_form(self.data) not in ("table", "code"):
            raise SettingsError(
                f"--unit user is for tables and for data of your own, but --data is {self.data!r}, whose "
                "records have no owners. Leave --unit, --owner and --records-per-user out."
            )
        if self.canaries is not None:
            raise SettingsError(
                f"--canaries is {self.canaries}, but canaries are single records, and --unit is user. Audit "
                "the method itself: `equipoise audit --method NAME --unit user --records-per-user G`."
            )

    def _check_data(self) -> None:
        form = data_form(self.data)
        if form == "code" and self.population is None:
            raise SettingsError(
                "--population is missing. It sets the sampling rate and the divisor of the noised sums, so "
                f"it must be a public number that you state. Counted from the records that {self.data!r} "
                "returns, it would change with one record more, and the privacy proof would not hold. Give "
                "the published size of the set, or a round figure near it."
            )
        for names, forms, meant in (
            (("target", "schema"), ("table",), "tables"),
            (("test", "test_share"), ("table", "images"), "tables and folders of images"),
            (("image_size",), ("images",), "folders of images"),
        ):
            given = [flag(name) for name in names if getattr(self, name) is not None]
            if given and form not in forms:
                raise SettingsError(
                    f"{' and '.join(given)} is for {meant}, but --data is {self.data!r}. Name a file that "
                    "ends in .csv, .tsv or .parquet, or a folder; or leave it out."
                )
        if form == "images" and (self.population is None or self.image_size is None):
            raise SettingsError(
                f"--data {self.data!r} is a folder of images, which needs --population and --image-size: the "
                "number of images and their size are public numbers that you state, such as --population "
                "5000 --image-size 32x32. Read from the private images they would reveal persons."
            )
        if form in ("table", "images") and self.test is None and self.test_share is None:
            if not Path(self.data).exists():
                raise SettingsError(f"--data {self.data!r} does not exist. Check the path.")
            raise SettingsError(
                "the rows to evaluate on are missing: give --test FILE, or --test-share 0.2. What the "
                "evaluation says of them is published, and no epsilon covers it."
            )
        if self.test is not None and self.test_share is not None:
            raise SettingsError("--test and --test-share both name rows to evaluate on. Give one of them.")
        for name, weight in self.class_weights.items():
            number = isinstance(weight, int | float) and not isinstance(weight, bool)
            if not (number and math.isfinite(weight) and weight > 0):
                raise SettingsError(
                    f"--class-weight {name!r} is {weight!r}, but a weight is a number above 0, such as 2.5."
                )

    def neighbours(self) -> str:
        """The neighbouring relation: as given, or the one that the sampling is accounted under.

        >>> RunSettings().neighbours(), RunSettings(sampling="without-replacement").neighbours()
        ('add_or_remove_one', 'replace_one')
        """
        return self.relation or RELATIONS[self.sampling == SUBSETS]

    def said(self, name: str) -> str:
        """A setting in an error message, and whether it is the default.

        >>> RunSettings(model="linear", batch_size=256).said("batch_size")
        '--batch-size is 256, the default'
        """
        value = getattr(self, name)
        defaults = None if self.model is None else default_settings(self.data, self.model, self.epsilon)
        usual = defaults is not None and value == getattr(defaults, name)
        return f"{flag(name)} is {value:g}" + (", the default" if usual else "")

    def publishable(self) -> dict[str, Any]:
        """The settings that tell nothing about the machine: without paths, and without what was left open.

        >>> [name for name in RunSettings(method="sgd", epsilon=3.0).publishable() if name == "epsilon"]
        []
        """
        left_out = {item.name for item in fields(self) if "path" in item.metadata} | set(self._no_use())
        values = {**asdict(self), "data": self.data_name}
        return {k: v for k, v in values.items() if k not in left_out and v not in (None, {})}

    def _no_use(self) -> tuple[str, ...]:
        """Settings that method or data have no use for: a method without noise meets no budget."""
        entry = registered().get(self.method)
        of_method = () if entry is None else entry.no_use
        in_folder = data_form(self.data) in ("named", "code") and self.data != "digits"
        return of_method if in_folder else (*of_method, "data_dir")

    @property
    def data_name(self) -> str:
        """What the data are called in files that are published: of files the name without their folder.

        >>> RunSettings(data="secret/place/people.csv").data_name
        'people.csv'
        """
        files = data_form(self.data) in ("table", "images")
        return Path(self.data).resolve().name if files else self.data

    @property
    def test_records_apart(self) -> bool:
        """Whether the test records are known to be others than those that are trained on."""
        apart = self.test_share is not None or data_form(self.data) == "named"
        return apart and self.canaries is None  # canaries are made of test records

    def command(self, with_paths: bool = False) -> str:
        """The command that repeats the run, with placeholders for paths unless only the user sees it."""
        words = ["equipoise", "train"]
        for item in fields(self):
            value = getattr(self, item.name)
            if value is None or value is False or item.name in ("run_dir", *self._no_use()):
                continue
            if isinstance(value, dict):
                option = flag(item.metadata["option"])
                words += [word for n, v in value.items() for word in (option, f"{n}={_written(v)}")]
                continue
            value = self.data_name if item.name == "data" and not with_paths else value
            words.append(flag(item.name))
            if "path" in item.metadata and not with_paths:
                words.append(item.metadata["path"])
            elif value is not True:
                words.append(f"{value:g}" if isinstance(value, float) else str(value))
        return shlex.join(words)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunSettings:
        """The settings that `to_json` wrote.

        Raises:
            SettingsError: names that this version does not know.
        """
        check_saved(cls, values, needed="data")
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class FederationSettings:
    """What a simulated federation needs to know; None where a default decides.

    Attributes:
        base: data, model, budget, seed and what else a training needs; `method` is the federated one,
            `batch_size` what a client of average size expects to draw.
    """

    base: RunSettings = field(default_factory=RunSettings)
    clients: int = setting(10, "Number of data owners, P.", at_least_one=True)
    rounds: int = setting(60, "Number of rounds, R.", at_least_one=True)
    clients_per_round: int | None = setting(
        None, "Picked at random each round; all by default.", at_least_one=True
    )
    local_steps: int = setting(5, "Steps of a client per round, K.", at_least_one=True)
    partition: str = setting("iid", "iid, dirichlet or one-class.", choices=PARTITIONS)
    alpha: float = setting(
        0.5, "Concentration of dirichlet; small: few classes each.", above_zero="the concentration"
    )
    driver: str = setting(
        "inline", "inline, or flower: its simulation, with the extra 'federated'.", choices=DRIVERS
    )

    def check(self) -> None:
        """Refuse values that cannot be used.

        Raises:
            SettingsError: naming the option.
        """
        self.base.check()
        _check_fields(self)
        if self.clients_per_round is not None and self.clients_per_round > self.clients:
            raise SettingsError(
                f"--clients-per-round is {self.clients_per_round}, but there are {self.clients} clients."
            )
        _check_steps(self.rounds * self.local_steps, f"--rounds {self.rounds}")
        check_federated(self.base.method)
        if self.driver == "flower" and find_spec("flwr") is None:
            raise SettingsError(f"--driver flower: {lacking('flwr')}")

    def public(self) -> dict[str, Any]:
        """The settings as plain values, without paths."""
        return {**self.base.publishable(), **self.own()}

    def command(self) -> str:
        """The command that repeats it, with placeholders for paths."""
        words = self.base.command().replace("equipoise train", "equipoise federate", 1)
        for name, value in self.own().items():
            words += f" {flag(name)} {value:g}" if isinstance(value, float) else f" {flag(name)} {value}"
        return words

    def own(self) -> dict[str, Any]:
        """Those of the federation itself that are of use."""
        left_out = {"base"} if self.partition == "dirichlet" else {"base", "alpha"}
        own = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in left_out}
        return {name: value for name, value in own.items() if value is not None}

    def to_json(self) -> str:
        """All settings, to continue a folder and for other processes."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> FederationSettings:
        """What `to_json` wrote.

        Raises:
            SettingsError: it did not write this.
        """
        try:
            values = json.loads(text)
            base = RunSettings.from_json(values["base"])
        except SettingsError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise SettingsError(
                f"the saved settings of the federation are damaged ({error!s:.200}). Restore them from a "
                "copy."
            ) from None
        found = {**values, "base": base}
        check_saved(cls, found, needed="base")
        return cls(**found)

    @classmethod
    def read(cls, path: Path) -> FederationSettings:
        """The settings in a file that `to_json` was written to.

        Raises:
            RunFolderError, SettingsError: it cannot be read, or holds something else.
        """
        return cls.from_json(json.dumps(read_json(path)))


@dataclass(frozen=True, kw_only=True)
class CalibrationSettings:
    """What `equipoise calibrate` is asked: one of `noise_multiplier` and `epsilon`, from the other."""

    population: int = setting(MISSING, "Public number of records.", above_zero="the number of records")
    batch_size: float = setting(
        MISSING,
        "Expected number of records per step.",
        above_zero="the expected number of records per step",
    )
    steps: int | None = setting(None, "Number of steps.", above_zero="the number of steps")
    epochs: float | None = setting(
        None, "Expected passes, instead of steps.", above_zero="the number of passes over the data"
    )
    delta: float = setting(
        None, "Failure probability of the guarantee.", shown=USUAL_DELTA, form=float | None
    )
    noise_multiplier: float | None = setting(
        None, "Noise over clip norm; asks for epsilon.", above_zero=_NOISE
    )
    epsilon: float | None = setting(
        None, "Target; asks for the noise multiplier.", above_zero="a privacy budget"
    )
    sampling: str = setting(
        "poisson", "poisson, truncated-poisson, without-replacement, full-batch or fixed-epochs."
    )
    records_per_user: int = setting(
        1, "Protect users of so many records at most, each drawn by itself.", at_least_one=True
    )
    relation: str = setting(
        "add_or_remove_one",
        "add-or-remove-one or replace-one.",
        choices=RELATIONS,
        read=_underscored,
        shown="add-or-remove-one",
    )

    def __post_init__(self) -> None:
        if self.delta is None:
            object.__setattr__(self, "delta", default_delta(self.population))

    def check(self) -> None:
        """Refuse values that cannot be used.

        Raises:
            SettingsError: naming the option and its value.
        """
        if (self.steps is None) == (self.epochs is None):
            raise SettingsError("give exactly one of --steps and --epochs.")
        if (self.noise_multiplier is None) == (self.epsilon is None):
            raise SettingsError(
                "give exactly one of --noise-multiplier (to learn epsilon) and --epsilon (to learn the noise "
                "multiplier)."
            )
        _check_fields(self)
        _check_delta(self.delta)
        if self.batch_size > self.population:
            raise SettingsError(
                f"--batch-size is {self.batch_size:g}, but --population is {self.population}. Give at most "
                "that many."
            )
        self.number_of_steps()

    def number_of_steps(self) -> int:
        """The steps, or as many as the epochs take."""
        _check_steps(self.steps or 0, f"--steps {self.steps}")
        return self.steps or steps_of(self.epochs or 0.0, self.population, self.batch_size)


@dataclass(frozen=True, kw_only=True)
class AuditSettings:
    """What `equipoise audit` attacks, and how."""

    method: str | None = setting(
        None, "Audit a method of the table, by canaries in small trainings; or that of --neighbours."
    )
    variant: str | None = setting(None, "With --method: its form, where it has several.")
    options: dict[str, Any] = _options("With --method: further argument of it; repeatable.")
    one_step: bool = setting(
        False, "Audit steps on all records, clean and with bugs; of --method, or of all."
    )
    neighbours: bool = setting(
        False, "Take steps with one record more, less or replaced, and see what moves; of RUN, or of --data."
    )
    positions: int = setting(10, "With --neighbours: how many records are tried.", at_least_one=True)
    steps: int = setting(1, "With --neighbours: steps on each pair of data sets.", at_least_one=True)
    threads: int = setting(1, "With --neighbours: try so many threads, too.", at_least_one=True)
    epsilon: float = setting(2.0, "What the method's noise is calibrated to.", above_zero="a privacy budget")
    delta: float = setting(1e-5, "Failure probability of the guarantee.")
    relation: str = setting(
        "add_or_remove_one",
        "Of --method: add-or-remove-one or replace-one.",
        choices=RELATIONS,
        read=_underscored,
        shown="add-or-remove-one",
    )
    unit: str = setting("record", "Of --method: one record, or one user with several.", choices=UNITS)
    records_per_user: int | None = setting(
        None, "With --unit user: how many records a user has, at most.", at_least_one=True
    )
    user_rows: str | None = setting(
        None, "With --unit user: draw users, by the sum or mean over their records.", choices=ROWS
    )
    hardened: bool = setting(False, "With --method: exact noise on a grid of integers.")
    seeds: int = setting(1, "Number of audits, each with a seed of its own.", at_least_one=True)
    shadow: bool = setting(False, "Guess members with shadow models, with privacy and without.")
    data: str | None = setting(
        None,
        "Data of --shadow and --neighbours, as of `train`; digits by default. Or the run's own function.",
    )
    model: str | None = setting(
        None, "Model of --neighbours; or the run's own function for the model, named again."
    )
    models: int = setting(32, "Number of shadow models of either kind.")
    confidence: float = setting(0.99, "Over all seeds together; of each attack on a run.")
    data_dir: str | None = setting(
        None, "Folder that holds the data files.", path="DIR", envvar="EQUIPOISE_DATA"
    )

    def check(self, of_run: bool) -> None:
        """Refuse options that cannot be used, or that do not fit together.

        Args:
            of_run: whether a run was named.

        Raises:
            SettingsError: naming the option.
        """
        kinds = {
            "RUN": of_run and not self.neighbours,
            "--method": self.method is not None and not self.neighbours,
            "--one-step": self.one_step and (self.method is None or self.neighbours),
            "--shadow": self.shadow,
            "--neighbours": self.neighbours,
        }
        asked = [name for name, given in kinds.items() if given]
        if len(asked) != 1:
            raise SettingsError(
                "audit takes one of RUN, --method, --one-step, --shadow and --neighbours, and got "
                f"{' and '.join(asked) or 'none of them'}."
            )
        _check_fields(self)
        _check_delta(self.delta)
        of_unit = self.unit == "user" or self.records_per_user or self.user_rows
        of_method = self.hardened or self.relation != RELATIONS[0] or self.variant or self.options or of_unit
        if self.neighbours and of_run and (of_method or self.method is not None):
            raise SettingsError(
                "--neighbours RUN takes method and settings from the run: leave --method, --relation, "
                "--hardened, --variant, --option and --unit out."
            )
        if self.method is None and of_method and not self.neighbours:
            raise SettingsError(
                "--relation, --hardened, --variant, --option and --unit are only for --method."
            )
        if self.neighbours and of_unit:
            raise SettingsError(
                "--unit is for --method; --neighbours RUN changes whole users where the run protects users."
            )
        if self.unit != "user" and of_unit:
            raise SettingsError("--records-per-user and --user-rows belong to --unit user.")
        if self.unit == "user" and self.records_per_user is None:
            raise SettingsError("--unit user needs --records-per-user: how many records a user has.")
        if self.one_step and (self.hardened or self.seeds != 1):
            raise SettingsError("--one-step has one seed, and looks at noise in floating point.")
        if not 0.5 <= self.confidence < 1:
            raise SettingsError(f"--confidence is {self.confidence}, but it lies between 0.5 and 1.")
        if self.shadow and ":" in (self.data or ""):
            raise SettingsError(
                f"--data is {self.data!r}, but shadow models take one of the named data sets."
            )
        if self.shadow and self.models < 4:
            raise SettingsError(
                f"--models is {self.models}, but 4 shadow models are the fewest that can be compared."
            )


def steps_of(epochs: float, population: int, batch_size: float, most: int = MOST_STEPS) -> int:
    """The fewest steps whose expected passes over the data are at least `epochs`.

    Raises:
        SettingsError: they are more than `most`.

    >>> steps_of(2, 1437, 718.5), steps_of(0.001, 1437, 718.5)
    (4, 1)
    """
    steps = epochs * population / batch_size
    _check_steps(steps, f"--epochs {epochs:g}", most)
    # What rounding adds to a whole number of steps must not make one step more.
    return max(1, math.ceil(steps - 1e-9))


def _check_steps(steps: float, given: str, most: int = MOST_STEPS) -> None:
    if not steps <= most:
        raise SettingsError(
            f"{given} makes {steps:.4g} steps, but the command line takes {most:,} at most: more are not "
            "accounted for in a reasonable time. Give fewer, or a larger --batch-size."
        )


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
            f"{'the unknown names ' + ', '.join(unknown) if unknown else f'no {needed}'}; another version of "
            "equipoise wrote them, or they were edited. Use the version that began the run."
        )
    for name, allowed in get_type_hints(kind).items():
        value = values.get(name)
        if name in values and not _is_of(value, allowed):
            raise SettingsError(
                f"the saved settings have {name}={value!r:.80}, which is no "
                f"{getattr(allowed, '__name__', allowed)}: they were edited. "
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

    Numbers with commas between them are a list, with brackets around them or without.

    >>> parse_option("schedule.period=8"), parse_option("variant=joint")
    (('schedule.period', 8), ('variant', 'joint'))
    >>> parse_option("strategy.values=1,0.5")
    ('strategy.values', [1, 0.5])
    """
    name, equals, value = text.partition("=")
    name = name.strip().replace("-", "_")
    if not equals or not name:
        raise SettingsError(f"--option is {text!r}, but it must be NAME=VALUE, such as schedule.period=8.")
    for written in [value, f"[{value}]"] if "," in value else [value]:
        with suppress(ValueError, RecursionError):
            read = json.loads(written)
            if written == value or all(type(item) in (int, float) for item in read):
                return name, read
    return name, value


def parse_weight(text: str) -> tuple[str, float]:
    """NAME=NUMBER of the command line, where the name is that of a class and may hold any sign.

    >>> parse_weight("<=50K=0.5")
    ('<=50K', 0.5)
    """
    name, equals, value = text.rpartition("=")
    try:
        if equals:
            return name.strip(), float(value)
    except ValueError:
        pass
    raise SettingsError(f"--class-weight is {text!r}, but it must be CLASS=NUMBER, such as yes=2.5.")


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
