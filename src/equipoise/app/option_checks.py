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

from equipoise._validate import suggestion
from equipoise.app.model_table import MODELS
from equipoise.federated.registry import FEDERATED, PLAIN_AVERAGING
from equipoise.methods.registry import registered

DATA_NAMES = ("digits", "mnist", "fashion-mnist", "cifar10", "adult")

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


ELSEWHERE = {
    ("audit", "--method"): "A method is audited by: equipoise audit method NAME.",
    ("audit", "--one-step"): "A method is audited by: equipoise audit method NAME --one-step.",
    ("audit", "--neighbours"): "Neighbours are tried by: equipoise audit neighbours.",
    ("audit", "--run-dir"): "A run is audited by: equipoise audit run RUN.",
    ("audit", "--shadow"): "Shadow models are an example: python examples/shadow_models.py, in a checkout.",
    ("compare", "--noise-multiplier"): "Methods are compared at one budget: give --epsilon.",
    ("federate", "--unit"): "A record at one owner is protected. Users of one holder: equipoise train --unit "
    "user; users' updates: docs/how-to/user-level-federated.md.",
}
"""What a command says of options that it once had, or that others have."""


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


LOSSES = ("squared", "huber", "quantile", "poisson", "logistic")
"""The losses that a command names; a number follows some, after a colon."""
LOSS = (
    r"squared|poisson|logistic|huber:(?=[0.]*[1-9])\d*\.?\d+([eE][-+]?\d+)?|quantile:0?\.0*[1-9]\d*"
    rf"|(?!({'|'.join(LOSSES)}):)[\w.]+:[\w.]+"
)
"""The words of ``--loss``."""


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


CLIP_WORDS = ("quantile", "decay", "line")


def parse_clip_norm(text: str) -> float | tuple[str, float] | str:
    """A fixed bound, ("quantile", share) for a learned one, or the words of a schedule as they are.

    Raises:
        SettingsError: none of them.

    >>> parse_clip_norm("0.5"), parse_clip_norm("quantile"), parse_clip_norm("quantile:0.9")
    (0.5, ('quantile', 0.5), ('quantile', 0.9))
    >>> parse_clip_norm("decay:1:0.998"), parse_clip_norm("line:1:61:3000")
    ('decay:1:0.998', 'line:1:61:3000')
    """
    word, *rest = text.split(":")
    try:
        numbers = [float(part) for part in (rest if word in CLIP_WORDS else [word, *rest])]
    except ValueError:
        numbers = [math.nan]
    if word == "quantile" and len(numbers) <= 1 and all(0 < share < 1 for share in numbers):
        return "quantile", numbers[0] if numbers else 0.5
    if word == "decay" and len(numbers) == 2 and 0 < numbers[0] <= LARGEST and 0 < numbers[1] <= 1:
        return text
    if word == "line" and len(numbers) == 3 and all(0 < n <= LARGEST for n in numbers) and rest[2].isdigit():
        return text
    if word not in CLIP_WORDS and len(numbers) == 1 and 0 < numbers[0] <= LARGEST:
        return numbers[0]
    raise SettingsError(
        f"--clip-norm is {text!r}, but it must be a number above 0, decay:START:RATE (a start above 0 and a "
        "rate in (0, 1], for START * RATE^step), line:START:END:STEPS (straight from one to the other), "
        "quantile, or quantile:SHARE with a share between 0 and 1."
    )


def check_name(option: str, value: str | None, names: Iterable[str], own: str = "") -> None:
    """Refuse a word that is on no list; ``package.module:function`` passes where own ones are taken.

    Args:
        option: the setting, such as "data".
        value: the word; None passes.
        names: the list.
        own: what else may be given, in words, if code of the user's own may be.

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
    end = f", or {own}" if own else ""
    raise SettingsError(
        f"{flag(option)} is {value!r}.{suggestion(value, known)} It must be one of {', '.join(known)}{end}."
    )


def check_data_and_model(data: str | None, model: str | None) -> None:
    """Refuse names of data sets and models that there are not; those of the user's own pass.

    Raises:
        SettingsError: with the name that was probably meant.
    """
    if data is not None and data_form(data) not in ("table", "images"):
        check_name("data", data, DATA_NAMES, f"{FILES}, or package.module:function that returns a DataSet")
    check_name("model", model, MODELS, "package.module:function from the data set to a module")


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
    plain = method.startswith(PLAIN_AVERAGING)
    check_name("method", method, names, "" if plain else "package.module:NAME of a FederatedMethod")


def is_code(value: str | None) -> bool:
    """Whether a data set, model, method or loss is imported; fedavg:NAME and huber:D are words of tables."""
    known = str(value).startswith(PLAIN_AVERAGING) or str(value).partition(":")[0] in LOSSES
    return ":" in (value or "") and not known


_CALLS = {
    r"unit=Users\(owner=(\w+), records_per_user=(\w+)\)": r"--unit user --owner \1 --records-per-user \2",
    r"Budget\(epsilon, delta, runs=(\d+)\)": r"--runs \1",
    r"(?:run=)?Run\(journal=([^()]*)\)": r"--ledger \1",
    r"\brows='(sum|mean)'": r"--user-rows \1",
    r"\bstop_fixed_beforehand=True": "equipoise resume RUN --stop-fixed-beforehand",
}
"""What the library's messages ask for, and how a command says it."""


def in_option_words(message: str, names: Iterable[str]) -> str:
    """The message of an error of the library with options where it names arguments of functions.

    What else stands in a call of Python, and the word behind an option, stay as they are.

    >>> in_option_words("device='cuda': this machine has no CUDA device; give device='cpu'", ["device"])
    "--device 'cuda': this machine has no CUDA device; give --device 'cpu'"
    """
    for call, option in _CALLS.items():
        message = re.sub(call, option, message)
    kept = r"\b(?:\w+=)?\w+\([^()]*\)|--[\w-]+ \S+"
    given = rf"(?<![\w.-])({'|'.join(names)})=(True\b|False\b|(?=\S))"

    def said(found: re.Match[str]) -> str:
        if found[1] is None:
            return found[0]
        return {"True": "", "False": "no "}.get(found[2], "") + flag(found[1]) + " " * (not found[2])

    return re.sub(f"{kept}|{given}", said, message)
