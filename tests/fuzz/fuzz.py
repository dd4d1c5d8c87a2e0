"""Feed mutated inputs to everything that reads files and messages, and count what happens.

    python tests/fuzz/fuzz.py --inputs 10000

Every input must be accepted or refused with an error that the library raises on purpose (see
`equipoise.cli`). An error from anywhere else, a program run, a write outside the input's folder or more than
ten seconds of processor time are failures; the exit code is 1 then.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # contrib, which is not installed
sys.path.insert(0, str(Path(__file__).parent))

from hypothesis import HealthCheck, Phase, given, seed, settings
from targets import Target, targets
from watching import Harm, watched

from equipoise.cli import is_taught

SECONDS = 10


class TooSlow(BaseException):
    """An input took too long."""


def _alarm(number: int, frame: FrameType | None) -> None:
    raise TooSlow(f"more than {SECONDS} s")


def feed(target: Target, value: Any) -> str:
    """ "accepted" or "refused".

    Raises:
        BaseException: what must not happen.
    """
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            warnings.catch_warnings(),
            watched(folder),
        ):
            warnings.simplefilter("ignore")
            target.feed(value, folder)
        return "accepted"
    except Exception as error:
        if not is_taught(error, ("equipoise", "contrib")):
            raise
        return "refused"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def fuzz(target: Target, count: int, start: int) -> tuple[Counter[str], list[str]]:
    """Feed `count` inputs; (what became of them, the failures in words)."""
    counts: Counter[str] = Counter()
    failures: dict[str, str] = {}

    @seed(start)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(target.inputs)
    def one(value: Any) -> None:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            counts[feed(target, value)] += 1
        except (Exception, Harm, TooSlow) as error:
            counts["failed"] += 1
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}"
            failures.setdefault(where, f"{where}: {error!s:.200} | input: {value!r:.300}")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    one()
    return counts, list(failures.values())


def main() -> int:
    """Fuzz all targets and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--inputs", type=int, default=10_000, help="how many in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of a target's name")
    given_words = parser.parse_args()
    signal.signal(signal.SIGPROF, _alarm)
    chosen = [target for target in targets() if given_words.only in target.name]
    whole = sum(target.share for target in chosen)
    total: Counter[str] = Counter()
    failures = []
    print(f"{'':34}{'inputs':>8}{'accepted':>10}{'refused':>9}{'failed':>8}{'seconds':>9}")
    for target in chosen:
        began = time.perf_counter()
        counts, found = fuzz(target, -(-given_words.inputs * target.share // whole), given_words.seed)
        failures += [f"{target.name}: {line}" for line in found]
        total += counts
        _row(target.name, counts, time.perf_counter() - began)
    _row("all", total, None)
    print("\n".join(failures))
    return 1 if failures else 0


def _row(name: str, counts: Counter[str], seconds: float | None) -> None:
    numbers = f"{counts['accepted']:10,}{counts['refused']:9,}{counts['failed']:8,}"
    print(
        f"{name:34}{counts.total():8,}{numbers}" + ("" if seconds is None else f"{seconds:9.1f}"), flush=True
    )


if __name__ == "__main__":
    sys.exit(main())
