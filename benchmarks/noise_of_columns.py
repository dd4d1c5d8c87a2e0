"""What the noise of a part costs, where a matrix is cut by columns: every block of the stream is needed.

python benchmarks/noise_of_columns.py
"""

from __future__ import annotations

import statistics
import time

import torch

from equipoise.privacy.noise.streams import NormalStream

ROWS, COLUMNS = 50_000, 768


def seconds(ranges: torch.Tensor) -> float:
    began = time.perf_counter()
    NormalStream(bytes(32)).draw_ranges(ROWS * COLUMNS, 1.0, ranges)
    return time.perf_counter() - began


def main() -> None:
    torch.set_num_threads(1)
    starts = COLUMNS * torch.arange(ROWS)[:, None]
    parts = {
        "whole": torch.tensor([[0, ROWS * COLUMNS]]),
        "half of the rows": torch.tensor([[0, ROWS // 2 * COLUMNS]]),
        "half of the columns": starts + torch.tensor([COLUMNS // 2, COLUMNS]),
    }
    taken: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(5):
        for name, ranges in parts.items():
            taken[name].append(seconds(ranges))
    whole = statistics.median(taken["whole"])
    for name, found in taken.items():
        median = statistics.median(found)
        print(f"{name}: {median:.2f} s, {median / whole:.2f} times the whole")


if __name__ == "__main__":
    main()
