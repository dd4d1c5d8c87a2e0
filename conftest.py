"""What the collection of doctests leaves out, and the options of `tests/passed_before.py`.

Those of modules whose optional packages are missing; and `conftest.py`, which several folders have: collected
as a module, one would hide the other.
"""

from importlib.util import find_spec

pytest_plugins = ["tests.passed_before"]
collect_ignore_glob = ["tests/*/conftest.py"] + (
    []
    if find_spec("flwr")
    else ["src/equipoise/federated/flower/*.py", "contrib/secure_sum/*.py", "tests/federated/flower_grid.py"]
)
