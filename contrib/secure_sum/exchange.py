"""The server's end of secure sums: an `Exchange` over which it learns only sums (experimental).

A query or a round of training takes four messages to every client: public keys, encrypted shares, masked
answers, shares that unmask the sum. Who is gone before the third is not in the sum; who is gone after it
still is. What the server then has is the mean over the clients of the sum, and this stands for the answer of
each: a strategy must need no more than the mean.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from contrib.secure_sum.client import SecureClient
from contrib.secure_sum.protocol import SecureSum, TooFewClients, recover
from equipoise.federated import (
    AdaptDPFedAvg,
    Exchange,
    FedAvg,
    FederationHistory,
    Refused,
    Reply,
    Request,
    Strategy,
    run_rounds,
)
from equipoise.federated.messages import CLIENT_FAILURES, size_in_bytes
from equipoise.federated.methods.server_radius import SQUARES, SQUARES_NOISE
from equipoise.federated.server import ABSENT, why_absent
from equipoise.methods.base import Parameters

__all__ = ["InProcessRelay", "Relay", "SecureExchange", "check_secure", "simulate"]

_log = logging.getLogger("equipoise.federated")

StageRequest = tuple[Parameters, Mapping[str, Any]]


class Relay(Protocol):
    """Messages of secure sums to many clients at once."""

    def __len__(self) -> int:
        """The number of clients."""
        ...

    def relay(
        self, number: int, requests: Mapping[int, StageRequest]
    ) -> Mapping[int, Mapping[str, Any] | str]:
        """What `SecureClient.answer_stage` says of round `number`; a string says why nothing."""
        ...


def check_secure(strategy: Strategy) -> None:
    """Refuse a strategy that needs more than the mean of the answers.

    Raises:
        ValueError: any but `FedAvg` and `AdaptDPFedAvg`.
    """
    if type(strategy) not in (FedAvg, AdaptDPFedAvg):
        raise ValueError(
            f"strategy={type(strategy).__name__}: a secure sum gives the mean of parameters alone, which is "
            "enough for FedAvg and AdaptDPFedAvg"
        )


class InProcessRelay:
    """A relay to clients of this process.

    Args:
        clients: in the order of their numbers.
    """

    def __init__(self, clients: Sequence[SecureClient]) -> None:
        self._clients = clients

    def __len__(self) -> int:
        return len(self._clients)

    def relay(self, number: int, requests: Mapping[int, StageRequest]) -> dict[int, dict[str, Any] | str]:
        found: dict[int, dict[str, Any] | str] = {}
        for index, request in requests.items():
            try:
                found[index] = self._clients[index].answer_stage(number, *request)
            except (*ABSENT, *CLIENT_FAILURES) as error:
                found[index] = why_absent(index, error)
        return found


def simulate(
    strategy: Strategy,
    clients: Sequence[SecureClient],
    params: Parameters,
    rounds: int,
    rule: SecureSum,
    **options: Any,
) -> FederationHistory:
    """Run rounds over secure sums with clients of this process; `options` as for `run_rounds`.

    Raises:
        ValueError: as `run_rounds`, or a strategy that needs more than sums.
    """
    check_secure(strategy)
    return run_rounds(strategy, SecureExchange(InProcessRelay(clients), rule), params, rounds, **options)


class SecureExchange(Exchange):
    """An `Exchange` over secure sums.

    The bytes of a `RoundReport` are those of the plain messages; `sent` counts keys, shares and masked
    answers.

    Args:
        relay: reaches the clients, each a `SecureClient`.
        rule: settings of the sums.
    """

    def __init__(self, relay: Relay, rule: SecureSum) -> None:
        self._relay, self._rule = relay, rule
        self._down = self._up = 0

    def sent(self) -> tuple[int, int]:
        """Bytes to and from the clients since this was last asked: keys, shares, models, masked answers."""
        sent, self._down, self._up = (self._down, self._up), 0, 0
        return sent

    def relay(
        self, number: int, requests: Mapping[int, StageRequest]
    ) -> Mapping[int, Mapping[str, Any] | str]:
        """Hand messages on, and count them."""
        found = self._relay.relay(number, requests)
        self._down += sum(size_in_bytes(request) for request in requests.values())
        self._up += sum(size_in_bytes(one) for one in found.values() if not isinstance(one, str))
        return found

    def __len__(self) -> int:
        return len(self._relay)

    def send(self, request: Request, clients: Sequence[int]) -> dict[int, Reply | str]:
        """The mean of the replies, for each client whose reply is in it.

        It is the global model moved by the mean displacement; where squared norms are asked for, their mean
        is one more number of the sum.
        """
        params = request.params if request.kind == "train" else {}
        size = sum(value.numel() for value in params.values())
        squares = request.kind == "query" or "square_limit" in request.extras
        stages = _Stages(self, self._rule, request)
        try:
            mean = stages.mean(clients, size + squares)
        except (TooFewClients, Refused, ValueError) as error:
            _log.warning("round %s: no secure sum: %s", request.round, error)
            return {index: stages.absent.get(index, f"no secure sum: {error}") for index in clients}
        found: dict[int, Reply | str] = dict(stages.absent)
        moved = _moved(params, mean[:size])
        for index, noise in stages.noise.items():
            reports = {SQUARES: mean[size].item(), SQUARES_NOISE: noise} if squares else {}
            found[index] = Reply(moved, reports)
        return found


class _Stages:
    """The four messages of one sum."""

    def __init__(self, relay: Relay, rule: SecureSum, request: Request) -> None:
        self._relay, self._rule, self._request = relay, rule, request
        self.absent: dict[int, str] = {}
        self.noise: dict[int, float] = {}

    def mean(self, clients: Sequence[int], size: int) -> Tensor:
        """[size] the mean over the clients whose uploads came; `noise` names them."""
        opening = {"stage": "keys", "request": self._request.fingerprint()}
        first = self._stage({p: ({}, opening) for p in clients}, lambda p: ["key"])
        terms = Counter(str(one.get("terms")) for one in first.values()).most_common(1)[0][0]
        keys = {p: one["key"] for p, one in first.items() if str(one.get("terms")) == terms}
        for index in set(first) - set(keys):
            self.absent[index] = "its settings of secure sums differ from the others'"
        noise = {p: _deviation(first[p].get("noise", 0.0)) for p in keys}
        for index in [p for p, found in noise.items() if found is None]:
            self.absent[index] = "its noise is no finite number of at least 0"
            del keys[index]
        everybody = {f"key.{p}": key for p, key in keys.items()} | {f"terms.{p}": terms for p in keys}
        boxes = self._stage(
            {p: ({}, {"stage": "shares", **everybody}) for p in keys},
            lambda p: [f"share.{u}" for u in keys if u != p],
        )

        def upload(p: int) -> StageRequest:
            shares = {f"share.{u}": boxes[u][f"share.{p}"] for u in boxes if u != p}
            asked = {"kind": self._request.kind, **self._request.extras}
            return self._request.params, {"stage": "masked", **asked, **shares}

        masked = self._stage({p: upload(p) for p in boxes}, lambda p: ["masked"])
        uploads = {p: one["masked"] for p, one in masked.items() if len(one["masked"]) == 4 * size}
        for index in set(masked) - set(uploads):
            self.absent[index] = "its upload has another length"
        names = {f"share.{p}": p for p in boxes}
        last = self._stage(
            {p: ({}, {"stage": "unmask", "survivors": list(uploads)}) for p in uploads}, lambda p: list(names)
        )
        shares = [{index: one[name] for name, index in names.items()} for one in last.values()]
        total = recover(self._rule, keys, boxes, uploads, shares)
        self.noise = {p: found for p in uploads if (found := noise[p]) is not None}
        return total / len(uploads)

    def _stage(
        self, requests: Mapping[int, StageRequest], names: Callable[[int], Sequence[str]]
    ) -> dict[int, Mapping[str, Any]]:
        """The answers that hold bytes under all these names."""
        found, kept = self._relay.relay(self._request.round, requests), {}
        for index in requests:
            got = found.get(index, "no answer")
            if isinstance(got, str):
                self.absent[index] = got
            elif all(isinstance(got.get(name), bytes) for name in names(index)):
                kept[index] = got
            else:
                self.absent[index] = "its answer cannot be read"
        if len(kept) < self._rule.least:
            raise TooFewClients(
                f"{len(kept)} clients answered, fewer than the threshold of {self._rule.least}"
            )
        return kept


def _deviation(value: Any) -> float | None:
    """A standard deviation that a client names, or None where it is none."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and 0 <= value <= sys.float_info.max else None


def _moved(params: Parameters, mean: Tensor) -> dict[str, Tensor]:
    names = sorted(params)
    parts = torch.split(mean, [params[name].numel() for name in names])
    return {
        name: (params[name].double() + part.view(params[name].shape)).to(params[name].dtype)
        for name, part in zip(names, parts, strict=True)
    }
