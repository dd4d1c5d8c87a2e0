"""The settings of each command, declared once: options, help, checks, files and their schema follow.

A setting that the user left open is None; `RunSettings.resolved` fills it from the recipe for data and model.
What is resolved is what goes into `config.json`, so that a run folder tells every number that was used,
chosen or not. Nothing here needs torch.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, fields, replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from equipoise._extras import lacking
from equipoise._files import schema_file
from equipoise._relations import RELATIONS
from equipoise._rounding import plain
from equipoise._run_files import read_json
from equipoise._validate import suggestion
from equipoise.app.default_settings import default_delta, default_model_of, default_settings
from equipoise.app.model_table import ON_FEATURES, STATISTICS
from equipoise.app.option_checks import (
    LARGEST,
    LOSS,
    SettingsError,
    check_data_and_model,
    check_federated,
    data_form,
    flag,
    parse_clip_norm,
)
from equipoise.methods.registry import registered

"""The forms in which a model is exported, each with the name of its file."""

MOST_STEPS = 10**7

USUAL_DELTA = "1e-5, and less from a population of 100,000 on"

NO_NOISE = " For none at all, and no epsilon: equipoise train --method sgd or clip-sgd."

NAMED = {"metavar": "NAME=VALUE"}

BY_DATA = "by data and model"

OF_OWN_DATA = (
    "population", "target", "schema", "test", "test_share", "task", "loss", "class_weights", "image_size",
)  # fmt: skip
"""The settings that say how files and functions of the user's own are read, and what is learnt of them."""

# ---- kinds of values: the command line gives words, a file numbers, lists and tables


def _words_to(convert: Callable[[str], Any]) -> BeforeValidator:
    return BeforeValidator(lambda value: convert(value) if isinstance(value, str) else value)


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Tables in tables as dotted names.

    >>> flat({"schedule": {"period": 8}})
    {'schedule.period': 8}
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        inner = flat(value, f"{before}{name}.") if isinstance(value, Mapping) else {f"{before}{name}": value}
        found |= inner
    return found


def _table_of(parse: Callable[[str], tuple[str, Any]]) -> BeforeValidator:
    """NAME=VALUE words of the command line, or a table of a file."""

    def read(value: Any) -> Any:
        if isinstance(value, Mapping):
            return flat(value)
        return dict(map(parse, map(str, value))) if isinstance(value, list) else value

    return BeforeValidator(read)


# an integer beyond 63 bits is none to torch, and a number beyond LARGEST infinite in the 32 bits of a model
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(gt=0, lt=2**63)]
Positive = Annotated[float, Field(gt=0, le=LARGEST)]
NotNegative = Annotated[float, Field(ge=0, le=LARGEST)]
Share = Annotated[float, Field(ge=0, lt=1)]
Probability = Annotated[float, Field(gt=0, lt=1)]
UNDERSCORED = _words_to(lambda word: word.replace("-", "_"))
Relation = Annotated[Literal["add_or_remove_one", "replace_one"], UNDERSCORED]
SamplingWord = Annotated[
    Literal[
        "poisson", "truncated-poisson", "balls-in-bins", "without-replacement", "full-batch", "fixed-epochs"
    ],
    _words_to(lambda word: word.replace("_", "-")),
]
Unit = Literal["record", "user"]
UserRows = Literal["sum", "mean"]
Features = Literal["strokes", "upright-strokes", "things", "deep-things", "steady-things"]
Options = Annotated[dict[str, JsonValue], _table_of(lambda text: parse_option(text))]
Weights = Annotated[dict[str, Positive], _table_of(lambda text: parse_weight(text))]
ClipNorm = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) in (int, float) else value),
    AfterValidator(lambda text: parse_clip_norm(text) and text),
]
Columns = Annotated[
    str, BeforeValidator(lambda value: ",".join(map(str, value)) if isinstance(value, list) else value)
]

SUBSETS = "without-replacement"


def setting(default: Any, help: str, **shown: Any) -> Any:
    """A field: its default (... if it must be given), its help text, and how the command line shows it.

    Args:
        shown: ``group`` (a heading of ``--help`` for the fields from this one on), ``metavar``, ``envvar``,
            ``path`` (the placeholder of what is not published), ``usual`` (words for the default), ``remedy``
            (what an error ends with), ``option`` (its name, if it is not that of the field).
    """
    if default in (dict, list):
        return Field(default_factory=default, description=help, json_schema_extra=shown)
    return Field(default, description=help, json_schema_extra=shown)


