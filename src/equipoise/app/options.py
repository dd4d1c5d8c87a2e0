"""What the words of the command line may be, known before torch is loaded: a slip is answered at once.

The library checks the same things again for those who call it from Python; its messages name arguments of
functions, and `in_option_words` turns these into options.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

__all__ = [
    "SettingsError",
    "check_calibration",
    "check_choice",
    "delta_warning",
    "flag",
    "in_option_words",
    "parse_clip_norm",
]


RELATIONS = ("add-or-remove-one", "replace-one")


_OTHER_NAMES = {"expected_batch_size": "batch_size", "ledger_file": "ledger", "ema_decay": "ema"}


class SettingsError(ValueError):
    """A setting that cannot be used; the message names it, its value, the reason and the remedy."""


def flag(name: str) -> str:
    """The option of a setting.

    >>> flag("clip_norm")
    '--clip-norm'
    """
    return "--" + name.replace("_", "-")


def delta_warning(delta: float, population: int) -> str | None:
    """A sentence where delta would let a whole record leak, None where it is small enough.

    >>> delta_warning(0.1, 1437)
    '--delta is 0.1, which is not below 1/population = 0.000696: a mechanism that publishes one record in \
full can meet it. Give a delta far below that.'
    >>> delta_warning(1e-5, 1437)
    """
    if delta < 1 / population:
        return None
    return (
        f"--delta is {delta:g}, which is not below 1/population = {1 / population:.3g}: a mechanism that "
        "publishes one record in full can meet it. Give a delta far below that."
    )


def parse_clip_norm(text: str) -> float | tuple[str, float] | tuple[str, float, float]:
    """A fixed bound, ("quantile", share) for a learned one, or ("decay", start, rate) for start * rate^step.

    Raises:
        SettingsError: none of them.

    >>> parse_clip_norm("0.5"), parse_clip_norm("quantile"), parse_clip_norm("quantile:0.9")
    (0.5, ('quantile', 0.5), ('quantile', 0.9))
    >>> parse_clip_norm("decay:1:0.998")
    ('decay', 1.0, 0.998)
    """
    word, *rest = text.split(":")
    try:
        numbers = [float(part) for part in (rest if word in ("quantile", "decay") else [word, *rest])]
    except ValueError:
        numbers = [math.nan]
    if word == "quantile" and len(numbers) <= 1 and all(0 < share < 1 for share in numbers):
        return "quantile", numbers[0] if numbers else 0.5
    if word == "decay" and len(numbers) == 2 and 0 < numbers[0] < math.inf and 0 < numbers[1] <= 1:
        return "decay", numbers[0], numbers[1]
    if word not in ("quantile", "decay") and len(numbers) == 1 and 0 < numbers[0] < math.inf:
        return numbers[0]
    raise SettingsError(
        f"--clip-norm is {text!r}, but it must be a number above 0, decay:START:RATE (a start above 0 and a "
        "rate in (0, 1], for START * RATE^step), quantile, or quantile:SHARE with a share between 0 and 1."
    )


def check_choice(name: str, value: str | None, choices: tuple[str, ...]) -> None:
    """Refuse a word that is not on the list.

    Raises:
        SettingsError: naming the list.
    """
    if value is not None and value not in choices:
        raise SettingsError(f"{flag(name)} is {value!r}, but it must be one of {', '.join(choices)}.")


def check_calibration(
    *,
    population: int,
    batch_size: float,
    steps: int | None,
    epochs: float | None,
    delta: float,
    noise_multiplier: float | None,
    epsilon: float | None,
    relation: str,
) -> None:
    """Refuse the options of `equipoise calibrate` that cannot be used.

    Raises:
        SettingsError: naming the option and its value.
    """
    if (steps is None) == (epochs is None):
        raise SettingsError("give exactly one of --steps and --epochs.")
    if (noise_multiplier is None) == (epsilon is None):
        raise SettingsError(
            "give exactly one of --noise-multiplier (to learn epsilon) and --epsilon (to learn the noise "
            "multiplier)."
        )
    numbers = {
        "population": population,
        "batch_size": batch_size,
        "steps": steps,
        "epochs": epochs,
        "noise_multiplier": noise_multiplier,
        "epsilon": epsilon,
    }
    for name, value in numbers.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise SettingsError(f"{flag(name)} is {value:g}, but it must be a number above 0.")
    if not 0 < delta < 1:
        raise SettingsError(f"--delta is {delta:g}, but it is a probability strictly between 0 and 1.")
    if batch_size > population:
        raise SettingsError(
            f"--batch-size is {batch_size:g}, but --population is {population}. Give at most that many."
        )
    check_choice("relation", relation.replace("_", "-"), RELATIONS)


def in_option_words(message: str, names: Iterable[str]) -> str:
    """The message with the command line's options where it names arguments of functions.

    Args:
        message: of an error of the library.
        names: settings that have an option.

    >>> in_option_words("device='cuda': this machine has no CUDA device; give device='cpu'", ["device"])
    "--device 'cuda': this machine has no CUDA device; give --device 'cpu'"
    >>> in_option_words("noise_multiplier must be positive and finite, got -1", ["noise_multiplier"])
    '--noise-multiplier must be positive and finite, got -1'
    """
    known = {name: name for name in names}
    known |= {other: name for other, name in _OTHER_NAMES.items() if name in known}
    for word, name in known.items():
        message = re.sub(rf"(?<![\w.-]){word}=(?=\S)", f"{flag(name)} ", message)
        # a name with an underscore is a name of Python's wherever it stands; others may be plain words
        place = rf"(?<![\w.-]){word}\b" if "_" in word else rf"^{word}\b(?= must)"
        message = re.sub(place + r"(?![\w(])", flag(name), message)
    return message
