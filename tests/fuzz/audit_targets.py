"""What reads the canaries of an audited run, and other files that only a data owner goes on with."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from mutating import NAMES, mutated_bytes, mutated_json, mutated_lines
from safetensors import torch as safetensors
from targets import Target, begun_run, command, file_of, home, resume, with_file

from equipoise.app.audits import finished_run as auditing
from equipoise.app.run_checks import settings_of_run
from equipoise.audit.canary_records import CANARIES_FILE, SCORES_FILE
from reproduction.result_cache import ResultCache

KINDS = ["far", "shape", "scalar", "type", "cut", "same", "drop", "nan", "flat"]


@functools.cache
def _audited_run() -> Path:
    """A tiny run with canaries, from the command line."""
    folder = home() / "audited"
    line = (
        "train --data digits --model logistic --noise-multiplier 2 --epochs 0.2 --canaries 8 --reproducible"
    )
    command(*line.split(), "--run-dir", str(folder))
    return folder


def _audit(folder: Path) -> None:
    found = auditing.audit_run(str(folder), settings_of_run(str(folder)))
    json.dumps(found, allow_nan=False)


def _without_figure(feed: Callable[[Any, Path], None]) -> Callable[[Any, Path], None]:
    """Half a second of drawing shows nothing about reading."""

    def quick(value: Any, folder: Path) -> None:
        kept, auditing.save_roc_figure = auditing.save_roc_figure, lambda *_: None
        try:
            feed(value, folder)
        finally:
            auditing.save_roc_figure = kept

    return quick


@st.composite
def _canaries(draw: Callable[..., Any]) -> bytes:
    """A canary file with broken bytes, or with tensors of other values, shapes and types."""
    good = file_of(_audited_run, CANARIES_FILE)
    if draw(st.integers(0, 3)) == 0:
        return draw(mutated_bytes([good]))
    tensors = safetensors.load(good)
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from(sorted(tensors)))
        value = tensors[name]
        change = draw(st.sampled_from(KINDS))
        if change == "far":
            value = value + 10**6 if value.dtype is not torch.bool else ~value
        elif change == "shape":
            value = torch.zeros(8, 3, 2, dtype=value.dtype)
        elif change == "scalar":
            value = torch.tensor(1)
        elif change == "type":
            value = value.to(draw(st.sampled_from([torch.float16, torch.int8, torch.bool, torch.complex64])))
        elif change == "cut":
            value = value[: draw(st.integers(0, 7))] if value.ndim else value
        elif change == "same":
            value = torch.zeros_like(value)
        elif change == "nan":
            value = torch.full(value.shape, float("nan"))
        elif change == "flat":
            value = value.flatten()
        tensors[name] = value.contiguous()
        if change == "drop" and len(tensors) > 1:
            del tensors[name]
    return safetensors.save(tensors)


def _resume_with_ledger(content: bytes, folder: Path) -> None:
    """Names of the ledger file that the folder brings along: one of them is the run's own journal."""
    run = shutil.copytree(begun_run(), folder / "run")
    (run / "private" / "ledger_file").write_bytes(content.replace(b"@", bytes(run / "private")))
    (folder / "other").write_text("a line of somebody else")
    try:
        resume(run)
    finally:
        assert (folder / "other").read_text() == "a line of somebody else"
        assert sorted(p.name for p in folder.iterdir()) == ["other", "run"]


_LEDGERS = st.sampled_from(
    [
        b"@/journal.jsonl",
        b"@/../../other",
        b"@/../../new/deep/journal",
        b"@/../../new",
        b"@",
        b"@/key",
        b"@/../statement.json",
        b"@/../config.json",
        b"/dev/zero",
        b"/dev/null",
        b"\xff\xfe",
        *(name.encode() for name in NAMES),
    ]
)


def _kept(content: bytes, folder: Path) -> None:
    (folder / "runs.jsonl").write_bytes(content)
    ResultCache(folder / "runs.jsonl").result({"seed": 1}, lambda: {"accuracy": 0.5})


@functools.cache
def _begun_with_metrics() -> Path:
    folder = shutil.copytree(begun_run(), home() / "begun-with-metrics")
    assert (folder / "metrics.jsonl").is_file()
    return folder


def audit_targets() -> tuple[Target, ...]:
    """All of this file."""
    scores = file_of(_audited_run, SCORES_FILE)
    kept = b'{"settings": {"seed": 0}, "result": {"accuracy": 0.9}}\n'
    return (
        Target(
            "audit: canaries",
            _canaries(),
            _without_figure(with_file(_audited_run, CANARIES_FILE, _audit)),
            150,
            file_of(_audited_run, CANARIES_FILE),
        ),
        Target(
            "audit: canary scores",
            mutated_json([scores]),
            _without_figure(with_file(_audited_run, SCORES_FILE, _audit)),
            100,
            scores,
        ),
        Target(
            "resume: metrics.jsonl",
            mutated_lines(file_of(_begun_with_metrics, "metrics.jsonl")),
            with_file(_begun_with_metrics, "metrics.jsonl", resume),
            200,
            file_of(_begun_with_metrics, "metrics.jsonl"),
        ),
        Target("resume: private/ledger_file", _LEDGERS, _resume_with_ledger, 60, b"@/journal.jsonl"),
        Target("kept results", mutated_lines(kept), _kept, 100, kept),
    )
