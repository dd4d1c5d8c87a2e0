"""What `config.json` says of a run, for whoever goes on with it or verifies it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise._version import ENGINE, __version__
from equipoise.methods import Method, PublicRecords, find
from equipoise.methods.configuration import NotInFileError, UnknownSettingsError, read_settings
from equipoise.methods.registry import registered
from equipoise.privacy import Budget, Sampling, sampling_from
from equipoise.statements.assumptions import Assumption
from equipoise.training.arguments import Data, Run, TrainingInputs

# The names in the file are those that an argument had when files were first written.
_OF_RUN = {
    "seed": "seed",
    "reproducible": "reproducible",
    "ema_decay": "ema_decay",
    "ledger_file": "journal",
    "hardened": "hardened",
    "starts_from": "starts_from",
    "trust": "trust",
}
_OF_DATA = {"micro_batch_size": "microbatch_size", "views": "views"}
ARGUMENTS = {**_OF_RUN, **_OF_DATA, "user_rows": "rows", "name": "method"}
"""Fields that have another name than in the file, and further ones, by the name there."""

USUAL: dict[str, Any] = {
    **{name: getattr(Run, field) for name, field in _OF_RUN.items()},
    **{name: getattr(Data, field) for name, field in _OF_DATA.items()},
    "relation": "add_or_remove_one",
    "unit": "record",
    "records_per_user": None,
    "user_rows": None,
    "compile": False,
    "stages": [],
}
"""The settings of a run that states none."""


@dataclass(frozen=True)
class Began:
    """What a run began with, from its `config.json`.

    Attributes:
        plan: fingerprint of its plan.
        sampling, budget: as given.
        settings: by their names in the file, those that it leaves out too.
        run: of these, the fields of `Run`.
        method: as `Method.config` described it.
        optimizer: the name of its class.
        found: what its processes found out so far.
    """

    plan: str
    sampling: Sampling
    budget: Budget | None
    settings: dict[str, Any]
    run: Run
    method: dict[str, Any]
    optimizer: str
    found: list[str]

    @property
    def of_data(self) -> dict[str, Any]:
        """Of the settings, those of `Data`."""
        return {field: self.settings[name] for name, field in _OF_DATA.items()}


def settings_of(given: TrainingInputs) -> dict[str, Any]:
    """The plain settings of a training, by their names in `config.json`."""
    unit = given.unit.protected
    return {
        **{name: getattr(given.run, field) for name, field in _OF_RUN.items()},
        **{name: getattr(given.data, field) for name, field in _OF_DATA.items()},
        "relation": given.unit.relation,
        "unit": unit.name,
        "records_per_user": unit.records if unit.name == "user" else None,
        "user_rows": unit.rows,
        "compile": given.compile,
        "stages": [stage.describe() for stage in given.stages],
    }


def refuse_other_engine(config: Mapping[str, Any], folder: Path) -> None:
    """Refuse to go on with a run that another version began, if a repeated step would not be the same.

    Raises:
        ValueError: naming the version that resumes it.
    """
    if config.get("engine") == ENGINE:
        return
    began = config.get("version")
    named = f"equipoise {began}" if isinstance(began, str) else "an earlier version of equipoise"
    resumes = f"with equipoise=={began}" if isinstance(began, str) else "with the version that began it"
    raise ValueError(
        f"the run in folder={str(folder)!r} was begun by {named}, whose steps compute other bits than "
        f"those of this one ({__version__}): resume it {resumes}, or start a new run, with one "
        "journal for both, run=Run(journal=...). Nothing was spent."
    )


def rebuild(config: Mapping[str, Any]) -> Began:
    """What a run began with, from its `config.json`.

    Raises:
        ValueError: it was damaged or edited, or another version wrote it.
    """
    with _whole():
        given, found = config["budget"], {**USUAL, **config["settings"]}
        budget = None if given is None else Budget(**read_settings(Budget, given))
        if unknown := found.keys() - USUAL.keys():
            raise UnknownSettingsError(sorted(unknown), Run, ", ".join(USUAL))
        run = Run(**{field: found[name] for name, field in _OF_RUN.items()})
        found["trust"] = run.trust  # JSON has no tuples
        return Began(
            plan=config["plan"],
            sampling=sampling_from(config["sampling"]),
            budget=budget,
            settings=found,
            run=run,
            method=dict(config["method"]),
            optimizer=config["optimizer"],
            found=Assumption.of_all(config["assumptions"]),
        )


def rebuild_method(
    config: Mapping[str, Any], public: PublicRecords | None = None, kind: type[Method] | None = None
) -> Method:
    """The method from a `config.json`.

    Args:
        config: as the file holds it.
        public: the public records, which no file holds.
        kind: the class; by its registered name when None. A file does not say what to import.

    Raises:
        NotInFileError: it is a class of the user's own, or holds a function.
        ValueError: it was damaged or edited, or another version wrote it.
    """
    with _whole():
        described = config["method"]
        # An inner method too is found only by a registered name: the words of a command line may name any
        # module, a file may not.
        unknown: Any = dict(described) if kind is None else described.get("inner")
        while unknown is not None:
            name = unknown["name"] if isinstance(unknown, Mapping) else unknown
            if name not in registered():
                raise NotInFileError(
                    f"no method is registered under the name {name!r}: the run had one of its own. Give it "
                    "again, method=..."
                )
            unknown = unknown.get("inner") if isinstance(unknown, Mapping) else None
        kind = kind or find(described["name"], described.get("recipe", "library"))
        return kind.from_config(described, public)


@contextmanager
def _whole() -> Iterator[None]:
    """Turn whatever a description of another version makes constructors raise into one error that says so."""
    try:
        yield
    except NotInFileError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        if isinstance(error, UnknownSettingsError):
            why = f"this version does not know {', '.join(error.names):.100}"
        raise ValueError(
            f"config.json cannot be rebuilt ({why}): another version of equipoise wrote the file, or it was "
            "edited. Use the version that began the run, or restore the file from a copy. Nothing was spent."
        ) from error
