"""The federated room on Flower (the extra ``federated``).

`client_app` makes a Flower app of a `Client`, `stay_open` answers for one that Flower's processes only pass
messages on to (`forwarding_app`), `serve` runs our strategies at Flower's server,
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

from equipoise._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
