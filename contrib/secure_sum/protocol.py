"""A sum of vectors of which the server learns the sum alone (experimental).

Every client u adds masks that cancel in the sum, in integers modulo 2^32:

    upload_u = code(x_u) + PRG(b_u) + sum_{v > u} PRG(s_uv) - sum_{v < u} PRG(s_uv)
    code(x) = round(clip(x, -limit, limit) / step),    step = limit / floor((2^31 - 1) / P)

s_uv is agreed between each two clients by Diffie and Hellman's exchange, b_u is the client's own. Both
secrets of u, b_u and the key behind the s_uv, are split among all clients by Shamir's scheme: t of them bring
one back. For a client whose upload is there they give shares of b_u, for one that dropped out shares of the
key, for nobody both.
P codes cannot overflow, so the sum is exact but for the rounding: at most step / 2 a client and number.

With 2 t > P + c no server that c clients collude with can bring back both secrets of an honest client, not
even one that tells different clients different things about who dropped out. The public keys go through the
server unsigned: it is assumed to hand them on as they are (honest but curious).

Key pairs, b and shares are new for every sum. Masks are AES-256 in counter mode under the whole 32 bytes of a
secret: Flower's own generator folds them to the 32 bits of a Mersenne twister's seed, which can be searched.
Shares are split by Flower's function, from the extra ``federated``.

Sources: Bonawitz et al. 2017; Bell et al. 2020 ("SecAgg+") let a client share with some neighbours alone,
which pays for many clients; here all are neighbours.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

from equipoise.federated import Refused

__all__ = ["Party", "SecureSum", "TooFewClients", "recover"]

_KEY = 32  # bytes of every secret and public key
_SHARE = 52  # bytes of a share: its number in 4, and 3 blocks of 16


class TooFewClients(RuntimeError):
    """Fewer clients than the threshold are left: the sum cannot be unmasked."""


@dataclass(frozen=True)
class SecureSum:
    """Public settings of a secure sum, the same at server and clients.

    Args:
        clients: P >= 2, the most that a sum may have.
        threshold: t; the least that is safe when None.
        limit: numbers are clipped to [-limit, limit] before they are added.
        colluding: c, clients that may work with the server.

    Raises:
        ValueError: settings under which the server could unmask one client, or no sum can be had.

    Example:
        >>> rule = SecureSum(clients=3)
        >>> rule.least
        2
        >>> rule.decode(rule.encode(torch.tensor([0.5, -9.0]))).round(decimals=6)
        tensor([ 0.5000, -8.0000], dtype=torch.float64)
    """

    clients: int
    threshold: int | None = None
    limit: float = 8.0
    colluding: int = 0

    def __post_init__(self) -> None:
        for name, least in (("clients", 2), ("colluding", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 10_000:
                raise ValueError(f"{name}={value!r}: give a whole number from {least} to 10000")
        if not (math.isfinite(self.limit) and self.limit > 0):
            raise ValueError(f"limit={self.limit!r}: give a finite number above 0")
        if 2 * self.least <= self.clients + self.colluding:
            raise ValueError(
                f"threshold={self.threshold}: with clients={self.clients} and colluding={self.colluding} the "
                "server could unmask a single client unless 2 * threshold > clients + colluding"
            )
        if self.least > self.clients:
            raise ValueError(
                f"threshold={self.least}: more than the {self.clients} clients; nothing could be unmasked. "
                "Assume fewer colluding clients or give a lower threshold"
            )

    @property
    def least(self) -> int:
        """t, the clients that must stay to the end."""
        return self.threshold if self.threshold is not None else (self.clients + self.colluding) // 2 + 1

    @property
    def step(self) -> float:
        """The width of the rounding."""
        return self.limit / ((2**31 - 1) // self.clients)

    def encode(self, values: Tensor) -> np.ndarray:
        """[d] numbers as [d] unsigned 32-bit integers.

        Raises:
            Refused: a number is not finite: its code would be any number.
        """
        numbers = values.detach().cpu().double()
        if not bool(torch.isfinite(numbers).all()):
            raise Refused("secure sum: the answer holds numbers that are not finite; nothing leaves")
        clipped = numbers.clamp(-self.limit, self.limit)
        return (clipped / self.step).round().to(torch.int64).numpy().astype(np.uint32)

    def decode(self, total: np.ndarray) -> Tensor:
        """[d] a sum of codes as [d] numbers, float64."""
        return torch.from_numpy(total.view(np.int32).astype(np.float64)) * self.step


class Party:
    """A client's part in one sum: four answers, each once and in this order.

    Args:
        rule: the settings.
        number: the client's number.
        state: what `state_dict` gave, to go on in another process. It is secret.
        terms: of the sum, as this client understands them. The shares are sealed under them, so that clients
            with other terms cannot read them, whatever the server says of the terms.
    """

    def __init__(
        self, rule: SecureSum, number: int, state: Mapping[str, Any] | None = None, *, terms: str = ""
    ) -> None:
        self.rule, self.number = rule, number
        self._state: dict[str, Any] = dict(state) if state is not None else {"stage": "keys", "terms": terms}

    @property
    def terms(self) -> str:
        """Of the sum under way."""
        return str(self._state.get("terms", ""))

    def state_dict(self) -> dict[str, Any]:
        """Plain values, the secrets of this sum among them."""
        return dict(self._state)

    def keys(self) -> bytes:
        """Public keys, for shares and for masks."""
        self._at("keys")
        pair = [X25519PrivateKey.generate() for _ in range(2)]
        self._state |= {"stage": "shares", "share_key": pair[0].private_bytes_raw().hex()}
        self._state |= {"mask_key": pair[1].private_bytes_raw().hex(), "seed": os.urandom(_KEY).hex()}
        return self._public()

    def shares(self, keys: Mapping[int, bytes]) -> dict[int, bytes]:
        """Shares of this client's two secrets for each of the others, encrypted.

        Args:
            keys: client -> its public keys, this one's included.

        Raises:
            Refused: too few clients, or keys that cannot be right.
        """
        self._at("shares")
        self._check(keys, keys.get(self.number) == self._public(), "the keys are not this sum's")
        self._check(keys, all(len(key) == 2 * _KEY for key in keys.values()), "keys have another length")
        self._check(keys, len(set(keys.values())) == len(keys), "two clients have the same keys")
        members = sorted(keys)
        split = zip(self._split("seed", members), self._split("mask_key", members), strict=True)
        found = {index: first + second for index, (first, second) in zip(members, split, strict=True)}
        self._state["stage"] = "masked"
        self._state["keys"] = {str(index): keys[index].hex() for index in members}
        self._state["own"] = found.pop(self.number).hex()
        return {index: self._seal(index, share) for index, share in found.items()}

    def check(self, shares: Mapping[int, bytes]) -> None:
        """Refuse what `masked` would, before there are numbers."""
        self._at("masked")
        members = {*shares, self.number}
        known = {str(index) for index in members} <= set(self._state["keys"])
        self._check(members, known, "there are shares of clients without keys")
        for index in members - {self.number}:
            self._open(index, shares[index])

    def masked(self, values: Tensor, shares: Mapping[int, bytes]) -> bytes:
        """This client's numbers under its masks.

        Args:
            values: [d].
            shares: client -> its encrypted shares for this one; who is missing has dropped out before.

        Raises:
            Refused: too few clients, or a number that is not finite.
        """
        self.check(shares)
        members = {*shares, self.number}
        codes = self.rule.encode(values)
        self._state["stage"] = "unmask"
        self._state["boxes"] = {
            str(index): box.hex() for index, box in shares.items() if index != self.number
        }
        total = codes + _mask(self._secret("seed"), len(values))
        for index in sorted(members - {self.number}):
            mask = _mask(self._agreed("mask_key", index), len(values))
            total = total + mask if self.number < index else total - mask
        return total.astype("<u4").tobytes()

    def unmask(self, survivors: Iterable[int], least: int = 0) -> dict[int, bytes]:
        """A share of b of every client whose upload is there, and of the mask key of those that dropped out.

        Args:
            survivors: those whose uploads the server has.
            least: how many there must be, where that is more than the threshold.

        Raises:
            Refused: too few survivors, or this client is none of them.
        """
        self._at("unmask")
        there = set(survivors)
        members = {int(index) for index in self._state.get("boxes", {})} | {self.number}
        fits = there <= members and self.number in there and len(there) >= least
        self._check(there, fits, f"the survivors {sorted(there)} cannot be right, or are fewer than {least}")
        found = {}
        for index in sorted(members):
            own = index == self.number
            hidden = bytes.fromhex(self._state["own"] if own else self._state["boxes"][str(index)])
            share = hidden if own else self._open(index, hidden)
            found[index] = share[:_SHARE] if index in there else share[_SHARE:]
        self._state = {"stage": "over"}  # the secrets of this sum are gone
        return found

    def _at(self, stage: str) -> None:
        if self._state["stage"] != stage:
            raise Refused(f"the secure sum is at {self._state['stage']!r}, not at {stage!r}; nothing leaves")

    def _check(self, members: Iterable[int], right: bool, why: str) -> None:
        count = len(set(members))
        if not self.rule.least <= count <= self.rule.clients:
            raise Refused(
                f"{count} clients in a secure sum of {self.rule.least} to {self.rule.clients}; nothing leaves"
            )
        if not right:
            raise Refused(f"secure sum: {why}; nothing leaves")

    def _secret(self, name: str) -> bytes:
        return bytes.fromhex(self._state[name])

    def _public(self) -> bytes:
        if "mask_key" not in self._state:
            return b""
        pair = [X25519PrivateKey.from_private_bytes(self._secret(n)) for n in ("share_key", "mask_key")]
        return b"".join(key.public_key().public_bytes_raw() for key in pair)

    def _split(self, name: str, members: Sequence[int]) -> list[bytes]:
        return list(_shamir().create_shares(self._secret(name), self.rule.least, len(members)))

    def _agreed(self, name: str, index: int) -> bytes:
        public = bytes.fromhex(self._state["keys"][str(index)])
        return _agree(self._secret(name), public[:_KEY] if name == "share_key" else public[_KEY:], name)

    def _seal(self, index: int, share: bytes) -> bytes:
        nonce = os.urandom(12)
        return nonce + AESGCM(self._agreed("share_key", index)).encrypt(
            nonce, share, _label(self.number, index, self.terms)
        )

    def _open(self, index: int, box: bytes) -> bytes:
        try:
            return AESGCM(self._agreed("share_key", index)).decrypt(
                box[:12], box[12:], _label(index, self.number, self.terms)
            )
        except (InvalidTag, ValueError) as error:
            raise Refused(
                f"secure sum: the shares of client {index} cannot be read: they were changed, or made "
                "for another sum; nothing leaves"
            ) from error


def recover(
    rule: SecureSum,
    keys: Mapping[int, bytes],
    sharing: Iterable[int],
    uploads: Mapping[int, bytes],
    shares: Iterable[Mapping[int, bytes]],
) -> Tensor:
    """The server's part: the sum over the uploads, [d] float64.

    Args:
        rule: the settings.
        keys: client -> public keys.
        sharing: the clients between which there are masks: those that had sent shares.
        uploads: client -> what `Party.masked` gave.
        shares: what `Party.unmask` gave, of those that answered.

    Raises:
        TooFewClients: fewer uploads or answers than the threshold.
        ValueError: what came does not fit together.
    """
    answers = list(shares)
    for what, count in (("uploads", len(uploads)), ("answers with shares", len(answers))):
        if count < rule.least:
            raise TooFewClients(f"{count} {what} are fewer than the threshold of {rule.least}: no sum")
    vectors = {index: np.frombuffer(upload, dtype="<u4") for index, upload in uploads.items()}
    lengths = {len(vector) for vector in vectors.values()}
    if len(lengths) != 1:
        raise ValueError("the uploads differ in length")
    total: np.ndarray = np.zeros(lengths.pop(), dtype=np.uint32)
    for vector in vectors.values():
        total = total + vector
    for index in sharing:
        secret = _shamir().combine_shares([answer[index] for answer in answers][: rule.least])
        if index in uploads:
            total = total - _mask(secret, len(total))
            continue
        if X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw() != keys[index][_KEY:]:
            raise ValueError(f"the shares do not make the key of client {index}")
        for other in uploads:  # take off what the others have added for the one that dropped out
            mask = _mask(_agree(secret, keys[other][_KEY:], "mask_key"), len(total))
            total = total - mask if other < index else total + mask
    return rule.decode(total)


def _mask(secret: bytes, length: int) -> np.ndarray:
    """[length] uniform 32-bit integers from all bits of the secret."""
    stream = Cipher(algorithms.AES(_derive(secret, b"mask")), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(stream.update(bytes(4 * length)), dtype="<u4").astype(np.uint32)


def _agree(private: bytes, public: bytes, purpose: str) -> bytes:
    try:
        shared = X25519PrivateKey.from_private_bytes(private).exchange(
            X25519PublicKey.from_public_bytes(public)
        )
    except ValueError as error:
        raise Refused("secure sum: a public key is not valid") from error
    return _derive(shared, purpose.encode())


def _derive(secret: bytes, purpose: bytes) -> bytes:
    return HKDF(SHA256(), _KEY, salt=None, info=b"equipoise secure sum " + purpose).derive(secret)


def _label(source: int, destination: int, terms: str) -> bytes:
    return source.to_bytes(8, "little") + destination.to_bytes(8, "little") + terms.encode()


def _shamir() -> Any:
    """Flower's Shamir scheme.

    Raises:
        ImportError: Flower is not installed.
    """
    try:
        from flwr.common.secure_aggregation.crypto import shamir
    except ImportError as error:
        raise ImportError(
            "a secure sum needs Flower: install this package with its extra federated"
        ) from error
    return shamir
