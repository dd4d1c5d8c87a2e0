"""What a run ends with when its machine does not cooperate, and what can be done then: a row per trial.

    python benchmarks/operations.py               # the table; some minutes
    python benchmarks/operations.py --only SIGTERM "full disk"

Each trial is a shell script in a folder of its own, where `$T` trains: a reproducible run, so that its bits
can be compared with those of a run that nothing befell, in `../whole`. Some need a mount or network namespace
of one's own (`unshare -rnm`) and are left out without. `--older COMMIT` begins the older run with the sources
of that commit.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Of another number of the engine: what a step computes was changed since.
OLDER = "7cafddee~1"

BEFORE = """
code() { echo "$1 $?" >> codes; }
T="equipoise train --data digits --epochs 40 --batch-size 128 --seed 1 --reproducible --run-dir"
afterwards() { equipoise resume "$1" > /dev/null 2> later; code resume; check "$1"; }
check() {
    equipoise verify "$1" > /dev/null 2>&1; code verify
    tail -c 19240 ../whole/model.safetensors > whole  # the 4,810 numbers, behind a header of any order
    tail -c 19240 "$1/model.safetensors" | cmp -s - whole; code bits
}
until_steps() {  # of the run, unless it has ended
    while [ "$(cat run/private/journal.jsonl 2>/dev/null | wc -l)" -lt "$1" ]; do
        kill -0 $pid 2>/dev/null || return 0
        sleep 0.05
    done
}
"""

#: Name -> what is done, and whether it needs namespaces.
TRIALS: dict[str, tuple[str, bool]] = {
    "SIGTERM": (
        "$T run > out 2> error & pid=$!; until_steps 20; kill -TERM $pid; wait $pid; code end; "
        "afterwards run",
        False,
    ),
    "SIGKILL": (
        "$T run > out 2> error & pid=$!; until_steps 20; kill -KILL $pid; wait $pid; code end; "
        "afterwards run",
        False,
    ),
    "full disk": (
        "mkdir small; mount -t tmpfs -o size=120k tmpfs small; $T small/run > out 2> error; code end; "
        "mount -o remount,size=64m small; afterwards small/run",
        True,
    ),
    "files of at most 60 kB": (
        "(ulimit -f 120; $T run > out 2> error); code end; afterwards run",
        False,
    ),
    "journal cut in a line": (
        "$T run > out 2>&1 & pid=$!; until_steps 20; kill -KILL $pid; wait $pid 2> /dev/null; "
        "truncate -s -20 run/private/journal.jsonl; equipoise resume run > out 2> error; code end; check run",
        False,
    ),
    "second writer": (
        "$T run > out 2>&1 & pid=$!; until_steps 20; kill -STOP $pid; equipoise resume run > out2 2> error; "
        "code end; kill -CONT $pid; wait $pid; code 'the first one ends'; check run",
        False,
    ),
    "read-only run folder": (
        "mkdir kept; mount --bind kept kept; mount -o remount,bind,ro kept; $T kept/run > out 2> error; "
        "code end",
        True,
    ),
    "no network": ("$T run > out 2> error; code end; check run", True),
    "no HOME": ("env -u HOME $T run > out 2> error; code end; check run", False),
    "TMPDIR of 64 kB": (
        "mkdir t; mount -t tmpfs -o size=64k tmpfs t; TMPDIR=$PWD/t $T run > out 2> error; code end; "
        "check run",
        True,
    ),
    "no TMPDIR": ("TMPDIR=$PWD/none $T run > out 2> error; code end; check run", False),
    "clock jumps back an hour": (
        "mkdir p; cp ../sitecustomize.py p; PYTHONPATH=p:$PYTHONPATH $T run > out 2> error; "
        "code end; check run",
        False,
    ),
    "key rotation": (
        "for k in old new; do openssl genpkey -algorithm ed25519 -out $k.pem 2> /dev/null; "
        "openssl pkey -in $k.pem -pubout -out $k.pub; done; cat old.pub new.pub > both.pub; "
        "$T run > out 2>&1; "
        "equipoise sign run --key old.pem > out 2> error; code end; "
        "equipoise verify run --key both.pub > out; code 'verify by both'; "
        "equipoise sign run --key new.pem > out; code 'sign anew'; "
        "equipoise verify run --key both.pub > out; code 'verify by both'; "
        "equipoise verify run --key old.pub > out; code 'verify by the old'",
        False,
    ),
    "run folder of an older engine": (
        "mkdir src; git -C $ROOT archive $OLDER src | tar x; "
        "(export PYTHONPATH=$PWD/src; $T run > out 2>&1 & pid=$!; until_steps 20; kill -KILL $pid); sleep 1; "
        "equipoise resume run > out 2> error; code end; equipoise verify run > out 2>&1; code verify; "
        "PYTHONPATH=$PWD/src equipoise resume run > out 2>&1; code 'resume by its version'; "
        "equipoise verify run > out 2>&1; code verify",
        False,
    ),
    "verify, and whether it loads torch": (
        'cp -r ../whole run; python -c "import atexit, runpy, sys, time; '
        "said = lambda: print(f'{time.process_time():.2f} s of processor time', 'torch' in sys.modules, "
        "file=sys.stderr); "
        "atexit.register(said); sys.argv = ['verify', 'run']; "
        "runpy.run_module('equipoise.statements.verify', run_name='__main__')\" > out 2> error; code end",
        False,
    ),
}

JUMP = """
import time

