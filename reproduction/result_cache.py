"""Finished runs of a long experiment, one line of JSON each, so that it can be stopped and go on.

A run is known by its settings: changed settings are another run, and its old line stays unused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from equipoise._files import PathLike

__all__ = ["ResultCache", "processor_seconds"]


class ResultCache:
    """The finished runs in a file.

    Args:
        path: of the file; None keeps them in memory.

    Example:
        >>> kept = ResultCache(None)
        >>> [kept.result({"seed": 0}, lambda: {"accuracy": 0.9})["accuracy"] for _ in range(2)]
        [0.9, 0.9]
        >>> len(kept)
        1
    """

    def __init__(self, path: PathLike | None) -> None:
        self._path = None if path is None else Path(path)
        self._runs: dict[str, dict[str, Any]] = {}
        self._seconds: dict[str, float] = {}
        self.seconds_before = 0.0
        """Processor seconds of the results that an earlier process had found and this one asked for."""
        self._interrupted = False
        if self._path is not None and self._path.exists():
            for line in self._path.read_bytes().splitlines():
                try:
                    entry = json.loads(line)
                    key = _key(entry["settings"])
                    self._runs[key] = entry["result"]
                    self._seconds[key] = entry.get("processor_seconds", 0.0)
                except (ValueError, KeyError, TypeError, RecursionError):
                    continue  # the line that a kill cut off

    def __len__(self) -> int:
        """Number of finished runs."""
        return len(self._runs)

    def find(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """The result of a run, if it is finished."""
        key = _key(settings)
        self.seconds_before += self._seconds.pop(key, 0.0)
        return self._runs.get(key)

    def result(self, settings: Mapping[str, Any], run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result of the run with these settings: the kept one, or that of `run`, which is kept.

        Args:
            settings: plain values.
            run: answers plain values.
        """
        found = self.find(settings)
        if found is not None:
            return found
        began = processor_seconds()
        result = run()
        entry = {
            "settings": dict(settings),
            "result": result,
            "processor_seconds": round(processor_seconds() - began, 2),
        }
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # a kill may have cut the last line off: what follows begins a line of its own
            cut = self._path.exists() and self._path.read_bytes()[-1:] not in (b"", b"\n")
            with self._path.open("a", encoding="utf-8") as file:
                file.write("\n" * cut + json.dumps(entry) + "\n")
                file.flush()
                os.fsync(file.fileno())
        self._runs[_key(settings)] = result
        return result

    def finish(
        self,
        runs: Sequence[tuple[Mapping[str, Any], Callable[[], dict[str, Any]]]],
        progress: Callable[[int, int, str], None],
    ) -> list[dict[str, Any] | None]:
        """The results of many runs, in their order; an interrupt leaves the rest None, of later calls too.

        Args:
            runs: settings, and what answers the result.
            progress: progress(done, total, what).
        """
        try:
            for number, (settings, run) in enumerate(() if self._interrupted else runs):
                self.result(settings, run)
                progress(number + 1, len(runs), " ".join(str(value) for value in settings.values()))
        except KeyboardInterrupt:
            self._interrupted = True
        return [self.find(settings) for settings, _ in runs]


def processor_seconds() -> float:
    """What this process and the workers that it waited for have used so far, for itself and in the system."""
    return sum(os.times()[:4])


def _key(settings: Mapping[str, Any]) -> str:
    return json.dumps(dict(settings), sort_keys=True)
