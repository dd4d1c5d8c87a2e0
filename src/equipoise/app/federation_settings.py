"""The settings of a simulated federation as the command line takes them, checked before torch is loaded."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from equipoise.app.names import check_federated
from equipoise.app.options import SettingsError, check_choice, flag
from equipoise.app.run_checks import FEDERATION_FILE
from equipoise.app.settings import Settings, check_saved, setting
from equipoise.report.json_files import read_json

__all__ = ["FederationSettings", "check_federation_folder"]


DRIVERS = ("inline", "flower")


PARTITIONS = ("iid", "dirichlet", "one-class")


@dataclass(frozen=True, kw_only=True)
class FederationSettings:
    """What a simulated federation needs to know; None where a default decides.

    Attributes:
        base: data, model, budget, seed and what else a training needs; `method` is the federated one,
            `batch_size` what a client of average size expects to draw.
    """

    base: Settings = field(default_factory=Settings)
    clients: int = setting(10, "Number of data owners, P.")
    rounds: int = setting(60, "Number of rounds, R.")
    clients_per_round: int | None = setting(None, "Picked at random each round; all by default.")
    local_steps: int = setting(5, "Steps of a client per round, K.")
    partition: str = setting("iid", "iid, dirichlet or one-class.", choices=PARTITIONS)
    alpha: float = setting(0.5, "Concentration of dirichlet; small: few classes each.")
    driver: str = setting(
        "inline", "inline, or flower: its simulation, with the extra 'federated'.", choices=DRIVERS
    )

    def check(self) -> None:
        """Refuse values that cannot be used.

        Raises:
            SettingsError: naming the option.
        """
        self.base.check()
        for item in fields(self):
            if "choices" in item.metadata:
                check_choice(item.name, getattr(self, item.name), item.metadata["choices"])
        for name in ("clients", "rounds", "clients_per_round", "local_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingsError(f"{flag(name)} is {value}, but it must be at least 1.")
        if self.clients_per_round is not None and self.clients_per_round > self.clients:
            raise SettingsError(
                f"--clients-per-round is {self.clients_per_round}, but there are {self.clients} clients."
            )
        if not self.alpha > 0:
            raise SettingsError(f"--alpha is {self.alpha:g}, but the concentration is above 0.")
        check_federated(self.base.method)
        if self.driver == "flower" and find_spec("flwr") is None:
            raise SettingsError("--driver flower needs Flower: pip install 'equipoise[federated]'")

    def public(self) -> dict[str, Any]:
        """The settings as plain values, without paths."""
        return {**self.base.publishable(), **self.own()}

    def command(self) -> str:
        """The command that repeats it, with placeholders for paths."""
        words = self.base.command().replace("equipoise train", "equipoise federate", 1)
        for name, value in self.own().items():
            if name != "alpha" or self.partition == "dirichlet":
                words += f" {flag(name)} {value:g}" if isinstance(value, float) else f" {flag(name)} {value}"
        return words

    def own(self) -> dict[str, Any]:
        own = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "base"}
        return {name: value for name, value in own.items() if value is not None}

    def to_json(self) -> str:
        """All settings, to continue a folder and for other processes."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> FederationSettings:
        """What `to_json` wrote.

        Raises:
            SettingsError: it did not write this.
        """
        try:
            values = json.loads(text)
            base = Settings.from_json(values["base"])
        except SettingsError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise SettingsError(
                f"the saved settings of the federation are damaged ({error!s:.200}). Restore them from a "
                "copy."
            ) from None
        found = {**values, "base": base}
        check_saved(cls, found, needed="base")
        return cls(**found)

    @classmethod
    def read(cls, path: Path) -> FederationSettings:
        """The settings in a file that `to_json` was written to.

        Raises:
            RunFolderError, SettingsError: it cannot be read, or holds something else.
        """
        return cls.from_json(json.dumps(read_json(path)))


def check_federation_folder(settings: FederationSettings, folder: str) -> None:
    """See that a folder is continued with the settings that it was begun with.

    Raises:
        SettingsError: the folder holds another federation, or something else.
    """
    path = Path(folder)
    kept = path / FEDERATION_FILE
    if kept.is_file():
        old = FederationSettings.read(kept)
        was, now = ({**which.public(), "driver": None} for which in (old, settings))
        changed = sorted(name for name in {**was, **now} if was.get(name) != now.get(name))
        if changed:
            raise SettingsError(
                f"--run-dir {str(path)!r} holds a federation that was begun with another "
                f"{', '.join(changed)}. Repeat the command that began it to go on, or name a new folder."
            )
    elif path.exists() and any(path.iterdir()):
        raise SettingsError(f"--run-dir {str(path)!r} holds something else. Name a new folder.")
