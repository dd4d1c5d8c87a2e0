"""Signatures: who issued a statement, by an Ed25519 signature over the hashes of files and of the journal.

The signature file names the published files with their SHA-256, and that of the run's journal entries, which
tells nothing of their content. With the issuer's public key anybody can tell that statement and model are the
ones that were signed; the data owner can tell the same of the journal. Editing statement and journal together
changes both hashes.

The signed bytes are the JSON of everything but the signature, keys sorted, without blanks.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from equipoise._files import PathLike
from equipoise.statements.recompute import Finding

_CONTEXT = "equipoise statement, version 1"


class KeyFileError(ValueError):
    """A key or signature file that is not one."""


@dataclass(frozen=True)
class Signature:
    """A signature file's content.

    Attributes:
        files: file name -> SHA-256 in hexadecimal digits.
        journal: SHA-256 of the run's journal lines, or None.
        public_key: 32 bytes; who they belong to is for the reader to know.
        signature: 64 bytes.
    """

    files: dict[str, str]
    journal: str | None
    public_key: bytes
    signature: bytes

    def to_json(self) -> str:
        """The file's text."""
        rows = _signed(self.files, self.journal, self.public_key)
        return json.dumps(rows | {"signature": _text(self.signature)}, indent=2) + "\n"

    @staticmethod
    def from_json(text: str | bytes) -> Signature:
        """The signature that `to_json` wrote; it may be a false one.

        Raises:
            KeyFileError: the text is no signature file.
        """
        try:
            values = json.loads(text)
            keys = (base64.b64decode(values[name], validate=True) for name in ("public_key", "signature"))
            found = Signature(dict(values["files"]), values["journal"], *keys)
            if json.loads(found.to_json()) != values:
                raise ValueError("it is not what a signature consists of")
            return found
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise KeyFileError(f"the signature file is not one of this library ({error})") from None

    def is_valid(self, key: Ed25519PublicKey | None = None) -> bool:
        """Whether the signature is of `key`, or of the key that stands in the file."""
        if key is not None and key.public_bytes_raw() != self.public_key:
            return False
        try:
            own = Ed25519PublicKey.from_public_bytes(self.public_key)
            own.verify(self.signature, _bytes(_signed(self.files, self.journal, self.public_key)))
        except (InvalidSignature, ValueError):
            return False
        return True


def fingerprint(public_key: bytes) -> str:
    """A name of a public key that people can compare: 32 hexadecimal digits of its SHA-256."""
    return hashlib.sha256(public_key).hexdigest()[:32]


def read_private_key(content: bytes, password: bytes | None = None) -> Ed25519PrivateKey:
    """An Ed25519 key from a PEM or an OpenSSH file.

    Raises:
        KeyFileError: another kind of key, no key, or a wrong or missing password.
    """
    load: Callable[..., object] = serialization.load_pem_private_key
    if b"BEGIN OPENSSH PRIVATE KEY" in content:
        load = serialization.load_ssh_private_key
    make = "Make one with: openssl genpkey -algorithm ed25519 -out key.pem"
    return _loaded(Ed25519PrivateKey, make, load, content, password)


def read_public_key(content: bytes) -> Ed25519PublicKey:
    """An Ed25519 public key from a PEM file or an OpenSSH line.

    Raises:
        KeyFileError: another kind of key, or no key.
    """
    load: Callable[..., object] = serialization.load_pem_public_key
    if content.lstrip().startswith(b"ssh-"):
        load = serialization.load_ssh_public_key
    get = "Get it with: openssl pkey -in key.pem -pubout"
    return _loaded(Ed25519PublicKey, get, load, content.strip() + b"\n")


def read_public_keys(content: bytes) -> list[Ed25519PublicKey]:
    """The keys of a file with one or several, such as an issuer's old and new one, one after the other.

    Raises:
        KeyFileError: another kind of key, or no key.
    """
    found = re.findall(rb"-----BEGIN [^-]+-----.+?-----END [^-]+-----|^ssh-[^\r\n]+", content, re.S | re.M)
    return [read_public_key(one) for one in found or [content]]


