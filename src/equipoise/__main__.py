"""`python -m equipoise` and the command `equipoise`: the command line.

Who only verifies runs needs no more than numpy, scipy and dp-accounting.
"""

import sys

from equipoise._extras import incomplete


def main() -> int:
    """Run the command line and return its exit code."""
    # All of the extra at once: what is first missed at the end of a training has cost its epsilon.
    if (said := incomplete("cli")) is None:
        from equipoise.cli import main as command_line

        return command_line()
    if sys.argv[1:2] == ["verify"]:
        from equipoise.statements.verify import main as verify

        return verify(sys.argv[2:])
    print(f"equipoise: {said}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
