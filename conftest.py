"""What the collection of tests leaves out: doctests of modules whose optional packages are missing."""

from importlib.util import find_spec

collect_ignore_glob = (
    []
    if find_spec("flwr")
    else ["src/equipoise/federated/flower/*.py", "contrib/secure_sum/*.py", "tests/federated/flower_grid.py"]
)