def key_content(source: PathLike, what: str = "key") -> bytes:
    """What a key file holds; of `env:NAME` the environment variable.

    Raises:
        KeyFileError: no such file, or no such variable. It does not say which: that may be the secret itself.

    Example:
        >>> key_content("env:NOT_SET_ANYWHERE")
        Traceback (most recent call last):
            ...
        equipoise.statements.sign.KeyFileError: the environment has no such variable for the key, ...
    """
    kind, _, name = str(source).partition(":")
    if kind == "env":
        if name not in os.environ:
            raise KeyFileError(f"the environment has no such variable for the {what}, or it is not exported")
        return os.environ[name].encode()
    try:
        return Path(source).read_bytes()
    except OSError as error:
        why = type(error).__name__
        raise KeyFileError(
            f"the {what} cannot be read ({why}): give the path of a file, or env:NAME with the name of an "
            "environment variable, and not the secret itself"
        ) from None


def _loaded(kind: Any, remedy: str, load: Callable[..., object], *given: bytes | None) -> Any:
    try:
        key = load(*given)
    except TypeError as error:  # a password is missing, or given for nothing
        raise KeyFileError(f"the key file cannot be opened: {error}") from None
    except (ValueError, UnsupportedAlgorithm) as error:
        word = "private" if kind is Ed25519PrivateKey else "public"
        raise KeyFileError(f"the key file holds no {word} key that can be read ({error}). {remedy}") from None
    if not isinstance(key, kind):
        raise KeyFileError(f"the key file holds a {type(key).__name__}; statements are signed with Ed25519")
    return key


def signing_key(key_file: PathLike | Ed25519PrivateKey, password: bytes | None = None) -> Ed25519PrivateKey:
    """The private key of a file or of `env:NAME`, or the key itself: a pipe can be read only once.

    Raises:
        KeyFileError: no such key.
    """
    if isinstance(key_file, Ed25519PrivateKey):
        return key_file
    return read_private_key(key_content(key_file), password)


def sign_files(
    key: Ed25519PrivateKey, folder: Path, names: Iterable[str], journal: str | None = None
) -> Signature:
    """Sign those of the folder's files that are there, and the SHA-256 of the run's journal entries."""
    hashes = {name: found for name in sorted(names) if (found := _hash_of(folder / name)) is not None}
    public = key.public_key().public_bytes_raw()
    return Signature(hashes, journal, public, key.sign(_bytes(_signed(hashes, journal, public))))


def read_signature(
    path: Path, public_key: PathLike | None, what: str = "run"
) -> tuple[Signature | None, list[Finding]]:
    """The signature of a file, if it is a valid one by any key, and whether it is by the given key.

    Args:
        path: the signature file; it need not be there.
        public_key: file with the issuer's Ed25519 public keys, or `env:NAME`; without a signature by one of
            them the finding is bad.
        what: is signed, in a word.

    Raises:
        KeyFileError: no public key in its file.
    """
    keys = [] if public_key is None else read_public_keys(key_content(public_key))
    if not path.is_file():
        ok = False if keys else None
        return None, [Finding("signature", ok, f"the {what} is not signed: anybody could have written it")]
    try:
        signature = Signature.from_json(path.read_bytes())
    except KeyFileError as error:
        return None, [Finding("signature", False, str(error))]
    name = fingerprint(signature.public_key)
    if not signature.is_valid():
        return None, [Finding("signature", False, "it is not a signature of the hashes in the file")]
    if keys and not any(map(signature.is_valid, keys)):
        others = ", ".join(fingerprint(key.public_bytes_raw()) for key in keys)
        detail = f"it is by the key {name}, not by the given one, {others}"
        return signature, [Finding("signature", False, detail)]
    if not keys:  # anybody can sign with a key of their own
        detail = f"valid, by the key {name}: whose that is was not checked. Give the issuer's public key"
        return signature, [Finding("signature", None, detail)]
    return signature, [Finding("signature", True, f"valid, by the given key {name}")]


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


def _signed(files: Mapping[str, str], journal: str | None, public_key: bytes) -> dict[str, Any]:
    return {
        "format": _CONTEXT,
        "algorithm": "Ed25519",
        "files": dict(files),
        "journal": journal,
        "public_key": _text(public_key),
    }


def _bytes(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()
