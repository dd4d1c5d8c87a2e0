"""Flower's simulation on one machine, behind one function: its entry point is deprecated and will move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from equipoise.federated.flower.grid import serve
from equipoise.federated.flower.node import OpenClient, client_app
from equipoise.federated.server import FederationHistory, Strategy
from equipoise.methods.base import Parameters

Found = TypeVar("Found")


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

    def main(grid: Grid) -> FederationHistory:
        return serve(grid, strategy, clients, params, rounds, **options)

    return run_simulated(main, client_app(build), clients, processes=processes)


def run_simulated(main: Callable[[Grid], Found], app: ClientApp, nodes: int, *, processes: int = 1) -> Found:
    """What `main(grid)` gives in Flower's simulation, where its messages reach nodes that run `app`.

    Args:
        main: of the server, in this process.
        app: picklable; of nodes numbered from 0 on.
        nodes: how many.
        processes: how many nodes work at once.

    Raises:
        RuntimeError: the simulation ended before `main` did.
    """
    from flwr.simulation import run_simulation

    found: list[Found] = []
    server = ServerApp()

    @server.main()
    def run(grid: Grid, context: Context) -> None:
        found.append(main(grid))

    run_simulation(
        server_app=server,
        client_app=app,
        num_supernodes=nodes,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": processes, "include_dashboard": False},
        },
    )
    if not found:
        raise RuntimeError("Flower's simulation ended before the server did; its log says why")
    return found[0]
