"""How many of the mistakes that mutmut plants in `privacy/` and in the proofs of provenance the tests notice.

mutmut changes one operator, number, argument or string of a function at a time: a mutant. `[tool.mutmut]` in
pyproject.toml names the sources and the tests that judge. Of mutants drawn at random, those that no test
noticed are printed, with those that compute the same as before and those that no test reaches. One that
changes nothing but the text of an error is left out, since no test pins sentences.

    python benchmarks/mutants.py                     # 300 mutants, an hour on one core
    python benchmarks/mutants.py 600 --seed 7        # others; `all` for all of them, which takes a day
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import io
import json
import random
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

from mutmut import __main__ as mutmut
from mutmut.stats import status_by_exit_code

NUMBER = re.compile(r"__mutmut_(\d+|orig)$")
CAUGHT = {"killed", "timeout", "segfault"}
RAISES = re.compile("error$|refuse$|forbidden$|^_validate")  # errors, and what takes the text of one


def is_text(node: ast.expr) -> bool:
    """Whether a message, or what a mutant puts in its place."""
    return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", 0), str | None)


def without_messages(function: str) -> str:
    """A function without the texts of the errors that it makes."""
    tree = ast.parse(function)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and RAISES.search(ast.unparse(node.func).lower()):
            node.args = [one for one in node.args if not is_text(one)]
    return ast.unparse(tree)


@cache
def functions(file: str) -> dict[str, str]:
    """The functions of a file with mutants by name, as source, in which all mutants have one name."""
    found = {}
    for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and NUMBER.search(node.name):
            name, node.name = node.name, NUMBER.sub("", node.name)
            found[name] = ast.unparse(node)
    return found


def planted() -> dict[str, tuple[str, str, str]]:
    """All mutants by name: the file, and the function before and after."""
    with contextlib.redirect_stdout(io.StringIO()):
        mutmut.copy_src_dir()
        mutmut.copy_also_copy_files()
        mutmut.create_mutants(1)
    found = {}
    for name, (file, _) in results().items():
        held, changed = functions(file), name.rpartition(".")[2]
        found[name] = (file, held[NUMBER.sub("__mutmut_orig", changed)], held[changed])
    return found


def results() -> dict[str, tuple[str, str]]:
    """The file and the status of each mutant by name."""
    return {
        name: (str(path)[: -len(".meta")], status_by_exit_code[code])
        for path in sorted(Path("mutants/src").rglob("*.meta"))
        for name, code in json.loads(path.read_text(encoding="utf-8"))["exit_code_by_key"].items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("count", nargs="?", default="300", help="how many mutants, or all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=1, help="processes")
    parser.add_argument("--least", type=float, default=0.0, help="exit code 1 below this share")
    given = parser.parse_args()
    shutil.rmtree("mutants", ignore_errors=True)
    mutants = planted()
    names = sorted(mutants)
    if given.count != "all":
        names = random.Random(given.seed).sample(names, int(given.count))
    judged = sorted(
        name for name in names if without_messages(mutants[name][1]) != without_messages(mutants[name][2])
    )
    with open("mutants/log", "w", encoding="utf-8") as log:
        command = [sys.executable, "-m", "mutmut", "run", "--max-children", str(given.at_once), *judged]
        subprocess.run(command, stdout=log, stderr=log, check=True)
    found, counts = results(), defaultdict(Counter)
    for name in judged:
        file, status = found[name]
        counts[file][status if status not in CAUGHT else "noticed"] += 1
        if status not in CAUGHT:
            before, after = (text.splitlines() for text in mutants[name][1:])
            lines = list(difflib.unified_diff(before, after, lineterm="", n=0))[2:]
            print(f"{name}: {status}", *(line for line in lines if line[:1] in "+-"), sep="\n    ")
    print("file,mutants,noticed,survived,reached by no test")
    for file, one in sorted(counts.items()):
        print(file, one.total(), one["noticed"], one["survived"], one["no tests"], sep=",")
    share = sum(one["noticed"] for one in counts.values()) / len(judged)
    print(f"{share:.1%} of {len(judged)} noticed; {len(names) - len(judged)} change an error's text alone")
    return int(share < given.least)


if __name__ == "__main__":
    sys.exit(main())
