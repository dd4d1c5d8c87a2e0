"""What the collection of doctests leaves out, and the options of `tests/passed_before.py`.

Those of modules whose optional packages are missing; and `conftest.py`, which several folders have: collected
as a module, one would hide the other.
"""

from importlib.util import find_spec

pytest_plugins = ["tests.shared_fixtures", "tests.passed_before"]
NEEDS = {
    "flwr": [
        "src/equipoise/federated/flower/*.py",
        "contrib/secure_sum/*.py",
        "tests/federated/flower_grid.py",
    ],
    "lightning": ["src/equipoise/integrations/lightning.py"],
    "transformers": ["src/equipoise/integrations/transformers.py"],
}
collect_ignore_glob = ["tests/*/conftest.py"] + [
    pattern for package, patterns in NEEDS.items() if not find_spec(package) for pattern in patterns
]
