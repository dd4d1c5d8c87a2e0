"""The names that the command line takes, known before torch is loaded: a slip of the pen is answered at once.

A test holds them to the tables of the library.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from equipoise.app.options import SettingsError, flag
from equipoise.methods.registry import registered

__all__ = [
    "DATA_NAMES",
    "FEDERATED_NAMES",
    "MODEL_NAMES",
    "check_federated",
    "check_name",
    "suggestion",
]


DATA_NAMES = (
    "digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "adult", "a9a", "mushroom", "sst2",
    "sst2-sentences", "pneumoniamnist", "breastmnist",
)  # fmt: skip


MODEL_NAMES = (
    "mlp-tanh", "cnn-tanh", "cnn-cifar", "resnet20-gn", "linear", "logistic", "scatter-linear", "text-bag",
)  # fmt: skip


FEDERATED_NAMES = (
    "dp-fedavg", "dp-fedavg-quantile", "dp-fedavg-normalised", "adaptdp-fedavg", "fedprox", "scaffold",
    "moon", "fedlrs", "fedpcdp", "fedpdp", "projected-upload",
)  # fmt: skip


def check_name(option: str, value: str | None, names: Iterable[str], own: str = "") -> None:
    """Refuse a word that is on no list; ``package.module:function`` passes where own ones are taken.

    Args:
        option: the setting, such as "data".
        value: the word; None passes.
        names: the list.
        own: what a function or class of the user's own is, where one may be given.

    Raises:
        SettingsError: with the name that was probably meant.

    >>> check_name("data", "minst", DATA_NAMES)
    Traceback (most recent call last):
        ...
    equipoise.app.options.SettingsError: --data is 'minst'. Did you mean mnist? It must be one of ...
    """
    known = tuple(names)
    if value is None or value in known or (own and ":" in value):
        return
    kind = "Class" if option == "method" else "function"
    end = f", or package.module:{kind}, {own}" if own else ""
    raise SettingsError(
        f"{flag(option)} is {value!r}.{suggestion(value, known)} It must be one of {', '.join(known)}{end}."
    )


def check_federated(method: str) -> None:
    """Refuse a federated method that there is not; ``fedavg:NAME`` takes any method's name.

    Raises:
        SettingsError: with the name that was probably meant.

    >>> check_federated("fedavg:dp-c4")
    >>> check_federated("fedpcpd")
    Traceback (most recent call last):
        ...
    equipoise.app.options.SettingsError: --method is 'fedpcpd'. Did you mean fedpcdp? It must be ...
    """
    local = tuple(f"fedavg:{name}" for name in registered())
    if method not in (*FEDERATED_NAMES, *local):
        raise SettingsError(
            f"--method is {method!r}.{suggestion(method, (*FEDERATED_NAMES, *local))} It must be one of "
            f"{', '.join(FEDERATED_NAMES)}, or fedavg:NAME with any name that `equipoise methods` lists."
        )


def suggestion(word: str, names: Iterable[str]) -> str:
    """A question after the name that was probably meant, with a space before it; empty where none is near.

    >>> suggestion("dpsgd", ["dp-sgd", "dp-c4"])
    ' Did you mean dp-sgd?'
    >>> suggestion("resnet", MODEL_NAMES), suggestion("qqq", MODEL_NAMES)
    (' Did you mean resnet20-gn?', '')
    """
    known = tuple(names)
    near = get_close_matches(word, known, n=1, cutoff=0.6)
    near = near or [name for name in known if len(word) > 2 and name.startswith(word.lower())][:1]
    return f" Did you mean {near[0]}?" if near else ""
