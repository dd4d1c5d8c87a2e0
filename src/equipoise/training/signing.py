"""Signature files beside what they sign: reading keys, writing and checking, for runs and for federations."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from equipoise.statements import Finding, Signature
from equipoise.statements.signatures import KeyFileError, fingerprint, read_private_key, read_public_key, sign
from equipoise.training.checkpoint import write_atomically

__all__ = ["check_files", "read_signature", "sign_files", "signing_key"]

PathLike = str | os.PathLike[str]


def signing_key(key_file: PathLike, password: bytes | None = None) -> Ed25519PrivateKey:
    """The private key of a file.

    Raises:
        KeyFileError: no such key.
    """
    try:
        return read_private_key(Path(key_file).read_bytes(), password)
    except OSError as error:
        raise KeyFileError(f"key={str(key_file)!r} cannot be read ({error}); name a key file") from None


def sign_files(
    key: Ed25519PrivateKey, path: Path, names: Iterable[str], journal: bytes | None = None
) -> Signature:
    """Sign those of the files that are there; the signature is written to `path`, beside them."""
    contents = {name: path.parent / name for name in names}
    made = sign(key, {n: place.read_bytes() for n, place in contents.items() if place.is_file()}, journal)
    write_atomically(path, made.to_json().encode(), mode=0o644)
    return made


def read_signature(
    path: Path, public_key: PathLike | None, what: str = "run"
) -> tuple[Signature | None, list[Finding]]:
    """The signature of a file, if it is one, and whether it is valid and by the given key.

    Args:
        path: the signature file; it need not be there.
        public_key: file with the issuer's Ed25519 public key; without a signature by it the finding is bad.
        what: is signed, in a word.

    Raises:
        KeyFileError: no public key in its file.
    """
    key = None
    if public_key is not None:
        try:
            key = read_public_key(Path(public_key).read_bytes())
        except OSError as error:
            raise KeyFileError(f"public_key={str(public_key)!r} cannot be read ({error})") from None
    if not path.is_file():
        ok = None if key is None else False
        return None, [Finding("signature", ok, f"the {what} is not signed: anybody could have written it")]
    try:
        signature = Signature.from_json(path.read_bytes())
    except KeyFileError as error:
        return None, [Finding("signature", False, str(error))]
    name = fingerprint(signature.public_key)
    if not signature.is_valid():
        return signature, [Finding("signature", False, "it is not of what it stands beside: it was edited")]
    if key is not None and not signature.is_valid(key):
        other = fingerprint(key.public_bytes_raw())
        detail = f"it is by the key {name}, not by the given one, {other}"
        return signature, [Finding("signature", False, detail)]
    by = "the given key" if key is not None else f"the key {name}; ask the issuer whether it is theirs"
    return signature, [Finding("signature", True, f"valid, by {by}")]


def check_files(
    signature: Signature, folder: Path, names: Collection[str], needed: Collection[str]
) -> Finding:
    """Whether the files are the signed ones.

    Args:
        signature: a valid one.
        folder: where the files are.
        names: the folder's own files. Nothing else that a signature file names is looked for on the disk.
        needed: those that must be there; a published part may leave the others out.
    """
    changed = [
        name
        for name in names
        if signature.files.get(name) != _hash_of(folder / name)
        and (name in needed or (folder / name).is_file())
    ]
    absent = [name for name in signature.files if name not in names or not (folder / name).is_file()]
    detail = f"changed since they were signed: {', '.join(changed)}" if changed else "as they were signed"
    if absent:
        detail += f"; not here: {', '.join(absent)}"
    return Finding("files", not changed, detail)


def _hash_of(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
