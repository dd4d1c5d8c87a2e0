"""Who issued a statement: an Ed25519 signature over the hashes of the published files and of the journal.

The signature file names the files with their SHA-256 (and the journal's, which tells nothing of its content),
so that who has the issuer's public key can tell that statement and model are the ones that were signed, and
the keeper that the journal is. Editing statement and journal together changes both hashes.

The signed bytes are the JSON of everything but the signature, keys sorted, without blanks.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

__all__ = ["KeyFileError", "Signature", "fingerprint", "read_private_key", "read_public_key", "sign"]


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
            files, journal = values["files"], values["journal"]
            if not (
                set(values) == {"format", "algorithm", "files", "journal", "public_key", "signature"}
                and (values["format"], values["algorithm"]) == (_CONTEXT, "Ed25519")
                and all(isinstance(word, str) for pair in files.items() for word in pair)
                and (journal is None or isinstance(journal, str))
            ):
                raise ValueError("it lacks what a signature consists of")
            keys = (base64.b64decode(values[name], validate=True) for name in ("public_key", "signature"))
            return Signature(files, journal, *keys)
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


def sign(key: Ed25519PrivateKey, files: Mapping[str, bytes], journal: bytes | None) -> Signature:
    """Sign the contents of files, and of the journal's lines where there are any.

    Example:
        >>> key = Ed25519PrivateKey.generate()
        >>> made = sign(key, {"statement.json": b"{}"}, None)
        >>> made.is_valid(key.public_key()), made.is_valid(Ed25519PrivateKey.generate().public_key())
        (True, False)
    """
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in sorted(files.items())}
    lines = None if journal is None else hashlib.sha256(journal).hexdigest()
    public = key.public_key().public_bytes_raw()
    return Signature(hashes, lines, public, key.sign(_bytes(_signed(hashes, lines, public))))


def fingerprint(public_key: bytes) -> str:
    """A name of a public key that people can compare: 32 hexadecimal digits of its SHA-256."""
    return hashlib.sha256(public_key).hexdigest()[:32]


def read_private_key(content: bytes, password: bytes | None = None) -> Ed25519PrivateKey:
    """An Ed25519 key from a PEM or an OpenSSH file.

    Raises:
        KeyFileError: another kind of key, no key, or a wrong or missing password.
    """
    load = serialization.load_pem_private_key
    if b"BEGIN OPENSSH PRIVATE KEY" in content:
        load = serialization.load_ssh_private_key
    try:
        key: Any = load(content, password)
    except TypeError as error:
        raise KeyFileError(f"the key file cannot be opened: {error}") from None
    except (ValueError, UnsupportedAlgorithm) as error:
        raise KeyFileError(
            f"the key file holds no private key that can be read ({error}). Make one with: openssl genpkey "
            "-algorithm ed25519 -out key.pem"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise KeyFileError(f"the key file holds a {type(key).__name__}; statements are signed with Ed25519")
    return key


def read_public_key(content: bytes) -> Ed25519PublicKey:
    """An Ed25519 public key from a PEM file or an OpenSSH line.

    Raises:
        KeyFileError: another kind of key, or no key.
    """
    load = serialization.load_pem_public_key
    if content.lstrip().startswith(b"ssh-"):
        load = serialization.load_ssh_public_key
    try:
        key: Any = load(content.strip() + b"\n")
    except (ValueError, UnsupportedAlgorithm) as error:
        raise KeyFileError(
            f"the key file holds no public key that can be read ({error}). Get it with: openssl pkey -in "
            "key.pem -pubout"
        ) from None
    if not isinstance(key, Ed25519PublicKey):
        raise KeyFileError(f"the key file holds a {type(key).__name__}; statements are signed with Ed25519")
    return key


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
