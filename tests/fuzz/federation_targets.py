"""What reads the files of a federation, and the messages of secure sums."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

from mutating import mutated_json
from targets import Target, command, file_of, home, signing_key_file, with_file

from equipoise.app.federation.folder import report_federation, verify_federation
from equipoise.app.run_checks import check_federation_folder, schema_of_run, settings_of_run
from equipoise.app.settings import FederationSettings

# ---- files


@functools.cache
def _federation() -> Path:
    """A finished and signed federation of two clients."""
    folder = home() / "federation"
    line = "federate --data digits --model logistic --method dp-fedavg --clients 2 --rounds 1 --local-steps 1"
    command(*line.split(), "--run-dir", str(folder))
    command("sign", str(folder), "--key", str(signing_key_file()))
    for name in ("server", "clients/000/checkpoint", "clients/001/checkpoint"):
        shutil.rmtree(folder / name, ignore_errors=True)
    return folder


def _look(folder: Path) -> None:
    verify_federation(str(folder)).to_json()
    report_federation(str(folder))


def _published(folder: Path) -> None:
    """What whoever was given the published part reads: it has no settings of its owner."""
    _look(folder)
    settings_of_run(str(folder), published=True)
    schema_of_run(str(folder))


@functools.cache
def _published_part() -> Path:
    return Path(shutil.copytree(_federation(), home() / "published", ignore=lambda *_: {"settings.json"}))


def _settings(folder: Path) -> None:
    _look(folder)
    settings_of_run(str(folder))
    settings = FederationSettings.read(folder / "settings.json")
    settings.check()
    settings.command()
    check_federation_folder(settings, str(folder))


# ---- messages of secure sums


def federation_targets() -> tuple[Target, ...]:
    """All of this file."""

    def of_folder(
        name: str, then: Callable[[Path], None], share: int, folder: Callable[[], Path] = _federation
    ) -> Target:
        good = file_of(folder, name)
        feed = with_file(folder, name, then)
        kind = "federation" if folder is _federation else "published federation"
        return Target(f"{kind}: {name}", mutated_json([good]), feed, share, good)

    return (
        of_folder("federation.json", _look, 300),
        of_folder("federation.json", _published, 300, _published_part),
        of_folder("settings.json", _settings, 300),
        of_folder("federation.sig.json", _look, 100),
        of_folder("clients/001/statement.json", _look, 100),
    )
