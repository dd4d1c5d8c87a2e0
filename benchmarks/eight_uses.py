"""Eight uses as newcomers write them: the plain script, the same with equipoise, and the same with Opacus.

    python benchmarks/eight_uses.py --folder FOLDER [--only table shell ...] [--out FILE]

FOLDER has the subfolders `adult`, `fashion-mnist`, `mnist` and `sst2` with the original files. Needs the
extras hf, lightning and peers, and pandas. The scripts lie in `benchmarks/uses`, one folder a use. Each runs
in a process of its own with one thread, one after the other. CPU seconds are those of the whole process, from
its imports to the accuracy on the test records. Lines are those that `diff` adds and takes away between the
plain script and the private one. Noise is fresh in every run, so accuracy moves by some tenths of a point.
"""

from __future__ import annotations

import argparse
import csv
import difflib
import gzip
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

USES = Path(__file__).parent / "uses"
COMPARED = {
    "plain_script": "fashion-mnist",
    "hugging_face": "sst2",
    "lightning_module": "mnist",
    "table": "adult",
    "own_method": "mnist",
    "consortium": "mnist",
}
KINDS = ("plain", "with_equipoise", "with_opacus")
COLUMNS = [
    "age", "workclass", "fnlwgt", "education", "education-num", "marital-status",
    "occupation", "relationship", "race", "sex", "capital-gain",
    "capital-loss", "hours-per-week", "native-country", "income",
]  # fmt: skip


def called(command: list[str], folder: Path, stop_after: float | None = None) -> tuple[str, float, int]:
    """Standard output, CPU seconds, exit code; `stop_after` seconds it gets what Ctrl-C sends."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    if stop_after is not None:
        time.sleep(stop_after)
        process.send_signal(signal.SIGINT)
    output, errors = process.communicate()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode not in (0, 1, 130):
        raise SystemExit(f"{' '.join(command)} failed:\n{errors[-2000:]}")
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return output, seconds, process.returncode


def equipoise(
    folder: Path, *words: str, stop_after: float | None = None
) -> tuple[dict[str, Any], float, int]:
    """The JSON object of a command, its CPU seconds and its exit code."""
    command = [sys.executable, "-m", "equipoise", *words, "--json"]
    output, seconds, code = called(command, folder, stop_after)
    return json.loads(output), seconds, code


def lines_changed(use: str, kind: str) -> str:
    """Lines added and taken away; for the command line, lines written in all."""
    if use == "table" and kind == "with_equipoise":
        files = (USES / use / "people.schema.toml", USES / use / "with_equipoise.sh")
        count = sum(1 for file in files for line in file.read_text().split("\n") if line and line[0] != "#")
        return f"{count} in all"
    plain, private = ((USES / use / f"{k}.py").read_text().splitlines() for k in ("plain", kind))
    changes = [line[0] for line in difflib.ndiff(plain, private)]
    return f"+{changes.count('+')} / -{changes.count('-')}"


def write_tables(source: Path, folder: Path) -> None:
    """Adult as two CSV files with a header."""
    for part, name in (("data", "people.csv"), ("test", "held_out.csv")):
        text = gzip.decompress((source / f"adult.{part}.gz").read_bytes()).decode()
        rows = [[cell.strip(" .") for cell in line.split(",")] for line in text.splitlines() if ", " in line]
        with open(folder / name, "w", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *rows])
    shutil.copy(USES / "table" / "people.schema.toml", folder)


def compared(use: str, data: Path) -> dict[str, dict[str, Any]]:
    found = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if use == "table":
            write_tables(data, folder)
            data = folder
        for kind in KINDS:
            if use == "table" and kind == "with_equipoise":
                words = (USES / use / "with_equipoise.sh").read_text().splitlines()[-1].split()[1:]
                answer, seconds, _ = equipoise(folder, *words)
                result = {"accuracy": answer["accuracy"], "epsilon": answer["epsilon"]}
            else:
                command = [sys.executable, str(USES / use / f"{kind}.py"), str(data)]
                output, seconds, _ = called(command, folder)
                result = json.loads(output.splitlines()[-1])
            changed = "" if kind == "plain" else lines_changed(use, kind)
            found[kind] = {**result, "cpu_seconds": round(seconds, 1), "lines": changed}
            print(f"{use}, {kind}: {found[kind]}", file=sys.stderr, flush=True)
    return found


def officer(folder: Path) -> dict[str, Any]:
    """A run as published, read and checked by somebody else, and then with a smaller epsilon written in."""
    run, published = folder / "run", folder / "published"
    equipoise(folder, "train", "--data", "digits", "--run-dir", str(run))
    published.mkdir()
    for file in run.iterdir():
        if file.is_file():
            shutil.copy(file, published)
    _, seconds, code = equipoise(folder, "verify", str(published))
    path = published / "statement.json"
    statement = json.loads(path.read_text())
    edited = {**statement, "epsilon": statement["epsilon"] / 2}
    path.write_text(json.dumps(edited))
    _, _, after = equipoise(folder, "verify", str(published))
    return {
        "epsilon": statement["epsilon"],
        "assumptions named": len(statement["assumptions"]),
        "CPU seconds to verify": round(seconds, 1),
        "exit code": code,
        "exit code with epsilon halved": after,
    }


def shell(folder: Path) -> dict[str, Any]:
    """A run is stopped, resumed, used and exported."""
    run = str(folder / "run")
    words = ("train", "--data", "digits", "--epochs", "4000", "--run-dir", run)
    _, _, stopped = equipoise(folder, *words, stop_after=15.0)
    _, help_seconds, _ = called([sys.executable, "-m", "equipoise", "train", "--help"], folder)
    equipoise(folder, "resume", run, "--stop-fixed-beforehand")
    _, predict_seconds, _ = equipoise(folder, "predict", run, "--output", "classes.csv")
    equipoise(folder, "export", run, "--format", "safetensors")
    return {
        "exit code after Ctrl-C": stopped,
        "CPU seconds of --help": round(help_seconds, 1),
        "CPU seconds to predict": round(predict_seconds, 1),
        "rows predicted": len((folder / "classes.csv").read_text().splitlines()) - 1,
    }


def table(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    rows = [
        "| use | lines, equipoise | lines, Opacus | CPU s, plain | equipoise | Opacus "
        "| accuracy, plain | equipoise | Opacus |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for use, by in found.items():
        lines = [by[kind]["lines"] for kind in KINDS[1:]]
        seconds = [f"{by[kind]['cpu_seconds']:.0f}" for kind in KINDS]
        accuracy = [f"{100 * by[kind]['accuracy']:.1f}" for kind in KINDS]
        rows.append("| " + " | ".join([use.replace("_", " "), *lines, *seconds, *accuracy]) + " |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="with a subfolder for each data set")
    parser.add_argument("--only", nargs="+", choices=[*COMPARED, "officer", "shell"], help="of the uses")
    parser.add_argument("--out", type=Path, help="where the numbers go, as JSON")
    args = parser.parse_args()
    wanted = args.only or [*COMPARED, "officer", "shell"]
    found = {
        use: compared(use, (args.folder / data).resolve()) for use, data in COMPARED.items() if use in wanted
    }
    others = {}
    for use in (officer, shell):
        if use.__name__ in wanted:
            with tempfile.TemporaryDirectory() as place:
                others[use.__name__] = use(Path(place))
    if args.out:
        args.out.write_text(json.dumps({"compared": found, "others": others}, indent=1) + "\n")
    print(table(found))
    for name, facts in others.items():
        print(f"\n{name}: " + "; ".join(f"{key} {value}" for key, value in facts.items()))


if __name__ == "__main__":
    main()