def facts(kind: type) -> dict[str, FieldInfo]:
    """What pydantic knows of the fields of a class of settings: description, default, and what is shown."""
    found: Any = kind
    return dict(found.__pydantic_fields__)


def shown_of(field: FieldInfo) -> dict[str, Any]:
    """What `setting` was given for the command line."""
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}


T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
def settings(kind: type[T]) -> type[T]:
    """A frozen class of settings. Its values are checked when it is made: SettingsError names the option."""
    config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    made: Any = dataclass(frozen=True, kw_only=True, config=config)(kind)
    checked = made.__init__

    def __init__(self: Any, **values: Any) -> None:
        try:
            checked(self, **values)
        except ValidationError as error:
            raise SettingsError(_said(made, error)) from None

    made.__init__ = __init__
    return made


def _said(kind: type, error: ValidationError) -> str:
    """What is wrong with the first value, in the words of the command line."""
    found = error.errors(include_url=False)[0]
    name, *inner = map(str, found["loc"])
    known = facts(kind)
    if name not in known:
        return f"{name} is no setting.{suggestion(name, known)} Remove it, or use the version that wrote it."
    option = flag(shown_of(known[name]).get("option", name))
    if found["type"].startswith("missing"):
        return f"{option} is missing."
    if isinstance(found.get("ctx", {}).get("error"), SettingsError):
        return str(found["ctx"]["error"])
    said = found["msg"].replace("Input should be", "it must be").replace("'", "")
    given = plain(found["input"]) if isinstance(found["input"], float) else f"{found['input']!r:.80}"
    remedy = shown_of(known[name]).get("remedy", "")
    return f"{' '.join([option, *inner[:1]])} is {given}, but {said[0].lower()}{said[1:]}.{remedy}"


def schema() -> dict[str, Any]:
    """The JSON schema of a training's configuration: of ``--config`` files and of saved settings."""
    return TypeAdapter(RunSettings).json_schema()


