"""The tests of `contrib` use the small federated problem of the tests of `equipoise.federated`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "federated"))
