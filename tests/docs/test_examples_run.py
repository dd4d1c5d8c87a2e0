"""The examples of README and docs run as they stand, page by page, in an empty folder.

Python blocks of a page share one namespace. A Python block whose first line is `# NAME.py` is a file of that
name. A block of `sh` that only calls `equipoise` runs in this process; others run in bash.
"""

import importlib.util
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from pages import PAGES, ROOT, Block, blocks, name_of

from equipoise.cli import main

WITH_BLOCKS = [page for page in PAGES if any(block.runs for block in blocks(page))]
QUICK = [page for page in WITH_BLOCKS if any(block.runs and not block.slow for block in blocks(page))]
SLOW = [page for page in WITH_BLOCKS if any(block.runs and block.slow for block in blocks(page))]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working folder, and the commands of this environment on the path."""
    commands = tmp_path / "bin"
    commands.mkdir()
    modules = {"equipoise": "-m equipoise", "python": "", "torchrun": "-m torch.distributed.run"}
    for name, words in modules.items():
        script = commands / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        script.chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    python_path = os.pathsep.join([str(work), str(ROOT / "src"), str(ROOT)])
    for name, value in {
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": python_path,
        "EQUIPOISE_CACHE": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("EQUIPOISE_DATA", raising=False)
    monkeypatch.chdir(work)
    monkeypatch.syspath_prepend(str(work))
    return work


def run_block(block: Block, page: Path, folder: Path, namespace: dict) -> None:
    first = block.text.split("\n", 1)[0].removeprefix("# ").split(",")[0].split(" ")[0]
    if block.language == "python" and first.endswith(".py"):
        (folder / first).write_text(block.text)
    elif block.language == "python":
        code = compile("\n" * (block.line - 1) + block.text, str(page), "exec", dont_inherit=True)
        exec(code, namespace)
    else:
        where = f"{name_of(page)}:{block.line}"
        lines = [shlex.split(line, comments=True) for line in block.text.replace("\\\n", " ").splitlines()]
        if all(
            words[:1] in ([], ["equipoise"]) for words in lines
        ):  # this process has PyTorch loaded already
            for words in filter(None, lines):
                assert main(words[1:]) == 0, f"{where}: {' '.join(words)}"
            return
        command = ["bash", "-euo", "pipefail", "-c", block.text]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
        assert done.returncode == 0, f"{where}\n{block.text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


#: Optional packages that the blocks of a page import.
NEEDED = {
    "docs/how-to/hugging-face.md": ("transformers", "peft", "accelerate"),
    "docs/how-to/lightning.md": ("lightning",),
}


def run_page(page: Path, folder: Path, slow: bool) -> None:
    for package in NEEDED.get(name_of(page), ()):
        pytest.importorskip(package, reason="needs an optional package")
    namespace: dict = {"__name__": "page"}
    lacking = set()
    for block in blocks(page):
        if block.needs and importlib.util.find_spec(block.needs) is None:
            lacking.add(block.needs)
        elif block.runs and (slow or not block.slow):
            run_block(block, page, folder, namespace)
    if lacking:
        pytest.skip(f"a block needs an optional package: {', '.join(sorted(lacking))}")


@pytest.mark.parametrize("page", QUICK, ids=name_of)
def test_a_page_runs(page, folder):
    run_page(page, folder, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", SLOW, ids=name_of)
def test_a_page_runs_with_its_slow_blocks(page, folder):
    run_page(page, folder, slow=True)
