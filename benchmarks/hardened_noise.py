"""The cost of hardened noise: nanoseconds of processor time a number, with and without the grid.

python benchmarks/hardened_noise.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from equipoise.privacy.mechanisms.grid_gaussian import GridStream
from equipoise.privacy.noise.streams import NormalStream


def nanoseconds(work: Callable[[], object], numbers: int, repeats: int = 7) -> float:
    """Median processor time a number."""
    found = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        found.append((time.process_time() - began) * 1e9 / numbers)
    return statistics.median(found)


def main() -> None:
    """Print the table."""
    print(f"{'numbers':>10}{'floating point':>16}{'grid':>8}")
    for numbers in (10_000, 100_000, 1_000_000):
        plain = nanoseconds(lambda n=numbers: NormalStream(bytes(32)).draw(n, 1.0), numbers)
        exact = nanoseconds(lambda n=numbers: GridStream(bytes(32)).draw(n), numbers)
        print(f"{numbers:10,}{plain:13.0f} ns{exact:5.0f} ns")


if __name__ == "__main__":
    main()
