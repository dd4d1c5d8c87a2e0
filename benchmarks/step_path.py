"""The way of one DP-SGD step through the package: how many files it passes, and how many Python calls.

The third step of `equipoise train --data digits`, in so few that each computes epsilon, runs under
`sys.setprofile`. Counted are calls of functions whose source lies in the package, resumed generators
included, once with the computation of epsilon and once without it. The count is the same in every run. The
way lists the functions in the order of their first call.

    python benchmarks/step_path.py            # the table
    python benchmarks/step_path.py --way      # and the way
    python benchmarks/step_path.py --check    # exit code 1 where the step is longer than its limits
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import io
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import equipoise

FILES, CALLS = 46, 470  # the limits of a step without accounting; the aim is 20 and 300
# One forward holds any draw: its number follows neither the secret draw nor what memory is free.
FEW = ("--epochs", "5")
WHOLE = ("--micro-batch-size", "1438")
PACKAGE = str(Path(equipoise.__file__).parent) + "/"
ACCOUNTING = "progress"  # the ledger's function that computes epsilon so far


class Measured(BaseException):
    """The step was measured: the training ends here."""


@dataclass
class Path_:
    """What one step passed.

    Attributes:
        calls: (file, function) -> number of calls, in the order of the first call.
        depths: (file, function) -> depth of the first call.
        accounting: how many of the calls computed epsilon.
    """

    calls: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)
    depths: dict[tuple[str, str], int] = field(default_factory=dict)
    accounting: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)

    def without_accounting(self) -> collections.Counter[tuple[str, str]]:
        return self.calls - self.accounting


def record(run: Any) -> Path_:
    """Run a function and note what it passes."""
    found = Path_()
    depth, inside = 0, 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal depth, inside
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(PACKAGE):
            return
        if event == "return":
            depth -= 1
            inside -= inside > 0
            return
        key = (code.co_filename.removeprefix(PACKAGE), code.co_qualname)
        found.calls[key] += 1
        found.depths.setdefault(key, depth)
        if inside or (code.co_name == ACCOUNTING and "privacy/ledger" in key[0]):
            found.accounting[key] += 1
            inside += 1
        depth += 1

    gc.collect()
    gc.disable()  # what is freed within the step may be of anybody, and may run code of the package
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found


def third_step(arguments: list[str]) -> Path_:
    """The way of the third step of `equipoise train` with these arguments, epsilon computed in it."""
    from typer.main import get_command

    from equipoise.cli import app
    from equipoise.training import PrivateTraining

    take_step = PrivateTraining.take_step
    found: list[Path_] = []

    def measured(training: PrivateTraining) -> Any:
        if training.steps_done < 2:
            return take_step(training)
        found.append(record(lambda: take_step(training)))
        raise Measured

    PrivateTraining.take_step = measured  # type: ignore[method-assign]
    screen = io.StringIO()
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(screen):
            words = ["train", "--data", "digits", "--run-dir", f"{folder}/run", *FEW, *WHOLE, *arguments]
            with contextlib.suppress(Measured), contextlib.redirect_stdout(screen):
                get_command(app)(words, standalone_mode=False)
    finally:
        PrivateTraining.take_step = take_step  # type: ignore[method-assign]
    return found[0]


def table(path: Path_) -> str:
    lines = []
    for title, calls in (
        ("with accounting", path.calls),
        ("without accounting", path.without_accounting()),
    ):
        files = {file for file, _ in calls}
        lines.append(
            f"{title:20} {len(files):3} files {len(calls):4} functions {sum(calls.values()):6,} calls "
            f"{max(path.depths[key] for key in calls):3} deep"
        )
    by_file: collections.Counter[str] = collections.Counter()
    for (file, _), count in path.without_accounting().items():
        by_file[file] += count
    lines += ["", *(f"{count:6} {file}" for file, count in by_file.most_common())]
    return "\n".join(lines)


def way(path: Path_) -> str:
    calls = path.without_accounting()
    return "\n".join(
        f"{calls[key]:5} {'  ' * path.depths[key]}{key[0].removesuffix('.py')}: {key[1]}"
        for key in path.calls
        if key in calls
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--way", action="store_true", help="print every function in the order of the way")
    parser.add_argument("--check", action="store_true", help="fail where the step is longer than its limits")
    parser.add_argument("options", nargs="*", help="further arguments of `equipoise train`")
    arguments = parser.parse_args()
    path = third_step(arguments.options)
    print(table(path))
    if arguments.way:
        print("", way(path), sep="\n")
    calls = path.without_accounting()
    files = {file for file, _ in calls}
    if arguments.check and (len(files) > FILES or sum(calls.values()) > CALLS):
        sys.exit(f"the step passes {len(files)} files and {sum(calls.values())} calls; {FILES} and {CALLS}")


if __name__ == "__main__":
    main()
