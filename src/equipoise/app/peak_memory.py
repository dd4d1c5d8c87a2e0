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
    """The highest of the peaks that were noted: of the device on CUDA, of the process otherwise.

    Args:
        device: where the work is done.

    Attributes:
        highest: bytes above what was held at the start; None before the first note, and where the system
            cannot tell.

    Example:
        >>> peak = PeakMemory(torch.device("cpu"))
        >>> block = torch.ones(2**24)
        >>> peak.note()
        >>> peak.highest is None or peak.highest > 2**25
        True
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.highest: int | None = None
        gc.collect()
        if device.type != "cuda":
            # what the allocator keeps of earlier work would hide what this one needs
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).malloc_trim(0)
        self._can_tell = self.restart()
        self._before = self._held() if self._can_tell else None

    def restart(self) -> bool:
        """Forget the peak so far, unless noted; what was held at the start stays the zero."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return True
        try:
            _CLEAR.write_text("5")
        except OSError:
            return False
        return True

    def note(self) -> None:
        """Take the peak since the start or the last restart into account."""
        if self._before is None:
            return
        if self._device.type == "cuda":
            peak: int | None = torch.cuda.max_memory_allocated(self._device)
        else:
            peak = _read("VmHWM")
        if peak is not None:
            self.highest = max(self.highest or 0, peak - self._before)

    def _held(self) -> int | None:
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return _read("VmRSS")


def _read(name: str) -> int | None:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None
