"""What `equipoise compare` compares: methods with their settings, from the command line's words.

Nothing here needs torch, so that a slip is answered before it is loaded.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from equipoise._validate import suggestion
from equipoise.app.option_checks import SettingsError, flag
from equipoise.app.settings import OF_OWN_DATA, RunSettings, parse_option
from equipoise.methods.registry import registered

__all__ = ["SHORTHANDS", "Comparison", "read_entries"]

SHORTHANDS: dict[str, dict[str, Any]] = {
    "auto-s": {"method": "dp-sgd", "clip_rule": "auto_s"},
    "psac": {"method": "dp-sgd", "clip_rule": "psac"},
    "quantile-clipping": {"method": "dp-sgd", "clip_norm": "quantile"},
}
"""Names for settings of DP-SGD that are usually compared as methods of their own."""

_COMMON = {
    "data", "data_dir", "subset", "public_records", "epsilon", "delta", "seed", "device", "reproducible",
    "ledger", "run_dir", "noise_multiplier", "method", "options", "model", "unit", "owner",
    "records_per_user", "user_rows", *OF_OWN_DATA,
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


@dataclass(frozen=True)
class Comparison:
    """What is compared.

    Attributes:
        methods, options: as for `read_entries`.
        base: the settings that they share.
        seeds: results per method.
        trials: learning rates tried per method; with one trial nothing is tuned.
        learning_rates: the grid of all methods instead of one around each method's own rate.
        entries: the settings of each method, by its label.
    """

    methods: str
    base: RunSettings
    options: Sequence[str] = ()
    seeds: int = 3
    trials: int = 3
    learning_rates: Sequence[float] | None = None
    entries: dict[str, RunSettings] = field(init=False)

    def __post_init__(self) -> None:
        for name in ("seeds", "trials"):
            if getattr(self, name) < 1:
                raise SettingsError(f"--{name} is {getattr(self, name)}, but at least one is needed.")
        if self.base.noise_multiplier is not None:
            raise SettingsError("methods are compared at one budget: give --epsilon, no noise multiplier.")
        object.__setattr__(self, "entries", read_entries(self.methods, self.options, self.base))
        for entry in self.entries.values():
            entry.check()
        for rate in self.learning_rates or ():
            replace(self.base, learning_rate=rate)

    def command(self) -> str:
        """The command that repeats the comparison, with placeholders for paths."""
        base = replace(self.base, method="dp-sgd", seed=0, run_dir=None)
        shared = base.command().removeprefix("equipoise train ").replace("--method dp-sgd ", "")
        words = [
            "equipoise compare --methods",
            self.methods.replace(" ", ""),
            shared.replace(" --seed 0", ""),
        ]
        words.append(f"--seeds {self.seeds} --trials {self.trials}")
        if self.learning_rates:
            words.append("--learning-rates " + ",".join(f"{rate:g}" for rate in self.learning_rates))
        return " ".join([*words, *(f"--option {shlex.quote(text)}" for text in self.options)])
