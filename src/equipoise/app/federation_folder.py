"""What is done with the folder of a finished federation: its page, every client's statement again, signing.

The signature of a federation, `federation.sig.json`, is of `federation.json`, `settings.json`, the model, the
page and of every client's own signature, and so of every client's statement.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise.app.run_checks import FEDERATION_FILE
from equipoise.federated.client import DISJOINT
from equipoise.report import RunFolderError
from equipoise.report.federation import write_federation_report
from equipoise.report.files import read_object
from equipoise.report.run_folder import damage_named
from equipoise.statements import Signature
from equipoise.statements.signatures import fingerprint
from equipoise.training.signing import PathLike, check_files, read_signature, sign_files, signing_key
from equipoise.training.verification import (
    Verification,
    check_signable,
    sign_verified,
    verify_run,
)

__all__ = [
    "RESULT",
    "SIGNATURE",
    "WORST",
    "FederationVerification",
    "read_result",
    "report_federation",
    "sign_federation",
    "verify_federation",
]


RESULT = "federation.json"


SIGNATURE = "federation.sig.json"


SIGNED_FILES = (RESULT, FEDERATION_FILE, "model.safetensors", "report.html")


WORST = ("proven", "worst_case", "none")


_CLIENT_SIGNATURE = re.compile(r"clients/[0-9]+/statement\.sig\.json", re.ASCII)


@dataclass(frozen=True)
class FederationVerification:
    """What was found about the statements of a federation.

    Attributes:
        run_dir: the folder.
        clients: one verification for each client that took part, by the name of its folder.
        epsilon: the largest of the clients' statements; None where one has no value.
        signer: fingerprint of the key that signed the federation, or None.
        problems: where `federation.json` and the clients' statements differ, or files and signature.
    """

    run_dir: str
    clients: dict[str, Verification]
    epsilon: float | None
    signer: str | None
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
            "signer": self.signer,
            "problems": list(self.problems),
            "clients": {name: client.to_json() for name, client in self.clients.items()},
        }


def verify_federation(folder: str, public_key: str | None = None) -> FederationVerification:
    """Compute the statement of every client again, and hold `federation.json` to them.

    Args:
        folder: of the federation.
        public_key: file with the issuer's Ed25519 public key; federation and every client must then be
            signed with it.

    Raises:
        RunFolderError: no client has a statement yet, or a file cannot be read.
        KeyFileError: no public key in the file.
    """
    clients, problems = _verified(folder, public_key)
    signature, found = _check_signature(Path(folder), clients, public_key)
    epsilons = [client.epsilon for client in clients.values()]
    known = [epsilon for epsilon in epsilons if epsilon is not None]
    return FederationVerification(
        folder,
        clients,
        max(known) if len(known) == len(epsilons) else None,
        None if signature is None else fingerprint(signature.public_key),
        (*problems, *found),
    )


def sign_federation(folder: str, key_file: PathLike, *, password: bytes | None = None) -> Signature:
    """Sign every client's run and the whole; writes a statement.sig.json for each and federation.sig.json.

    Args:
        folder: of the federation.
        key_file: an Ed25519 private key, PEM or OpenSSH. It is read and not kept.
        password: of the key file, if it has one.

    Raises:
        RunFolderError: no statements, or something that is not consistent: nothing is signed.
        KeyFileError: no such key.
    """
    key = signing_key(key_file, password)
    clients, problems = _verified(folder, None)
    if problems:
        raise RunFolderError(f"run={folder!r} is not consistent, so it was not signed. {problems[0]}")
    for client in clients.values():
        check_signable(client)
    for client in clients.values():
        sign_verified(client.run_dir, key)
    return sign_files(key, Path(folder) / SIGNATURE, (*SIGNED_FILES, *map(_signature_of, clients)))


def report_federation(folder: str) -> dict[str, Any]:
    """Write the page of a federation again; gives what `federation.json` holds, with run_dir and report.

    Raises:
        RunFolderError: the federation has not finished, or the file is damaged.
    """
    values = read_result(folder)
    with damage_named(folder):
        report = write_federation_report(values, folder)
    return {**values, "run_dir": folder, "report": str(report)}


# ---- inside
def _verified(folder: str, public_key: str | None) -> tuple[dict[str, Verification], list[str]]:
    """Every client's verification, and where `federation.json` differs from their statements."""
    places = sorted(path.parent for path in Path(folder).glob("clients/*/statement.json"))
    if not places:
        raise RunFolderError(
            f"run={folder!r} is a federation whose clients have no statement yet. Let it finish: "
            f"equipoise resume {folder}"
        )
    clients = {place.name: verify_run(place, public_key=public_key) for place in places}
    values = read_result(folder)
    with damage_named(folder):
        statements = {place.name: read_object(place / "statement.json") for place in places}
        problems = _differences(values, clients, statements) + _settings_differences(folder, values)
    return clients, problems


def _signature_of(name: str) -> str:
    return f"clients/{name}/statement.sig.json"