_time, _calls = time.time, 0


def jumping():
    global _calls
    _calls += 1
    return _time() - (3600 if _calls > 40 else 0)


time.time = jumping
"""


def shown(folder: Path, name: str) -> str:
    """A row of the table."""
    codes = [line.rpartition(" ") for line in (folder / "codes").read_text().splitlines()]
    found = [(what, int(code)) for what, _, code in codes]
    ended = {137: "137 (SIGKILL)", 143: "143 (SIGTERM)"}.get(found[0][1], str(found[0][1]))
    words = {"bits": ("same bits", "other bits"), "verify": ("consistent", "not consistent")}
    later = [
        "no statement yet"
        if (what, code) == ("verify", 2)
        else words.get(what, (what, f"{what}: {code}"))[code != 0]
        for what, code in found[1:]
    ]
    said = [one.strip() for one in (folder / "error").read_text().splitlines() if one.strip()]
    begins = [i for i, one in enumerate(said) if one.startswith("equipoise:")] or [max(0, len(said) - 1)]
    last = " ".join(said[begins[-1] :])
    message = last.removeprefix("equipoise:").strip().replace(str(folder) + "/", "")[:150]
    return f"| {name} | {ended} | {message if found[0][1] or 'torch' in name else ''} | {', '.join(later)} |"


def main() -> None:
    """Run the trials and print their rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*", choices=TRIALS, default=list(TRIALS))
    parser.add_argument("--older", default=OLDER)
    given = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="operations"))
    programs = place / "bin"
    programs.mkdir()
    (programs / "equipoise").write_text(f'#!/bin/sh\nexec {sys.executable} -m equipoise "$@"\n')
    (programs / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    own = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
    environment = os.environ | own | {"ROOT": str(ROOT), "OLDER": given.older, "OMP_NUM_THREADS": "1"}
    (place / "sitecustomize.py").write_text(JUMP)
    namespaces = subprocess.run(["unshare", "-rnm", "true"], check=False, capture_output=True).returncode == 0

    def run(name: str, script: str, is_apart: bool = False) -> Path:
        folder = place / name.replace(" ", "-")
        folder.mkdir()
        words = ["unshare", "-rnm"] if is_apart else []
        subprocess.run([*words, "sh", "-c", BEFORE + script], cwd=folder, env=environment, check=False)
        return folder

    whole = run("undisturbed", "$T ../whole > out 2> error; code end")
    print("| | exit code | last words | then |\n|---|--:|---|---|", flush=True)
    print(f"| nothing | {(whole / 'codes').read_text().split()[-1]} | | |")
    for name in given.only:
        script, needs = TRIALS[name]
        if needs and not namespaces:
            print(f"| {name} | left out: no namespaces | | |", flush=True)
            continue
        print(shown(run(name, script, needs), name), flush=True)
    shutil.rmtree(place)


if __name__ == "__main__":
    main()
