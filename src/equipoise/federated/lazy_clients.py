"""Clients of one process, of which a few are open at a time: memory and file handles do not grow with P."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor

from equipoise.federated.client import Client
from equipoise.federated.secure_client import SecureClient
from equipoise.methods.base import Parameters

__all__ = ["ClientPool"]


class ClientPool(Sequence["LazyClient"]):
    """Participants for `simulate`, opened from their folders when they are asked.

    Args:
        build: number -> the client, in a folder of its own; or one behind secure sums.
        clients: P.
        most: so many stay open; who was asked longest ago is closed.
    """

    def __init__(self, build: Callable[[int], Client | SecureClient], clients: int, most: int = 32) -> None:
        if most < 1:
            raise ValueError(f"most={most!r}: at least one client must be open while it works")
        self._build, self._most = build, most
        self._open: OrderedDict[int, Client | SecureClient] = OrderedDict()
        self._seats = [LazyClient(self, number) for number in range(clients)]

    def __len__(self) -> int:
        return len(self._seats)

    def __getitem__(self, index: int) -> LazyClient:  # type: ignore[override]
        return self._seats[index]

    def client(self, number: int) -> Client | SecureClient:
        """The client, open."""
        if number not in self._open:
            if len(self._open) >= self._most:
                self._open.popitem(last=False)[1].close()
            self._open[number] = self._build(number)
        self._open.move_to_end(number)
        return self._open[number]

    @contextmanager
    def closing(self) -> Iterator[ClientPool]:
        """Close all of them at the end."""
        try:
            yield self
        finally:
            while self._open:
                self._open.popitem()[1].close()


class LazyClient:
    """A participant: the client of this number, opened when it is asked."""

    def __init__(self, pool: ClientPool, number: int) -> None:
        self._pool, self._number = pool, number

    @property
    def radius_noise(self) -> float:
        """As the client's."""
        return self._plain().radius_noise

    def ask(self, round_number: int, params: Parameters, square_limit: float) -> float:
        """As the client's."""
        return self._plain().ask(round_number, params, square_limit)

    def train(
        self,
        round_number: int,
        params: Parameters,
        clip_norm: float | None = None,
        control: Parameters | None = None,
        square_limit: float | None = None,
    ) -> dict[str, Tensor]:
        """As the client's."""
        return self._plain().train(round_number, params, clip_norm, control, square_limit)

    def answer(self, round_number: int, params: Parameters, values: Mapping[str, Any]) -> dict[str, Any]:
        """As the `SecureClient`'s."""
        return cast("SecureClient", self._pool.client(self._number)).answer(round_number, params, values)

    def _plain(self) -> Client:
        return cast("Client", self._pool.client(self._number))
