"""What `equipoise compare` compares: methods with their settings, from the command line's words and back.

Nothing here needs torch, so that a slip is answered before it is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from equipoise._validate import suggestion
from equipoise.app.option_checks import SettingsError, flag
from equipoise.app.settings import RunSettings, parse_option
from equipoise.methods.registry import registered

__all__ = ["SHORTHANDS", "Comparison", "Contender", "parse_method_option", "read_entries"]


SHORTHANDS: dict[str, dict[str, Any]] = {
    "auto-s": {"method": "dp-sgd", "clip_rule": "auto_s"},
    "psac": {"method": "dp-sgd", "clip_rule": "psac"},
    "quantile-clipping": {"method": "dp-sgd", "clip_norm": "quantile"},
}
"""Names for settings of DP-SGD that are usually compared as methods of their own."""


_COMMON = {
    "data", "data_dir", "population", "subset", "public_records", "epsilon", "delta", "seed", "device",
    "reproducible", "ledger", "run_dir", "noise_multiplier", "method", "options", "model", "target", "schema",
    "test", "test_share", "image_size", "task", "class_weights", "unit", "owner", "records_per_user",
    "user_rows",
}  # fmt: skip
"""Settings that all methods of a comparison share."""


@dataclass(frozen=True)
class Contender:
    """A method with its settings, under the name that the table shows.

    Attributes:
        label: the name.
        changes: fields of `RunSettings` that differ from the comparison's.
    """

    label: str
    changes: Mapping[str, Any]

    def settings(self, base: RunSettings) -> RunSettings:
        """The comparison's settings with this entry's changes."""
        return replace(base, **self.changes)

    @property
    def word(self) -> str:
        """The word for its method: a shorthand where the label is one."""
        return self.label if self.label in SHORTHANDS else str(self.changes["method"])


@dataclass(frozen=True)
class Comparison:
    """What is compared.

    Attributes:
        entries: the methods.
        base: the settings that they share.
        seeds: results per method.
        trials: learning rates tried per method; with one trial nothing is tuned.
        learning_rates: the grid of all methods instead of one around each method's own rate.
    """

    entries: Sequence[Contender]
    base: RunSettings
    seeds: int = 3
    trials: int = 3
    learning_rates: Sequence[float] | None = None

    def __post_init__(self) -> None:
        for name in ("seeds", "trials"):
            if getattr(self, name) < 1:
                raise SettingsError(f"--{name} is {getattr(self, name)}, but at least one is needed.")
        labels = [entry.label for entry in self.entries]
        if not labels or len(set(labels)) != len(labels):
            raise SettingsError(
                f"--methods is {','.join(labels)!r}, but it must name at least one method, and none twice. "
                "LABEL=METHOD gives a second form of a method a name of its own."
            )
        if self.base.noise_multiplier is not None:
            raise SettingsError("methods are compared at one budget: give --epsilon, no noise multiplier.")
        for entry in self.entries:
            entry.settings(self.base).check()
        for rate in self.learning_rates or ():
            replace(self.base, learning_rate=rate).check()

    def command(self) -> str:
        """The command that repeats the comparison, with placeholders for paths."""
        words = ["equipoise compare --methods", ",".join(map(_entry_word, self.entries))]
        base = replace(self.base, method="dp-sgd", seed=0, run_dir=None)
        shared = base.command().removeprefix("equipoise train ").replace("--method dp-sgd ", "")
        words += [shared.replace(" --seed 0", ""), f"--seeds {self.seeds} --trials {self.trials}"]
        if self.learning_rates:
            words.append("--learning-rates " + ",".join(f"{rate:g}" for rate in self.learning_rates))
        for entry in self.entries:
            own = SHORTHANDS.get(entry.word, {})
            for name, value in {**entry.changes, **entry.changes["options"]}.items():
                if name in ("method", "options") or own.get(name) == value:
                    continue
                text = value if isinstance(value, str) else json.dumps(value)
                words.append(f"--option {entry.label}.{name}={text}")
        return " ".join(words)


def read_entries(methods: str, options: Sequence[tuple[str, Any]] = ()) -> list[Contender]:
    """Entries from the words of the command line.

    Args:
        methods: names of methods or `SHORTHANDS`, or LABEL=METHOD, separated by commas.
        options: ("METHOD.NAME", value) with METHOD a label; NAME is a setting of the training
            (learning_rate, clip_norm, epochs, ...) or an argument of the method.

    Raises:
        SettingsError: an unknown method or label, or a setting that all methods must share.

    Example:
        >>> plain, wide = read_entries("dp-sgd,wide=auto-s", [("wide.clip_norm", 4)])
        >>> wide.label, wide.changes["clip_rule"], wide.changes["clip_norm"]
        ('wide', 'auto_s', '4')
    """
    found: dict[str, dict[str, Any]] = {}
    order: list[str] = []
    for word in filter(None, (part.strip() for part in methods.split(","))):
        label, equals, name = word.partition("=")
        name = name if equals else label
        if name not in registered() and name not in SHORTHANDS and ":" not in name:
            known = [*registered(), *SHORTHANDS]
            raise SettingsError(
                f"--methods names {name!r}.{suggestion(name, known)} The methods are {', '.join(known)}."
            )
        order.append(label)
        found[label] = {"options": {}, **SHORTHANDS.get(name, {"method": name})}
    texts = {field.name for field in fields(RunSettings) if str(field.type).startswith("str")}
    own = {field.name for field in fields(RunSettings)} - _COMMON
    for where, value in options:
        label, _, name = where.partition(".")
        if label not in found or not name:
            raise SettingsError(
                f"--option names {where!r}, but it must be METHOD.NAME=VALUE with METHOD one of "
                f"{', '.join(found)}."
            )
        if name in _COMMON:
            raise SettingsError(
                f"--option {where} would set {name} for one method alone, but all methods share it: give "
                f"{flag(name)} to the comparison."
            )
        if name in own:
            found[label][name] = str(value) if name in texts else value
        else:
            found[label]["options"] = {**found[label]["options"], name: value}
    return [Contender(label, found[label]) for label in order]


def parse_method_option(text: str) -> tuple[str, Any]:
    """METHOD.NAME=VALUE of the command line; see `equipoise.app.settings.parse_option`.

    >>> parse_method_option("dp-sgd.clip-norm=0.5")
    ('dp-sgd.clip_norm', 0.5)
    """
    label, dot, rest = text.partition(".")
    if not dot or "=" in label:
        raise SettingsError(
            f"--option is {text!r}, but it must be METHOD.NAME=VALUE, such as dp-sgd.clip_norm=0.1."
        )
    name, value = parse_option(rest)
    return f"{label}.{name}", value


def _entry_word(entry: Contender) -> str:
    """The entry as `read_entries` reads it."""
    return entry.word if entry.label == entry.word else f"{entry.label}={entry.word}"