def _check_signature(
    folder: Path, clients: Mapping[str, Verification], public_key: str | None
) -> tuple[Signature | None, list[str]]:
    """The federation's signature, and what is wrong with it or with the files that it is of."""
    signature, found = read_signature(folder / SIGNATURE, public_key, "federation")
    if signature is not None and found[0].ok:
        # A client that was signed must be there: the largest epsilon is of all of them.
        parts = {name for name in signature.files if _CLIENT_SIGNATURE.fullmatch(name)}
        parts |= set(map(_signature_of, clients))
        found.append(check_files(signature, folder, (*SIGNED_FILES, *sorted(parts)), {RESULT, *parts}))
    return signature, [f"{one.subject} of the federation: {one.detail}" for one in found if one.ok is False]


def _differences(
    values: Mapping[str, Any], clients: Mapping[str, Verification], statements: Mapping[str, dict[str, Any]]
) -> list[str]:
    """Where `federation.json` says something else than its clients' statements, or than itself."""
    found = []
    listed = {f"{one['client']:03d}": one for one in values["clients"]}
    for name, one in listed.items():
        if name in clients:
            own = statements[name]
            said = {
                "epsilon": clients[name].epsilon,
                "guarantee": own.get("guarantee"),
                "population": own["sampling"].get("population"),
            }
            if "epsilon_claimed" in one:
                said["epsilon_claimed"] = own.get("epsilon_claimed")
            found += [
                f"client {name}: {RESULT} says {key} {one[key]}, its statement {value}"
                for key, value in said.items()
                if one[key] != value
            ]
        elif one["rounds"]:
            found.append(f"client {name}: took part in {one['rounds']} rounds and has no statement")
    found += [
        f"client {name}: its statement does not say that no person's records lie at several owners"
        for name, own in statements.items()
        if DISJOINT not in own["assumptions"]
    ]
    found += [f"client {name}: {RESULT} does not list it" for name in clients if name not in listed]
    count = values["settings"]["clients"]
    if [one["client"] for one in values["clients"]] != list(range(count)):
        found.append(f"{RESULT} does not list each of the {count} clients of its settings once")
    return found + _headline_differences(values, statements) + _same_runs(statements)


def _headline_differences(values: Mapping[str, Any], statements: Mapping[str, dict[str, Any]]) -> list[str]:
    found = []
    epsilons = [one["epsilon"] for one in values["clients"]]
    largest = None if None in epsilons else max(epsilons)
    if values["epsilon"] != largest:
        found.append(f"{RESULT} says epsilon {values['epsilon']}, the largest of its clients is {largest}")
    weakest = max((one["guarantee"] for one in values["clients"]), key=WORST.index)
    if values["guarantee"] != weakest:
        found.append(
            f"{RESULT} says guarantee {values['guarantee']}, the weakest of its clients is {weakest}"
        )
    claims = [one["epsilon_claimed"] for one in values["clients"] if one.get("epsilon_claimed") is not None]
    claimed = max(claims, default=None)
    if values.get("epsilon_claimed") != claimed:
        found.append(f"{RESULT} says epsilon_claimed {values.get('epsilon_claimed')}, its clients {claimed}")
    for key in ("delta", "private", "relation"):
        said = values[key]
        for name, own in statements.items():
            no_delta = key == "delta" and own.get(key) is None and own.get("guarantee") == "none"
            if own.get(key) != said and not no_delta:
                found.append(f"{RESULT} says {key} {said}, the statement of client {name} {own.get(key)}")
    if values["delta"] != values["settings"]["delta"]:
        found.append(f"{RESULT} says delta {values['delta']}, its settings {values['settings']['delta']}")
    rounds = values["rounds"]
    if [one["round"] for one in rounds] != list(range(1, values["settings"]["rounds"] + 1)):
        found.append(
            f"{RESULT} does not list each of the {values['settings']['rounds']} rounds of its settings"
        )
    elif values["accuracy"] != rounds[-1].get("accuracy"):
        found.append(
            f"{RESULT} says accuracy {values['accuracy']}, its last round {rounds[-1].get('accuracy')}"
        )
    return found


def _same_runs(statements: Mapping[str, dict[str, Any]]) -> list[str]:
    """Clients whose statements are of one run: all but one of them are another client's."""
    names = defaultdict(list)
    for name, own in statements.items():
        names[own.get("run")].append(name)
    return [
        f"clients {', '.join(same)}: their statements are of one run, {run}; every client has its own"
        for run, same in names.items()
        if len(same) > 1
    ]


def _settings_differences(folder: str, values: Mapping[str, Any]) -> list[str]:
    """Where `federation.json` and the settings that the federation was begun with differ."""
    path = Path(folder) / FEDERATION_FILE
    if not path.is_file():
        return []
    begun = read_object(path)
    return [
        f"{RESULT} says {key} {values['settings'][key]}, {FEDERATION_FILE} {begun[key]}"
        for key in ("clients", "rounds", "local_steps")
        if values["settings"][key] != begun[key]
    ]


def read_result(folder: str) -> dict[str, Any]:
    """What `federation.json` holds.

    Raises:
        RunFolderError: the federation has not finished, or the file is damaged.
    """
    path = Path(folder) / RESULT
    try:
        return read_object(path)
    except FileNotFoundError:
        raise RunFolderError(
            f"run={folder!r} is a federation that has not finished. Go on with it: equipoise resume {folder}"
        ) from None
