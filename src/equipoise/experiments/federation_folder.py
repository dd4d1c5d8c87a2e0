"""What is done with the folder of a finished federation: its page and every client's statement again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise.report import RunFolderError
from equipoise.report.federation import write_federation_report
from equipoise.report.run_folder import damage_named
from equipoise.training.verification import Verification, verify_run

__all__ = ["RESULT", "FederationVerification", "report_federation", "verify_federation"]

RESULT = "federation.json"


@dataclass(frozen=True)
class FederationVerification:
    """What was found about the statements of a federation.

    Attributes:
        run_dir: the folder.
        clients: one verification for each client that took part, by the name of its folder.
        epsilon: the largest of the clients' statements; None where one has no value.
        problems: where `federation.json` and the clients' statements differ, in sentences.
    """

    run_dir: str
    clients: dict[str, Verification]
    epsilon: float | None
    problems: tuple[str, ...]

    @property
    def consistent(self) -> bool:
        """Whether every client's statement is consistent, and the whole with them."""
        return not self.problems and all(client.consistent for client in self.clients.values())

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "run_dir": self.run_dir,
            "consistent": self.consistent,
            "epsilon": self.epsilon,
            "problems": list(self.problems),
            "clients": {name: client.to_json() for name, client in self.clients.items()},
        }


def verify_federation(folder: str, public_key: str | None = None) -> FederationVerification:
    """Compute the statement of every client again, and hold `federation.json` to them.

    Args:
        folder: of the federation.
        public_key: file with the issuer's Ed25519 public key; every client must then be signed with it.

    Raises:
        RunFolderError: no client has a statement yet, or a file cannot be read.
    """
    places = sorted(path.parent for path in Path(folder).glob("clients/*/statement.json"))
    if not places:
        raise RunFolderError(
            f"run={folder!r} is a federation whose clients have no statement yet. Let it finish: "
            f"equipoise resume {folder}"
        )
    clients = {place.name: verify_run(place, public_key=public_key) for place in places}
    values = _result(folder)
    with damage_named(folder):
        problems = _differences(values, clients)
    epsilons = [client.epsilon for client in clients.values()]
    known = [epsilon for epsilon in epsilons if epsilon is not None]
    return FederationVerification(
        folder, clients, max(known) if len(known) == len(epsilons) else None, tuple(problems)
    )


def report_federation(folder: str) -> dict[str, Any]:
    """Write the page of a federation again; gives what `federation.json` holds, with run_dir and report.

    Raises:
        RunFolderError: the federation has not finished, or the file is damaged.
    """
    values = _result(folder)
    with damage_named(folder):
        report = write_federation_report(values, folder)
    return {**values, "run_dir": folder, "report": str(report)}


def _differences(values: Mapping[str, Any], clients: Mapping[str, Verification]) -> list[str]:
    found = []
    listed = {f"{one['client']:03d}": one for one in values["clients"]}
    for name, one in listed.items():
        if name in clients:
            if clients[name].epsilon != one["epsilon"]:
                found.append(
                    f"client {name}: {RESULT} says epsilon {one['epsilon']}, its statement "
                    f"{clients[name].epsilon}"
                )
        elif one["rounds"]:
            found.append(f"client {name}: took part in {one['rounds']} rounds and has no statement")
    found += [f"client {name}: {RESULT} does not list it" for name in clients if name not in listed]
    epsilons = [one["epsilon"] for one in listed.values()]
    largest = None if None in epsilons else max(epsilons)
    if values["epsilon"] != largest:
        found.append(f"{RESULT} says epsilon {values['epsilon']}, the largest of its clients is {largest}")
    return found


def _result(folder: str) -> dict[str, Any]:
    path = Path(folder) / RESULT
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunFolderError(
            f"run={folder!r} is a federation that has not finished. Go on with it: equipoise resume {folder}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise RunFolderError(
            f"run={folder!r}: {RESULT} is damaged ({error}). Restore it from a copy."
        ) from error
    if not isinstance(values, dict):
        raise RunFolderError(f"run={folder!r}: {RESULT} holds no JSON object. Restore it from a copy.")
    return values
