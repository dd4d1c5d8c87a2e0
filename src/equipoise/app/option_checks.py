"""Checks of options that need no torch, so that a slip is answered before it is loaded.

The library checks the same things again for those who call it from Python; its messages name arguments of
functions, and `in_option_words` turns these into options. A test holds the names of data sets to the
library's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path

from equipoise._validate import NO_NOISE, suggestion
from equipoise.app.model_table import IN_BENCHMARKS, MODELS
from equipoise.federated.registry import FEDERATED, MOVED, PLAIN_AVERAGING
from equipoise.methods.registry import registered

__all__ = [
    "DATA_NAMES",
    "FILES",
    "INSTEAD",
    "LARGEST",
    "USUAL_NAMES",
    "SettingsError",
    "check_data_and_model",
    "check_federated",
    "check_name",
    "data_form",
    "flag",
    "in_option_words",
    "noise_warning",
    "parse_clip_norm",
    "rate_warning",
    "refuse_moved",
]


DATA_NAMES = ("digits", "mnist", "fashion-mnist", "cifar10", "adult")


_OTHER_NAMES = {"expected_batch_size": "batch_size", "ledger_file": "ledger", "ema_decay": "ema"}


FILES = "a table such as people.csv, a folder with a subfolder of images for each class"
_TABLES = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".parquet")


LARGEST = 3.4e38
"""Numbers beyond it are infinite in 32 bits, and so torch refuses them, or the model is no longer finite."""


USUAL_NAMES = {
    "--lr": "--learning-rate",
    "--bs": "--batch-size",
    "--wd": "--weight-decay",
    "--noise": "--noise-multiplier",
    "--sigma": "--noise-multiplier",
    "--max-grad-norm": "--clip-norm",
    "--eps": "--epsilon",
    "--steps": "--epochs",
}
"""What other programs call our options: too unlike for the parser to guess."""


_NO_UNIT = (
    "equipoise federate protects a record at one owner, and its owners are made up. Users whose records one "
    "holder has: equipoise train --unit user. Users' updates: docs/how-to/user-level-federated.md. Owners "
    "with a ledger each: docs/how-to/several-owners.md."
)


INSTEAD = {
    "federate": dict.fromkeys(("--unit", "--owner", "--records-per-user", "--user-rows"), _NO_UNIT),
    "audit": {
        "--method": "A method is audited by: equipoise audit method NAME.",
        "--one-step": "Steps on all records: equipoise audit method NAME --one-step.",
        "--neighbours": "Neighbours are tried by: equipoise audit neighbours.",
        "--run-dir": "A run is audited by: equipoise audit run RUN.",
        "--shadow": "Shadow models are an example: python examples/shadow_models.py, in a checkout.",
    },
    "compare": {"--noise-multiplier": "Methods are compared at one budget: give --epsilon."},
}
"""What a command answers to options that other commands have."""


class SettingsError(ValueError):
    """A setting that cannot be used; the message names it, its value, the reason and the remedy."""


def flag(name: str) -> str:
    """The option of a setting.

    >>> flag("clip_norm")
    '--clip-norm'
    """
    return "--" + name.replace("_", "-")


def data_form(data: str) -> str:
    """What the word of ``--data`` names: ``named``, ``code``, ``table``, or a folder of ``images``.

    >>> data_form("digits"), data_form("my_project:records"), data_form("people.csv"), data_form("photos/")
    ('named', 'code', 'table', 'images')
    """
    if ":" in data:
        return "code"
    if data.lower().endswith(_TABLES):
        return "table"
    if Path(data).is_dir():
        return "named" if data in DATA_NAMES else "images"
    return "images" if "/" in data and not Path(data).suffix else "named"


LITTLE_LEARNED = 0.5
"""Where noise moves a model this many times as far as its gradients can, it learned little in all trials."""


def noise_warning(noise_multiplier: float, parameters: int, batch_size: float, steps: int) -> str | None:
    """A sentence where the noise of a whole run drowns its gradients, None elsewhere; from public numbers.

    In units of clip norm and learning rate, T steps of batches of B records lead at most T away, if all
    clipped gradients point the same way. Their noise, of multiplier z in d parameters, is a random walk of
    length z (d T)^1/2 / B.

    >>> noise_warning(6.3, 4810, 718.5, 80)
    >>> noise_warning(410, 4810, 718.5, 80)[:64]
    'The noise moves the model 4.4 times as far as all gradients can,'
    """
    ratio = noise_multiplier * math.sqrt(parameters / steps) / batch_size
    if ratio <= LITTLE_LEARNED:
        return None
    return (
        f"The noise moves the model {ratio:.1f} times as far as all gradients can, so it learns little "
        f"(noise multiplier {noise_multiplier:.3g}, {parameters:,} parameters, {batch_size:,g} records per "
        f"step, {steps:,} steps). Raise --epsilon, take a smaller model, or train on more records."
    )


ADAM_RATE = 0.25
"""Adam moves every parameter by about the learning rate per step. No set measured as a whole took more."""


def rate_warning(optimizer: str, learning_rate: float) -> str | None:
    """A sentence where the learning rate suits another optimiser than the one that was chosen.

    >>> rate_warning("sgd", 3.0), rate_warning("adam", 1e-3)
    (None, None)
    >>> rate_warning("adam", 0.5)[:60]
    '--learning-rate is 0.5, which moves every parameter by about'
    """
    if optimizer == "sgd" or learning_rate <= ADAM_RATE:
        return None
    return (
        f"--learning-rate is {learning_rate:g}, which moves every parameter by about that much per step of "
        f"{optimizer}. Give a smaller one, such as --learning-rate 0.001."
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
    if word == "decay" and len(numbers) == 2 and 0 < numbers[0] <= LARGEST and 0 < numbers[1] <= 1:
        return "decay", numbers[0], numbers[1]
    if word not in ("quantile", "decay") and len(numbers) == 1 and 0 < numbers[0] <= LARGEST:
        return numbers[0]
    raise SettingsError(
        f"--clip-norm is {text!r}, but it must be a number above 0, decay:START:RATE (a start above 0 and a "
        "rate in (0, 1], for START * RATE^step), quantile, or quantile:SHARE with a share between 0 and 1."
    )


def check_name(option: str, value: str | None, names: Iterable[str], own: str = "", files: str = "") -> None:
    """Refuse a word that is on no list; ``package.module:function`` passes where own ones are taken.

    Args:
        option: the setting, such as "data".
        value: the word; None passes.
        names: the list.
        own: what a function or class of the user's own is, where one may be given.
        files: what files of the user's own are, where they may be given.

    Raises:
        SettingsError: with the name that was probably meant.

    >>> check_name("data", "minst", DATA_NAMES)
    Traceback (most recent call last):
        ...
    equipoise.app.option_checks.SettingsError: --data is 'minst'. Did you mean mnist? It must be one of ...
    """
    known = tuple(names)
    if value is None or value in known or (own and ":" in value):
        return
    refuse_moved(option, value)
    if files and data_form(value) in ("table", "images"):
        return
    if files and Path(value).suffix:
        raise SettingsError(
            f"{flag(option)} is {value!r}, which is neither a folder nor a table that can be read: their "
            "names end in .csv or .tsv (plain or .gz), or in .parquet. Save the table in one of these forms."
        )
    kind = "Class" if option == "method" else "function"
    end = f", {files}" if files else ""
    end += f", or package.module:{kind}, {own}" if own else ""
    raise SettingsError(
        f"{flag(option)} is {value!r}.{suggestion(value, known)} It must be one of {', '.join(known)}{end}."
    )


def refuse_moved(option: str, value: str) -> None:
    """Say where a data set or a model is that stood in the package once.

    Raises:
        SettingsError: it did.
    """
    if value in IN_BENCHMARKS and option in ("data", "model"):
        raise SettingsError(
            f"{flag(option)} is {value!r}, which is in benchmarks/ of the sources and no longer in the "
            f"package. In a checkout give {IN_BENCHMARKS[value]}. A run that was begun with the old name "
            "needs the version of equipoise that began it."
        )


def check_data_and_model(data: str | None, model: str | None) -> None:
    """Refuse names of data sets and models that there are not; those of the user's own pass.

    Raises:
        SettingsError: with the name that was probably meant.
    """
    check_name("data", data, DATA_NAMES, "a function that returns a DataSet", FILES)
    check_name("model", model, MODELS, "a function from the data set to a module")


def check_federated(method: str) -> None:
    """Refuse a federated method that there is not; ``fedavg:NAME`` takes any method's name, and
    ``package.module:NAME`` passes.

    Raises:
        SettingsError: with the name that was probably meant.

    >>> check_federated("fedavg:dp-c4")
    >>> check_federated("fedpcpd")
    Traceback (most recent call last):
        ...
    equipoise.app.option_checks.SettingsError: --method is 'fedpcpd'. Did you mean fedpcdp? It must be ...
    """
    names = (*FEDERATED, *(f"{PLAIN_AVERAGING}{name}" for name in registered()))
    if method in MOVED:
        raise SettingsError(
            f"--method is {method!r}, which is now in baselines/ of the repository: from a checkout, give "
            f"--method {MOVED[method]}. A federation that was begun under the old name goes on with the "
            "version that began it."
        )
    own = ":" in method and not method.startswith(PLAIN_AVERAGING)
    if method not in names and not own:
        raise SettingsError(
            f"--method is {method!r}.{suggestion(method, names)} It must be one of "
            f"{', '.join(FEDERATED)}, fedavg:NAME with any name that `equipoise methods` lists, or "
            "package.module:NAME of a FederatedMethod."
        )


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
    message = message.replace(NO_NOISE, "or train without noise by --method sgd or clip-sgd")
    known = {name: name for name in names}
    known |= {other: name for other, name in _OTHER_NAMES.items() if name in known}
    for word, name in known.items():
        message = re.sub(rf"(?<![\w.-]){word}=(?=\S)", f"{flag(name)} ", message)
        # a name with an underscore is a name of Python's wherever it stands; others may be plain words
        place = rf"(?<![\w.-]){word}\b" if "_" in word else rf"^{word}\b(?= must)"
        message = re.sub(place + r"(?![\w(])", flag(name), message)
    return message