@settings
class RunSettings:
    """What one training needs to know; None where the recipe for data and model decides."""

    data: str = setting(
        "digits",
        "Data set: a name, a CSV or Parquet file, a folder of images, or package.module:function.",
        group="Data",
    )
    data_dir: str | None = setting(
        None, "Folder that holds the data files.", path="DIR", envvar="EQUIPOISE_DATA"
    )
    population: Count | None = setting(None, "Public number of records (own data only).")
    target: Columns | None = setting(None, "Column of a table to learn; several separated by commas.")
    schema: str | None = setting(
        None, "Declared columns of a table; TABLE.schema.toml by default.", path="FILE"
    )
    test: str | None = setting(None, "Table or folder to evaluate on; the result is published.", path="FILE")
    test_share: Probability | None = setting(
        None,
        "Share of the rows to evaluate on, and not to train on; the result is published, and no epsilon "
        "covers these rows.",
    )
    private_validation: Probability | None = setting(
        None,
        "Share of the private records to score on with noise, in place of the test records, and not to train "
        "on; the best step is kept.",
    )
    score: str | None = setting(
        None,
        "With --private-validation: accuracy (default), balanced_accuracy:CLASSES, auc, calibration, "
        "loss:BOUND, recall:K or hits:K; of numbers error:BOUND (default error:1) on targets from -1 to 1.",
    )
    image_size: str | None = setting(
        None, "Resize images of a folder to this size: 32x32, or 28x28x1 for grey.", metavar="HxW[x1]"
    )
    task: Literal["classification", "regression", "multi-label"] | None = setting(
        None, "classification, regression or multi-label; by default what the target's column is."
    )
    loss: str | None = setting(
        None,
        "Loss of a record: squared, huber:D (in units of the target), quantile:T, poisson, logistic, or "
        "package.module:function; by default squared for a number, logistic for classes.",
    )
    class_weights: Weights = setting(
        dict, "Weight of a class in the loss, a public number; repeatable.", **NAMED, option="class_weight"
    )
    subset: Count | None = setting(
        None, "Use only the first so many training records; their number is public."
    )
    public_records: Count | None = setting(None, "Declare the last so many training records public.")
    canaries: Count | None = setting(
        None, "Insert N synthetic canary records, each with probability 1/2, for auditing.", metavar="N"
    )
    method: str = setting("dp-sgd", "Training method: a name, or package.module:Class.", group="Method")
    recipe: Annotated[Literal["library", "as_published"], UNDERSCORED] | None = setting(
        None, "library (default), or as_published: the paper's algorithm, including its privacy flaws."
    )
    variant: str | None = setting(None, "Form of the method, where it has several.")
    options: Options = setting(dict, "Further setting of the method; repeatable.", **NAMED, option="option")
    clip_norm: ClipNorm | None = setting(
        None,
        "Bound on one record's gradient: a number, decay:START:RATE, line:START:END:STEPS, quantile or "
        "quantile:SHARE.",
        usual=BY_DATA,
    )
    clip_rule: str | None = setting(None, "Name of a clip rule, such as abadi or psac.", usual=BY_DATA)
    per_layer: bool = setting(False, "Clip each layer separately.")
    epsilon: Positive | None = setting(
        None, "Privacy budget.", group="Privacy", usual=BY_DATA, remedy=NO_NOISE
    )
    delta: Probability | None = setting(None, "Failure probability of the guarantee.", usual=USUAL_DELTA)
    noise_multiplier: Positive | None = setting(None, "Noise, instead of a budget.", remedy=NO_NOISE)
    sampling: SamplingWord | None = setting(
        None,
        "poisson (default), truncated-poisson, balls-in-bins (shuffled epochs), without-replacement, "
        "full-batch or fixed-epochs.",
    )
    relation: Relation | None = setting(
        None,
        "Neighbours: add-or-remove-one or replace-one; by default what the sampling is accounted under.",
    )
    unit: Unit | None = setting(
        None, "Whom the guarantee covers: one record (default), or one user with all records."
    )
    owner: str | None = setting(
        None, "With --unit user: the column that names the user of each row.", metavar="COLUMN"
    )
    records_per_user: Count | None = setting(
        None, "With --unit user: the most records of a user that are used, a public number."
    )
    user_rows: UserRows | None = setting(
        None, "With --unit user: sample users, and clip the sum or mean over their records."
    )
    hardened: bool = setting(False, "Exact noise on a grid of integers; slower.")
    reproducible: bool = setting(False, "Noise follows the seed too: NOT PRIVATE.")
    secret_seed: str | None = setting(
        None,
        "File of 32 secret bytes that noise follows, with --seed: its keeper can repeat the run.",
        path="FILE",
    )
    ledger: str | None = setting(None, "Journal shared by runs over one data set.", path="FILE")
    runs: Count | None = setting(
        None, "With --ledger: how many runs share the budget, those before this one and those to come."
    )
    model: str | None = setting(
        None, "Name of a model, or package.module:function.", group="Model and optimiser"
    )
    features: Features | None = setting(
        None, f"Of models that have some to choose from: {', '.join(get_args(Features))}.", usual=BY_DATA
    )
    epochs: Positive | None = setting(None, "Expected passes over the data.", usual=BY_DATA)
    batch_size: Positive | None = setting(None, "Expected number of records per step.", usual=BY_DATA)
    learning_rate: Positive | None = setting(None, "Learning rate.", usual=BY_DATA)
    optimizer: Literal["sgd", "adam", "adamw"] | None = setting(None, "sgd, adam or adamw.", usual=BY_DATA)
    momentum: Share | None = setting(None, "Momentum of sgd.", usual=BY_DATA)
    weight_decay: NotNegative | None = setting(None, "Weight decay.", usual=BY_DATA)
    schedule: Literal["constant", "linear", "cosine"] | None = setting(
        None, "Learning rate: constant, linear or cosine.", usual=BY_DATA
    )
    ema: Share | None = setting(None, "Decay of averaged weights; 0 for none.", usual=BY_DATA)
    views: Count | None = setting(None, "Random views of a record, averaged.", usual=BY_DATA)
    seed: Whole = setting(0, "Initial weights and other public randomness.")
    micro_batch_size: Count | None = setting(None, "At most so many records per forward pass.", group="Run")
    evaluate_every: Count | None = setting(None, "Steps between evaluations; ten in all by default.")
    device: str | None = setting(None, "Where to compute: cpu, cuda, cuda:1, mps.")
    run_dir: str | None = setting(None, "The run folder to make; runs/DATA-TIME by default.", path="DIR")

    def resolved(self, default_model: str | None = None, population: int = 1) -> RunSettings:
        """The same settings with those of the recipe in the gaps, checked.

        Args:
            default_model: the model where neither the settings nor those of the data set name one.
            population: of the data, which delta must suit.

        >>> RunSettings(data="digits").resolved().batch_size
        718.5
        >>> RunSettings(data="digits", epochs=-1)
        Traceback (most recent call last):
            ...
        equipoise.app.option_checks.SettingsError: --epochs is -1, but it must be greater than 0.
        """
        model = self.model or default_model_of(self.data) or default_model
        if model is None:
            raise SettingsError(
                f"--model is missing, and {self.data!r} has no default one. Name a model, or a function of "
                "your own as package.module:function."
            )
        usual = default_settings(self.data, model, self.epsilon)
        if usual.sampling is not None and self.sampling is None and self.batch_size is None:
            return replace(self, model=model, sampling=usual.sampling).resolved(population=population)
        filled: dict[str, Any] = {
            name: getattr(usual, name)
            for name, field in facts(RunSettings).items()
            if shown_of(field).get("usual") == BY_DATA
        }
        filled["delta"] = default_delta(population)
        filled |= registered().get(self.method, {}).get("usual", {})
        if "clip_norm" in self._no_use():
            # A clipped gradient has at most this length; longer steps than it leads to would differ in kind.
            filled["learning_rate"] *= usual.clip_norm
        idle = {"epsilon"} if self.noise_multiplier is not None else set()
        idle |= self._idle().keys()
        gaps = {n: value for n, value in filled.items() if getattr(self, n) is None and n not in idle}
        result = replace(self, model=model, **gaps)
        result.check()
        return result

    def check(self) -> None:
        """Refuse settings that do not fit together; what is left open passes.

        Raises:
            SettingsError: naming the option, its value, the reason and the remedy.
        """
        check_data_and_model(self.data, self.model)
        for wrong, why in chain(self._conflicts(), self._of_data(), self._of_users()):
            if wrong:
                raise SettingsError(why)

    def _given(self, *names: str) -> list[str]:
        return [flag(name) for name in names if getattr(self, name) is not None]

    def _idle(self) -> dict[str, str]:
        """Settings that sampling or optimiser has no use for, and why."""
        idle = {}
        if self.sampling == "full-batch":
            idle["batch_size"] = "--sampling full-batch takes all records in every step"
        if self.optimizer not in (None, "sgd"):
            idle["momentum"] = f"--optimizer {self.optimizer} has betas of its own"
        return idle

    def _conflicts(self) -> Iterator[tuple[bool, str]]:
        """What must not be, and what is said then."""
        for name, why in self._idle().items():
            value = getattr(self, name)
            yield value is not None, f"{flag(name)} is {value}, but {why}. Leave {flag(name)} out."
        yield (
            self.epsilon is not None and self.noise_multiplier is not None,
            f"--epsilon {self.epsilon} and --noise-multiplier {self.noise_multiplier} were both given, and "
            "each decides the other. Leave one of them out; `equipoise calibrate` translates between them.",
        )
        yield (
            self.runs is not None and None in (self.epsilon, self.ledger),
            f"--runs {self.runs} is how many runs of one journal share a budget. Give --epsilon, and the "
            "same --ledger FILE to each of them.",
        )
        yield (
            self.loss is not None and not re.fullmatch(LOSS, self.loss),
            f"--loss is {self.loss!r}, but it must be squared, huber:D with D > 0 in units of the target, "
            "quantile:T with T between 0 and 1, poisson, logistic, or package.module:function.",
        )
        yield (
            ":" in (self.clip_rule or ""),
            f"--clip-rule is {self.clip_rule!r}, but it takes the kind of a rule, such as psac. A rule of "
            "your own needs a method in the same module, such as a subclass of eq.DPSGD with a name of its "
            "own: give --method module:Class, and the rule by its kind.",
        )
        yield (
            self.features is not None and self.model != ON_FEATURES,
            f"--features is {self.features}, but only {ON_FEATURES} can be trained on these. Give --model "
            f"{ON_FEATURES}, or leave --features out.",
        )
        fixed = {**vars(default_settings(self.data, "statistics")), "clip_norm": "1", "method": "dp-sgd"}
        others = ("loss", "class_weights", "canaries", "per_layer", "options", *fixed)
        for name in others if self.model in STATISTICS else ():
            value = getattr(self, name)
            yield (
                name not in ("epsilon", "model") and value not in (None, {}, False, fixed.get(name)),
                f"{flag(name)} is {value}, but --model {self.model} takes one release of all rows at clip "
                "norm 1, and no steps. Leave it out.",
            )
        yield (
            self.score is not None and self.private_validation is None,
            f"--score is {self.score}, but it is taken on records that are held apart. Give "
            "--private-validation 0.1.",
        )
        yield (
            self.canaries is not None and self.private_validation is not None,
            f"--canaries is {self.canaries}, but canaries are made of test records, in whose place "
            "--private-validation scores. Leave one of them out.",
        )
        yield (
            self.sampling == SUBSETS and self.relation == "add_or_remove_one",
            "--relation is add-or-remove-one, but --sampling without-replacement draws subsets of a fixed "
            "size, which are accounted only under replace-one. Leave --relation out, or sample by poisson.",
        )
        yield (
            self.sampling == SUBSETS and self.canaries is not None,
            f"--canaries is {self.canaries}, but each canary is there or not by chance, and --sampling "
            "without-replacement needs a public number of records. Sample by poisson.",
        )

    def _of_data(self) -> Iterator[tuple[bool, str]]:
        """Of data that are files or code of the user's own."""
        form = data_form(self.data)
        yield (
            form == "code" and self.population is None,
            "--population is missing. It sets the sampling rate and the divisor of the noised sums, so it "
            f"must be a public number that you state: counted from the records that {self.data!r} returns, "
            "it would change with one record more. Give the published size of the set, or a round figure "
            "near it.",
        )
        for names, forms, meant in (
            (("target", "schema"), ("table",), "tables"),
            (("test", "test_share"), ("table", "images"), "tables and folders of images"),
            (("image_size",), ("images",), "folders of images"),
        ):
            given = self._given(*names)
            yield (
                bool(given) and form not in forms,
                f"{' and '.join(given)} is for {meant}, but --data is {self.data!r}. Name a file that ends "
                "in .csv, .tsv or .parquet, or a folder; or leave it out.",
            )
        if form not in ("table", "images"):
            return
        yield (
            form == "images" and None in (self.population, self.image_size),
            f"--data {self.data!r} is a folder of images, which needs --population and --image-size, public "
            "numbers that you state, such as --population 5000 --image-size 32x32. Read from the private "
            "images they would reveal persons.",
        )
        apart = self._given("test", "test_share", "private_validation")
        yield not (apart or Path(self.data).exists()), f"--data {self.data!r} does not exist. Check the path."
        schema = Path(self.schema or schema_file(self.data))
        recipe = (
            f" The table has no schema yet. First: equipoise schema init {shlex.quote(self.data)} --target "
            f"COLUMN. Then fill in {schema}, and repeat the command with --test-share 0.2."
        )
        yield (
            not apart,
            "the rows to evaluate on are missing: give --test FILE or --test-share 0.2, of which what the "
            "evaluation says is published, and no epsilon covers it; or --private-validation 0.1, with noise."
            + (recipe if form == "table" and not schema.exists() else ""),
        )

    def _of_users(self) -> Iterator[tuple[bool, str]]:
        """Of the unit of privacy."""
        given = self._given("owner", "records_per_user", "user_rows")
        users = self.unit == "user"
        belong = "belongs" if len(given) == 1 else "belong"
        yield (
            bool(given) and not users,
            f"{' and '.join(given)} {belong} to --unit user, and without it single records are protected. "
            "Give --unit user, or leave what belongs to it out.",
        )
        if not users:
            return
        yield self.owner is None, "--unit user needs --owner: the column that names the user of each row."
        yield (
            self.records_per_user is None,
            "--unit user needs --records-per-user: the most records of a user that are used, a public number "
            "that you state.",
        )
        for name, taken in (("subset", "first"), ("public_records", "last")):
            yield (
                getattr(self, name) is not None,
                f"{flag(name)} is {getattr(self, name)}, which takes the {taken} rows, whosever they are, "
                f"and --unit is user: some users would be cut in two. Leave {flag(name)} out.",
            )
        yield (
            data_form(self.data) not in ("table", "code"),
            f"--unit user is for tables and for data of your own, but --data is {self.data!r}, whose records "
            "have no owners. Leave --unit, --owner and --records-per-user out.",
        )
        yield (
            self.canaries is not None,
            f"--canaries is {self.canaries}, but canaries are single records, and --unit is user. Audit the "
            "method itself: `equipoise audit method NAME --unit user --records-per-user G`.",
        )

    def neighbours(self) -> str:
        """The neighbouring relation: as given, or the one that the sampling is accounted under.

        >>> RunSettings().neighbours(), RunSettings(sampling="without-replacement").neighbours()
        ('add_or_remove_one', 'replace_one')
        """
        return self.relation or RELATIONS[self.sampling == SUBSETS]

    def publishable(self) -> dict[str, Any]:
        """The settings that tell nothing about the machine: without paths, and without what was left open.

        >>> [name for name in RunSettings(method="sgd", epsilon=3.0).publishable() if name == "epsilon"]
        []
        """
        paths = {name for name, field in facts(RunSettings).items() if "path" in shown_of(field)}
        left_out = paths | set(self._no_use())
        values = {**asdict(self), "data": self.data_name}
        return {k: v for k, v in values.items() if k not in left_out and v not in (None, {})}

    def _no_use(self) -> tuple[str, ...]:
        """Settings that method or data have no use for: a method without noise meets no budget."""
        of_method = tuple(registered().get(self.method, {}).get("no_use", ()))
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

    def command(self) -> str:
        """The command that repeats the run, with placeholders for paths."""
        words = ["equipoise", "train"]
        for name, field in facts(RunSettings).items():
            value, shown = getattr(self, name), shown_of(field)
            if value is None or value is False or name in ("run_dir", *self._no_use()):
                continue
            option = flag(shown.get("option", name))
            if isinstance(value, dict):
                words += [word for n, v in value.items() for word in (option, f"{n}={written(v)}")]
                continue
            value = self.data_name if name == "data" else shown.get("path", value)
            words.append(option)
            if value is not True:
                words.append(plain(value) if isinstance(value, float) else str(value))
        return shlex.join(words)


