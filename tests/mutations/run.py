"""Apply mistakes to a copy of the sources one by one and show which test notices each.

    python tests/mutations/run.py [--only NAME ...]

Prints a table; exits with 1 if a mutation survives, if the tests fail on the unchanged sources, or if the
text that a mutation replaces is no longer there.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from mutations import MUTATIONS, PACKAGE, Mutation

ROOT = Path(__file__).resolve().parents[2]


def copy_sources(target: Path) -> None:
    """The package, what stands beside it, the tests and the settings of pytest, without byte code."""
    for folder in ("src", "tests", "reproduction"):
        shutil.copytree(ROOT / folder, target / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", target)


def run_tests(copy: Path, tests: Sequence[str]) -> tuple[int, str, float]:
    """Exit status of pytest, its output and the seconds it took; stops at the first failure."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy / "src"),
        # Byte code is matched to a source by its time and size, which a mutation may leave as they are.
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-rfE",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    start = time.perf_counter()
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr, time.perf_counter() - start


def catcher(output: str) -> str:
    """The test that failed first."""
    found = re.search(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", output, re.MULTILINE)
    return found.group(1).removeprefix("tests/") if found else ""


def check_unchanged(copy: Path, mutations: Sequence[Mutation]) -> bool:
    """Whether the copy is what gets imported and the tests pass on it."""
    probe = "import equipoise; print(equipoise.__file__)"
    where = subprocess.run(
        [sys.executable, "-c", probe],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    if not Path(where).resolve().is_relative_to(copy):
        print(f"the tests would import {where}, not the copy in {copy}", file=sys.stderr)
        return False
    tests = list(dict.fromkeys(test for mutation in mutations for test in mutation.tests))
    status, output, seconds = run_tests(copy, tests)
    print(f"unchanged sources: {'passed' if status == 0 else 'FAILED'} in {seconds:.0f} s", flush=True)
    if status != 0:
        print(output, file=sys.stderr)
    return status == 0


def run(mutations: Sequence[Mutation]) -> int:
    """The number of mutations that no test notices, or that could not be tried."""
    width = max(len(mutation.name) for mutation in mutations)
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder).resolve()
        copy_sources(copy)
        if not check_unchanged(copy, mutations):
            return len(mutations)
        print(f"{'mutation':{width}}  seconds  caught by", flush=True)
        for mutation in mutations:
            file = copy / PACKAGE / mutation.file
            text = file.read_text()
            file.write_text(mutation.apply(text))
            try:
                status, output, seconds = run_tests(copy, mutation.tests)
            finally:
                file.write_text(text)
            name = catcher(output)
            if status == 1 and name:
                verdict = name
            else:  # 0: survived; others: pytest could not run, which proves nothing
                bad += 1
                verdict = "SURVIVED" if status == 0 else f"NOT TRIED (pytest ended with {status})"
                if status != 0:
                    print(output, file=sys.stderr)
            print(f"{mutation.name:{width}}  {seconds:7.1f}  {verdict}", flush=True)
    return bad


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", metavar="NAME", nargs="+", help="mutations whose name contains one of these"
    )
    only = parser.parse_args().only
    chosen = [
        mutation for mutation in MUTATIONS if only is None or any(name in mutation.name for name in only)
    ]
    if not chosen:
        print(f"no mutation is named like {only!r}; there are:", *(m.name for m in MUTATIONS), sep="\n  ")
        return 1
    bad = run(chosen)
    print(f"{len(chosen) - bad} of {len(chosen)} mutations caught")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
