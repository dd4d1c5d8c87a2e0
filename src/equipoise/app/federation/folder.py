"""The folder of a finished federation: verify the clients' statements, sign them, write the page again.

The signature of a federation, `federation.sig.json`, covers `federation.json`, `settings.json`, the model,
the page and every client's own signature, hence every client's statement.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from equipoise._files import PathLike, write_atomically
from equipoise._run_files import read_object
from equipoise.app.run_checks import FEDERATION_FILE
from equipoise.report import RunFolderError
from equipoise.report.federation_page import write_federation_report
from equipoise.report.run_reader import damage_named
from equipoise.statements import Signature
from equipoise.statements.sign import (
    check_files,
    fingerprint,
    read_signature,
    sign_files,
    signing_key,
)
from equipoise.statements.verify import Verification, check_consistent, sign_verified, verify_run
from equipoise.statements.verify_federation import RESULT, check_federation

SIGNATURE = "federation.sig.json"


SIGNED_FEDERATION_FILES = (RESULT, FEDERATION_FILE, "model.safetensors", "report.html")


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
        clients = {name: client.to_json() for name, client in self.clients.items()}
        return {**vars(self), "consistent": self.consistent, "clients": clients}


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


def sign_federation(
    folder: str, key_file: PathLike | Ed25519PrivateKey, *, password: bytes | None = None
) -> Signature:
    """Sign every client's run and the whole; writes a statement.sig.json for each and federation.sig.json.

    Args:
        folder: of the federation.
        key_file: an Ed25519 private key, or its file (PEM or OpenSSH), which is read and not kept.
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
        check_consistent(client, "it was not signed", ("signature",))
    if not read_result(folder).get("gathered"):  # there the sites have signed
        for client in clients.values():
            sign_verified(client.run_dir, key)
    made = sign_files(key, Path(folder), (*SIGNED_FEDERATION_FILES, *map(_signature_of, clients)))
    write_atomically(Path(folder) / SIGNATURE, made.to_json().encode(), mode=0o644)
    return made


def report_federation(folder: str) -> dict[str, Any]:
    """Write the page of a federation again; gives what `federation.json` holds, with run_dir and report.

    Raises:
        RunFolderError: the federation has not finished, or the file is damaged.
    """
    values = read_result(folder)
    with damage_named(folder, f"entries of {RESULT}"):
        report = write_federation_report(values, folder)
    return {**values, "run_dir": folder, "report": str(report)}


# ---- inside


def _verified(folder: str, public_key: str | None) -> tuple[dict[str, Verification], list[str]]:
    """Every client's verification, and where `federation.json` differs from their statements."""
    places = sorted(path.parent for path in Path(folder).glob("clients/*/statement.json"))
    if not places:
        raise RunFolderError(
            f"run={folder!r} is a federation whose clients have no statement yet. Let it finish: equipoise "
            f"resume {folder}"
        )
    clients = {place.name: verify_run(place, public_key=public_key) for place in places}
    values = read_result(folder)
    with damage_named(folder, f"{RESULT} or a client's statement"):
        statements = {place.name: read_object(place / "statement.json") for place in places}
        return clients, check_federation(values, statements)


def _signature_of(name: str) -> str:
    return f"clients/{name}/statement.sig.json"


def _check_signature(
    folder: Path, clients: Mapping[str, Verification], public_key: str | None
) -> tuple[Signature | None, list[str]]:
    """The federation's signature, and what is wrong with it or with the files that it covers."""
    signature, found = read_signature(folder / SIGNATURE, public_key, "federation")
    if signature is not None:
        # A client that was signed must be there: the largest epsilon is over all of them.
        parts = {name for name in signature.files if _CLIENT_SIGNATURE.fullmatch(name)}
        parts |= set(map(_signature_of, clients))
        signed = (*SIGNED_FEDERATION_FILES, *sorted(parts))
        found.append(check_files(signature, folder, signed, {RESULT, *parts}))
    return signature, [f"{one.subject} of the federation: {one.detail}" for one in found if one.ok is False]


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