@settings
class FederationSettings:
    """What a simulated federation needs to know; None where a default decides.

    Attributes:
        base: data, model, budget, seed and what else a training needs; `method` is the federated one,
            `batch_size` what a client of average size expects to draw.
    """

    base: RunSettings = Field(default_factory=RunSettings)
    clients: Count = setting(10, "Number of data owners, P.", group="Federation")
    rounds: Count = setting(60, "Number of rounds, R.")
    clients_per_round: Count | None = setting(None, "Picked at random each round; all by default.")
    local_steps: Count = setting(5, "Steps of a client per round, K.")
    partition: Literal["iid", "dirichlet", "shards", "one-class"] = setting(
        "iid", "iid, dirichlet, shards (two of the records sorted by class) or one-class."
    )
    alpha: Positive = setting(0.5, "Concentration of dirichlet; small: few classes each.")
    site_column: str | None = setting(None, "Column of a table that names the owner of each row.")
    sites: Options = setting(
        dict,
        "Of an owner its epsilon, public population, first or last round: ulm.epsilon=3; repeatable. Owners "
        "are numbers, or the cells of --site-column, each with its population.",
        metavar="SITE.WHAT=VALUE",
        option="site",
    )
    driver: Literal["inline", "flower"] = setting(
        "inline", "inline, or flower: its simulation, with the extra 'federated'."
    )

    def __post_init__(self) -> None:
        if self.site_column is not None:
            object.__setattr__(self, "clients", len(self.site_names()) or 1)

    def site_names(self) -> list[str]:
        """The owners: those that are named for a column, else numbers."""
        if self.site_column is None:
            return list(map(str, range(self.clients)))
        return list(dict.fromkeys(key.rpartition(".")[0] for key in self.sites))

    def of_site(self, number: int, what: str, usual: Any) -> Any:
        """What `sites` says of an owner."""
        return self.sites.get(f"{self.site_names()[number]}.{what}", usual)

    def members(self, number: int) -> list[int]:
        """The owners that are there in round `number`."""
        there = range(self.clients)
        return [p for p in there if self.of_site(p, "first", 1) <= number <= self.of_site(p, "last", number)]

    def _check_sites(self) -> None:
        names = self.site_names()
        for key, value in self.sites.items():
            name, _, what = key.rpartition(".")
            of_number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
            whole = what == "epsilon" or isinstance(value, int)
            if what not in ("epsilon", "population", "first", "last") or not (of_number and whole):
                raise SettingsError(
                    f"--site {key}={value}: give SITE.epsilon, SITE.population, SITE.first or SITE.last, a "
                    "number above zero, such as ulm.epsilon=3."
                )
            if name not in names or (what == "population" and self.site_column is None):
                raise SettingsError(
                    f"--site {key}: without --site-column the owners are 0 to {self.clients - 1}, and their "
                    "populations follow from --partition."
                )
        if self.site_column is None:
            return
        if lacking := [name for name in names or ["SITE"] if f"{name}.population" not in self.sites]:
            raise SettingsError(
                f"--site {lacking[0]}.population is missing: the size of each owner of --site-column "
                f"{self.site_column} must be a public number that you state."
            )
        if data_form(self.base.data) != "table" or self.base.test is None or self.partition != "iid":
            raise SettingsError(
                "--site-column takes a table and --test, a file of rows to evaluate on, and no --partition."
            )

    def check(self) -> None:
        """Refuse values that cannot be used.

        Raises:
            SettingsError: naming the option.
        """
        self.base.check()
        self._check_sites()
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
            several = value.items() if isinstance(value, dict) else ()
            words += "".join(f" --site {shlex.quote(f'{n}={written(v)}')}" for n, v in several)
            words += "" if isinstance(value, dict) else f" {flag(name)} {value}"
        return words

    def own(self) -> dict[str, Any]:
        """Those of the federation itself that are of use."""
        left_out = {"base"} if self.partition == "dirichlet" else {"base", "alpha"}
        own = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in left_out}
        return {name: value for name, value in own.items() if value not in (None, {})}

    def to_json(self) -> str:
        """All settings, to continue a folder and for other processes."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> FederationSettings:
        """What `to_json` wrote; a table's schema may stand beside it.

        Raises:
            SettingsError: it did not write this.
        """
        values = json.loads(text)
        if not isinstance(values, dict) or not isinstance(values.get("base"), dict):
            raise SettingsError("the saved settings are not of a federation. Restore them from a copy.")
        values.pop("schema", None)
        return cls(**{**values, "base": RunSettings(**values["base"])})

    @classmethod
    def read(cls, path: Path) -> FederationSettings:
        """The settings in a file that `to_json` was written to.

        Raises:
            RunFolderError, SettingsError: it cannot be read, or holds something else.
        """
        return cls.from_json(json.dumps(read_json(path)))


@settings
class CalibrationSettings:
    """What `equipoise calibrate` is asked: one of `noise_multiplier` and `epsilon`, from the other."""

    population: Count = setting(..., "Public number of records.")
    batch_size: Positive = setting(..., "Expected number of records per step.")
    steps: Count | None = setting(None, "Number of steps.")
    epochs: Positive | None = setting(None, "Expected passes, instead of steps.")
    delta: Probability = setting(None, "Failure probability of the guarantee.", usual=USUAL_DELTA)
    noise_multiplier: Positive | None = setting(
        None, "Noise over clip norm; asks for epsilon.", remedy=NO_NOISE
    )
    epsilon: Positive | None = setting(None, "Target; asks for the noise multiplier.")
    sampling: SamplingWord = setting(
        "poisson",
        "poisson, truncated-poisson, balls-in-bins, without-replacement, full-batch, fixed-epochs.",
    )
    records_per_user: Count = setting(1, "Protect users of so many records at most, sampled independently.")
    relation: Relation = setting(
        "add_or_remove_one", "add-or-remove-one or replace-one.", usual="add-or-remove-one"
    )

    def __post_init__(self) -> None:
        if self.delta is None:
            object.__setattr__(self, "delta", default_delta(self.population))

    def check(self) -> None:
        """Refuse settings that do not fit together.

        Raises:
            SettingsError: naming the option and its value.
        """
        for one, other in (("steps", "epochs"), ("noise_multiplier", "epsilon")):
            if (getattr(self, one) is None) == (getattr(self, other) is None):
                raise SettingsError(f"give exactly one of {flag(one)} and {flag(other)}.")
        if self.batch_size > self.population:
            raise SettingsError(
                f"--batch-size is {self.batch_size:g}, but --population is {self.population}. Give at most "
                "that many."
            )
        _check_steps(self.steps or 0, f"--steps {self.steps}")
        steps_of(self.epochs or 0.0, self.population, self.batch_size)


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


def written(value: Any) -> str:
    """A value as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
