"""The wish to stop a training, as SIGINT or SIGTERM tells it: the step under way is finished first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """The signal by which somebody asked to stop, SIGTERM if there was one; None if nobody did."""

    signal: int | None = None


@contextmanager
def catch_interrupt() -> Iterator[Interrupt]:
    """Inside, the first SIGINT or SIGTERM only sets `signal`; a second SIGINT raises KeyboardInterrupt.

    Outside the main thread, where Python allows no signal handlers, nothing is caught.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return

    def note(number: int, frame: FrameType | None) -> None:
        if interrupt.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        interrupt.signal = number

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
