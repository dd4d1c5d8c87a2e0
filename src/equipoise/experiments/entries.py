"""The methods of a comparison, each with its own settings, from the words of the command line and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from equipoise.experiments.settings import Settings, SettingsError, parse_option
from equipoise.methods import METHODS

__all__ = ["SHORTHANDS", "Entry", "entry_word", "method_word", "parse_method_option", "read_entries"]

SHORTHANDS: dict[str, dict[str, Any]] = {
    "auto-s": {"method": "dp-sgd", "clip_rule": "auto_s"},
    "psac": {"method": "dp-sgd", "clip_rule": "psac"},
    "quantile-clipping": {"method": "dp-sgd", "clip_norm": "quantile"},
}
"""Names for settings of DP-SGD that are usually compared as methods of their own."""

_COMMON = {"data", "data_dir", "population", "subset", "public_records", "epsilon", "delta", "seed", "device"}
_COMMON |= {"reproducible", "ledger", "run_dir", "noise_multiplier", "method", "options", "model"}


@dataclass(frozen=True)
class Entry:
    """A method with its settings, under the name that the table shows.

    Attributes:
        label: the name.
        changes: fields of `Settings` that differ from the comparison's.
    """

    label: str
    changes: Mapping[str, Any]

    def settings(self, base: Settings) -> Settings:
        """The comparison's settings with this entry's changes."""
        changes = dict(self.changes)
        return replace(base, **changes)


def read_entries(methods: str, options: Sequence[tuple[str, Any]] = ()) -> list[Entry]:
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
        if name not in METHODS and name not in SHORTHANDS:
            known = ", ".join([*METHODS, *SHORTHANDS])
            raise SettingsError(f"--methods names {name!r}, but the methods are {known}.")
        order.append(label)
        found[label] = {"options": {}, **SHORTHANDS.get(name, {"method": name})}
    texts = {field.name for field in fields(Settings) if str(field.type).startswith("str")}
    own = {field.name for field in fields(Settings)} - _COMMON
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
                f"--{name.replace('_', '-')} to the comparison."
            )
        if name in own:
            found[label][name] = str(value) if name in texts else value
        else:
            found[label]["options"] = {**found[label]["options"], name: value}
    return [Entry(label, found[label]) for label in order]


def parse_method_option(text: str) -> tuple[str, Any]:
    """METHOD.NAME=VALUE of the command line; see `equipoise.experiments.settings.parse_option`.

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


def method_word(entry: Entry) -> str:
    """The word for the entry's method: a shorthand where the label is one."""
    return entry.label if entry.label in SHORTHANDS else str(entry.changes["method"])


def entry_word(entry: Entry) -> str:
    """The entry as `read_entries` reads it."""
    name = method_word(entry)
    return name if entry.label == name else f"{entry.label}={name}"
