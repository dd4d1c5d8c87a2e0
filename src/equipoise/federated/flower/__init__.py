"""The federated room on Flower (the extra ``federated``).

`client_app` makes a Flower app of a `Client`, `serve` runs our strategies at Flower's server,
`simulate_on_flower` runs both on one machine. Flower brings messages and processes; noise, ledgers, refusals
and rounds are this library's. Flower's own wrappers for differential privacy are not used.
"""

import os
import sys
from importlib.util import find_spec

from equipoise._extras import lacking

if find_spec("flwr") is None:
    raise ModuleNotFoundError(lacking("flwr"), name="flwr")

# Nobody's training calls home unasked. Both are read at the import of the packages; Flower's may be over.
if "FLWR_TELEMETRY_ENABLED" not in os.environ and "flwr.supercore.telemetry" in sys.modules:
    sys.modules["flwr.supercore.telemetry"].FLWR_TELEMETRY_ENABLED = "0"  # type: ignore[attr-defined]
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

from equipoise.federated.flower.client_app import client_app, client_number
from equipoise.federated.flower.grid import GridExchange, serve
from equipoise.federated.flower.simulation import run_simulated, simulate_on_flower
from equipoise.federated.flower.user_updates import FlowerUpdates, NodeUsers, user_app

__all__ = [
    "FlowerUpdates",
    "GridExchange",
    "NodeUsers",
    "client_app",
    "client_number",
    "run_simulated",
    "serve",
    "simulate_on_flower",
    "user_app",
]
