"""What `equipoise compare` compares: methods with their settings, from the command line's words.

Nothing here needs torch, so that a slip is answered before it is loaded.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from equipoise._validate import suggestion
from equipoise.app.option_checks import SettingsError, flag
from equipoise.app.settings import (
    OF_OWN_DATA,
    Columns,
    Count,
    Positive,
    RunSettings,
    flat,
    parse_option,
    setting,
    settings,
    written,
)
from equipoise.methods.registry import registered

SHORTHANDS: dict[str, dict[str, Any]] = {
    "auto-s": {"method": "dp-sgd", "clip_rule": "auto_s"},
    "psac": {"method": "dp-sgd", "clip_rule": "psac"},
    "quantile-clipping": {"method": "dp-sgd", "clip_norm": "quantile"},
}
"""Names for settings of DP-SGD that are usually compared as methods of their own."""

_COMMON = {
    "data", "data_dir", "subset", "public_records", "epsilon", "delta", "seed", "device", "reproducible",
    "ledger", "run_dir", "noise_multiplier", "method", "options", "model", "unit", "owner",
    "records_per_user", "user_rows", "private_validation", "score", "secret_seed", "runs", *OF_OWN_DATA,
}  # fmt: skip
"""Settings that all methods of a comparison share."""


def read_entries(methods: str, options: Sequence[str], base: RunSettings) -> dict[str, RunSettings]:
    """The settings of each method, by the name that the table shows.

    Args:
        methods: names of methods or `SHORTHANDS`, or LABEL=METHOD, separated by commas.
        options: METHOD.NAME=VALUE with METHOD a label; NAME is a setting of the training (learning_rate,
            clip_norm, epochs, ...) or an argument of the method.
        base: what they share.

    Raises:
        SettingsError: an unknown method or label, or a setting that all methods must share.

    >>> found = read_entries("dp-sgd,wide=auto-s", ["wide.clip-norm=4"], RunSettings())
    >>> found["wide"].clip_rule, found["wide"].clip_norm
    ('auto_s', '4')
    """
    found: dict[str, dict[str, Any]] = {}
    words = [word.strip() for word in methods.split(",") if word.strip()]
    for word in words:
        label, equals, name = word.partition("=")
        name = name if equals else label
        known = [*registered(), *SHORTHANDS]
        if name not in known and ":" not in name:
            raise SettingsError(
                f"--methods names {name!r}.{suggestion(name, known)} The methods are {', '.join(known)}."
            )
        found[label] = {"options": {}, **SHORTHANDS.get(name, {"method": name})}
    if not words or len(found) < len(words):
        raise SettingsError(
            f"--methods is {methods!r}, but it must name at least one method, and none twice. "
            "LABEL=METHOD gives a second form of a method a name of its own."
        )
    own = {item.name for item in fields(RunSettings)} - _COMMON
    for text in options:
        label, _, rest = text.partition(".")
        if label not in found or not rest:
            raise SettingsError(
                f"--option is {text!r}, but it must be METHOD.NAME=VALUE, such as dp-sgd.clip_norm=0.1, with "
                f"METHOD one of {', '.join(found)}."
            )
        name, value = parse_option(rest)
        if name in _COMMON:
            raise SettingsError(
                f"--option {text} would set {name} for one method alone, but all methods share it: give "
                f"{flag(name)} to the comparison."
            )
        (found[label] if name in own else found[label]["options"])[name] = value
    return {label: replace(base, **changes) for label, changes in found.items()}


def _numbers(value: Any) -> Any:
    try:
        return [float(word) for word in value.split(",")] if isinstance(value, str) else value
    except ValueError:
        raise SettingsError(
            f"--learning-rates is {value!r:.80}, but it must be numbers such as 0.5,1,2."
        ) from None


def texts(value: Any) -> Any:
    """NAME=VALUE words of the command line, or a table of a file as such words."""
    if isinstance(value, Mapping):
        return [f"{name}={written(inner)}" for name, inner in flat(value).items()]
    return value


@settings
class Comparison:
    """What is compared.

    Attributes:
        base: the settings that all methods share.
    """

    base: RunSettings = Field(default_factory=RunSettings)
    methods: Columns = setting(
        "dp-sgd,auto-s,quantile-clipping",
        "Methods, separated by commas; LABEL=METHOD for a second form of one.",
    )
    seeds: Count = setting(3, "Runs that are reported, per method.")
    trials: Count = setting(3, "Learning rates tried, per method; 1 tunes nothing.")
    learning_rates: Annotated[list[Positive], BeforeValidator(_numbers)] | None = setting(
        None, "The rates to try with every method, such as 0.5,1,2."
    )
    option: Annotated[list[str], BeforeValidator(texts)] = setting(
        list,
        "Setting of one method, such as dp-sgd.clip_norm=0.1; repeatable.",
        metavar="METHOD.NAME=VALUE",
    )

    def check(self) -> dict[str, RunSettings]:
        """The settings of each method, by its label, if they fit together.

        Raises:
            SettingsError: they do not.
        """
        if self.learning_rates is not None and len(self.learning_rates) != self.trials:
            raise SettingsError(
                f"--learning-rates has {len(self.learning_rates)} numbers, but --trials is {self.trials}: "
                "give as many."
            )
        entries = read_entries(self.methods, self.option, self.base)
        for entry in entries.values():
            entry.check()
        return entries

    def command(self) -> str:
        """The command that repeats the comparison, with placeholders for paths."""
        base = replace(self.base, method="dp-sgd", seed=0, run_dir=None).command()
        for shared in ("equipoise train ", "--method dp-sgd ", " --seed 0"):
            base = base.replace(shared, "")
        words = [f"equipoise compare --methods {self.methods.replace(' ', '')} {base}"]
        words.append(f"--seeds {self.seeds} --trials {self.trials}")
        if self.learning_rates:
            words.append("--learning-rates " + ",".join(f"{rate:g}" for rate in self.learning_rates))
        return " ".join([*words, *(f"--option {shlex.quote(text)}" for text in self.option)])
