"""Flower's simulation on one machine, behind one function: its entry point is deprecated and will move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from equipoise.federated.flower.client_app import OpenClient, client_app
from equipoise.federated.flower.strategy import serve
from equipoise.federated.server import FederationHistory, Strategy
from equipoise.methods.base import Parameters

__all__ = ["simulate_on_flower"]


def simulate_on_flower(
    strategy: Strategy,
    build: Callable[[Context], OpenClient],
    clients: int,
    params: Parameters,
    rounds: int,
    *,
    processes: int = 1,
    **options: Any,
) -> FederationHistory:
    """Run rounds with Flower's simulation: clients in ray's processes, messages through Flower's link.

    Args:
        strategy: the server's side.
        build: makes the client of a node, in a folder of its own; must be picklable, and quick, since it is
            called for every message.
        clients: P.
        params: the global model to begin with.
        rounds: how many.
        processes: how many clients work at once.
        options: as for `serve`.

    Raises:
        RuntimeError: the simulation did not run the rounds.
    """
    from flwr.simulation import run_simulation

    found: list[FederationHistory] = []
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        found.append(serve(grid, strategy, clients, params, rounds, **options))

    run_simulation(
        server_app=server,
        client_app=client_app(build),
        num_supernodes=clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": processes, "include_dashboard": False},
        },
    )
    if not found:
        raise RuntimeError("Flower's simulation ended before the rounds did; its log says why")
    return found[0]
