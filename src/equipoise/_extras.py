"""Packages of extras: which extra of this package brings them, said where one is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

_EXTRAS = {
    "cli": ("PIL", "click", "jinja2", "matplotlib", "pandas", "pydantic", "rich", "sklearn", "typer"),
    "federated": ("flwr",),
    "hf": ("accelerate", "datasets", "peft", "transformers"),
    "lightning": ("lightning",),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "tables": ("pyarrow",),
    "tensorboard": ("tensorboard",),
}


def lacking(module: str) -> str | None:
    """What to install where a package of an extra is missing; None for any other module.

    >>> lacking("jinja2.utils")
    "jinja2 is missing. Install this package with the extra [cli]: pip install 'PATH[cli]'"
    >>> lacking("a_users_module")
    """
    root = module.partition(".")[0]
    # PATH, and not a name: the one on the index is not this package.
    return next(
        (
            f"{root} is missing. Install this package with the extra [{extra}]: pip install 'PATH[{extra}]'"
            for extra, modules in _EXTRAS.items()
            if root in modules
        ),
        None,
    )


def incomplete(extra: str) -> str | None:
    """What to install where a package of this extra is missing."""
    return next((lacking(module) for module in _EXTRAS[extra] if find_spec(module) is None), None)


@contextmanager
def of_extra() -> Iterator[None]:
    """Around imports of an extra's packages.

    Raises:
        ModuleNotFoundError: one is missing; the message says what to install.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(lacking(str(error.name)) or str(error), name=error.name) from None
