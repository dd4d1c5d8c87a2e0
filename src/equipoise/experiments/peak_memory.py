"""The most memory that a piece of work held beyond what was held before it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from pathlib import Path

import torch

__all__ = ["PeakMemory"]

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """Measures the peak between `__init__` and `read`: of the device on CUDA, of the process otherwise.

    Args:
        device: where the work is done.

    Example:
        >>> peak = PeakMemory(torch.device("cpu"))
        >>> block = torch.ones(2**24)
        >>> peak.read() is None or peak.read() > 2**25
        True
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before: int | None = torch.cuda.memory_allocated(device)
            return
        # what the allocator keeps of earlier work would hide what this one needs
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        try:
            _CLEAR.write_text("5")
            self._before = _read("VmRSS")
        except OSError:
            self._before = None

    def read(self) -> int | None:
        """Bytes at the peak, minus those held at the start; None where the system cannot tell."""
        if self._before is None:
            return None
        if self._device.type == "cuda":
            return max(0, torch.cuda.max_memory_allocated(self._device) - self._before)
        peak = _read("VmHWM")
        return None if peak is None else max(0, peak - self._before)


def _read(name: str) -> int | None:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None
