"""The server's end of secure sums: an `Exchange` over which it learns sums alone (experimental).

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

from equipoise.federated.errors import Refused
from equipoise.federated.history import size_in_bytes
from equipoise.federated.methods.server_radius import SQUARES
from equipoise.federated.secure_client import request_digest
from equipoise.federated.secure_sum import SecureSum, TooFewClients, recover
from equipoise.federated.strategies import AdaptDPFedAvg, FedAvg, Reply, Strategy
from equipoise.methods.base import Parameters

__all__ = ["Relay", "SecureExchange", "check_secure"]

_log = logging.getLogger("equipoise.federated")

Request = tuple[Parameters, Mapping[str, Any]]


class Relay(Protocol):
    """Messages of secure sums to many clients at once."""

    def __len__(self) -> int:
        """The number of clients."""
        ...

    def relay(self, number: int, requests: Mapping[int, Request]) -> Mapping[int, Mapping[str, Any] | str]:
        """What `SecureClient.answer` says of round `number` and the request; a string says why nothing."""
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


class SecureExchange:
    """An `Exchange` over secure sums.

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

    def relay(self, number: int, requests: Mapping[int, Request]) -> Mapping[int, Mapping[str, Any] | str]:
        """Hand messages on, and count them."""
        found = self._relay.relay(number, requests)
        self._down += sum(size_in_bytes(request) for request in requests.values())
        self._up += sum(size_in_bytes(one) for one in found.values() if not isinstance(one, str))
        return found

    def __len__(self) -> int:
        return len(self._relay)

    def ask(
        self, present: Sequence[int], number: int, params: Parameters, square_limit: float
    ) -> dict[int, Reply | str]:
        """The mean of the answers to the radius query, for each whose answer is in it."""
        request = {"query": "ask", "square_limit": square_limit}
        return self._sum(present, number, params, request, 1, lambda mean, noise: Reply(mean.item(), noise))

    def train(
        self, present: Sequence[int], number: int, params: Parameters, instructions: Mapping[str, Any]
    ) -> dict[int, dict[str, Tensor] | str]:
        """The global model moved by the mean displacement, for each whose displacement is in it.

        Where squared norms are asked for, their mean is one more number of the sum.
        """
        request = {"query": "train", **instructions}
        size = sum(value.numel() for value in params.values())
        if "square_limit" not in instructions:
            return self._sum(present, number, params, request, size, lambda mean, _: _moved(params, mean))

        def answer(mean: Tensor, noise: float) -> dict[str, Tensor]:
            squares = torch.tensor([mean[size].item(), noise], dtype=torch.float64)
            return {**_moved(params, mean[:size]), SQUARES: squares}

        return self._sum(present, number, params, request, size + 1, answer)

    def _sum(
        self,
        present: Sequence[int],
        number: int,
        params: Parameters,
        query: Mapping[str, Any],
        size: int,
        answer: Callable[[Tensor, float], Any],
    ) -> dict[int, Any]:
        """Client -> `answer` of the mean and of the client's public noise, or why it is not in the sum."""
        stages = _Stages(self, self._rule, number)
        try:
            mean = stages.mean(present, params, query, size)
        except (TooFewClients, Refused, ValueError) as error:
            _log.warning("round %s: no secure sum: %s", number, error)
            return {index: stages.absent.get(index, f"no secure sum: {error}") for index in present}
        counted = {index: answer(mean, noise) for index, noise in stages.noise.items()}
        return {index: counted[index] if index in counted else stages.absent[index] for index in present}


class _Stages:
    """The four messages of one sum."""

    def __init__(self, relay: Relay, rule: SecureSum, number: int) -> None:
        self._relay, self._rule, self._number = relay, rule, number
        self.absent: dict[int, str] = {}
        self.noise: dict[int, float] = {}

    def mean(self, present: Sequence[int], params: Parameters, query: Mapping[str, Any], size: int) -> Tensor:
        """[size] the mean over the clients whose uploads came; `noise` names them."""
        opening = {"stage": "keys", "request": request_digest(self._number, params, query)}
        first = self._stage({p: ({}, opening) for p in present}, lambda p: ["key"])
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

        def request(p: int) -> Request:
            shares = {f"share.{u}": boxes[u][f"share.{p}"] for u in boxes if u != p}
            return params, {"stage": "masked", **query, **shares}

        masked = self._stage({p: request(p) for p in boxes}, lambda p: ["masked"])
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
        self, requests: Mapping[int, Request], names: Callable[[int], Sequence[str]]
    ) -> dict[int, Mapping[str, Any]]:
        """The answers that hold bytes under all these names."""
        found, kept = self._relay.relay(self._number, requests), {}
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
