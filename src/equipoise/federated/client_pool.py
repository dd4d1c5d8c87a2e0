"""Clients of one process, of which a few are open at a time: memory and file handles do not grow with P."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from equipoise import _validate
from equipoise.federated.client import Client


class ClientPool(Sequence[Client]):
    """Participants for `simulate`, opened from their folders when they are asked.

    Args:
        build: number -> the client, in a folder of its own.
        clients: P.
        most: so many stay open; the one asked longest ago is closed.
    """

    def __init__(self, build: Callable[[int], Client], clients: int, most: int = 32) -> None:
        _validate.count("the clients that are open at a time", most=most)
        self._build, self._clients, self._most = build, clients, most
        self._open: OrderedDict[int, Client] = OrderedDict()

    def __len__(self) -> int:
        return self._clients

    def __getitem__(self, index: int) -> Client:  # type: ignore[override]
        if not 0 <= index < self._clients:
            raise IndexError(f"index={index}: there are {self._clients} clients")
        if index not in self._open:
            if len(self._open) >= self._most:
                self._open.popitem(last=False)[1].close()
            self._open[index] = self._build(index)
        self._open.move_to_end(index)
        return self._open[index]

    def close(self) -> None:
        """Close those that are open."""
        while self._open:
            self._open.popitem()[1].close()
