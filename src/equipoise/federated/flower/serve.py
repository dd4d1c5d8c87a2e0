"""This library's loop over a Flower grid, with the server's state on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flwr.serverapp import Grid

from equipoise.federated.flower.grid import GridExchange
from equipoise.federated.server import Exchange, FederationHistory, Strategy, run_rounds
from equipoise.methods.base import Parameters

__all__ = ["serve"]


def serve(
    grid: Grid,
    strategy: Strategy,
    clients: int,
    params: Parameters,
    rounds: int,
    *,
    timeout: float = 3600.0,
    wait: float = 60.0,
    make_exchange: Callable[[GridExchange], Exchange] = lambda nodes: nodes,
    **options: Any,
) -> FederationHistory:
    """Run the rounds over a grid, in the main function of a server app.

    Args:
        grid: of the server app.
        strategy, params, rounds: as for `run_rounds`.
        clients: P.
        timeout: seconds that clients have for an answer.
        wait: seconds to wait for the clients before the first round; then it goes on with those that are
            there.
        make_exchange: what the rounds run over, made of the grid's; the grid's itself by default.
        options: further arguments of `run_rounds`; a server that restarts with its `folder` goes on after its
            last round.

    Raises:
        ValueError: as `run_rounds`.
    """
    nodes = GridExchange(grid, clients, timeout=timeout)
    nodes.wait(seconds=wait)
    return run_rounds(strategy, make_exchange(nodes), params, rounds, **options)
