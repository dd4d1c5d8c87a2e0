"""`python -m equipoise` and the command `equipoise`: the command line.

Who only verifies runs needs no more than numpy, scipy and dp-accounting.
"""

import sys
from importlib.util import find_spec


def main() -> int:
    """Run the command line and return its exit code."""
    if find_spec("typer") is None and sys.argv[1:2] == ["verify"]:
        from equipoise.statements.verify import main as verify

        return verify(sys.argv[2:])
    from equipoise.cli import main as command_line

    return command_line()


if __name__ == "__main__":
    sys.exit(main())
