"""Small trainings of every kind whose bits, epsilons and journals a change of the sources must not move.

    python benchmarks/reference_runs.py --write FILE      # before a change
    python benchmarks/reference_runs.py --compare FILE    # after it; 1 if bits, epsilon or journal differ
    python benchmarks/reference_runs.py --compare FILE --only dice-sgd killed

`benchmarks/reference_runs.json` is such a file. It has, of each run: a digest of the published weights' bits,
and what these weights do on public records; epsilon; the assumptions of the statement; a digest of each field
of the journal, but names and digests; whether the folder verifies, with its private files and without. The
steps take so many times as long as plain ones of the same network. That is for information: the networks are
so small that most of it is the loop.

Bits belong to one processor and one version of torch, whose kernels round in their own way. On another they
are not compared: norm and loss must agree to 1e-4 then, and epsilon to 1e-9. The library times its kernels on
layers that are large enough, and takes the fastest one, which may be another one the next time. The layers
here are smaller than that. Half of the runs add several micro-batches.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import platform
import re
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import textwrap
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import equipoise as eq
from equipoise.data.augmentations import shift_and_flip
from equipoise.methods import (
    DPZO,
    AdaptiveRMS,
    JointWhitening,
    PublicRecords,
    PublicSubspace,
    ReleasedQuantile,
)

sys.path.insert(0, str(Path(__file__).parent))
from tasks import LanguageModel

RECORDS, PUBLIC, BATCH, STEPS = 1000, 100, 24, 30
USERS = RECORDS // 4
CHECKPOINT_EVERY, KILLED_AFTER = 5, 18  # three steps are booked, and in no checkpoint
TOLERANCE, EPSILON_TOLERANCE = 1e-4, 1e-9  # on another processor
#: Names and digests, of values that the weights' bits and the other fields tell of.
VOLATILE = {"run", "hash", "data", "answer", "joint", "owners", "fingerprint"}
COLUMNS = ("weights", "epsilon", "journal", "assumptions", "checks")


# --- networks and data
def mlp() -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 10))


def cnn() -> nn.Module:
    first = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2))
    second = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Tanh(), nn.MaxPool2d(2))
    return nn.Sequential(first, second, nn.Flatten(), nn.Dropout(0.2), nn.Linear(32, 10))


def language() -> nn.Module:
    return LanguageModel(width=8, layers=1, words=8, length=15)


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """One number per record: of its class, or the mean over its next words."""
    losses = F.cross_entropy(model(batch["input"]).transpose(1, -1), batch["label"], reduction="none")
    return losses.mean(1) if losses.ndim == 2 else losses


@functools.cache
def digits() -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Private records, public ones for methods that take some, and public ones to evaluate on."""
    found = eq.data.load("digits")
    train = dict(found.train.fields)
    parts = [slice(RECORDS), slice(RECORDS, RECORDS + PUBLIC)]
    private, public = ({name: values[part] for name, values in train.items()} for part in parts)
    return private, public, dict(found.test.fields)


def words(images: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Four by four pixels of eight shades, each of which tells the next."""
    shades = (F.avg_pool2d(images["input"], 2).flatten(1) * 2 + 4).long().clamp(0, 7)
    return {"input": shades[:, :-1].contiguous(), "label": shades[:, 1:].contiguous()}


class Items(torch.utils.data.Dataset):
    """Records that are read one by one."""

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[index] for name, values in digits()[0].items()}


def shifted(batch: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    return {**batch, "input": shift_and_flip(batch["input"], generator)}


# --- one training
def train(
    name: str,
    folder: Path,
    kill_after: int | None = None,
    resume: bool = False,
    model: nn.Module | None = None,
    **more: Any,
) -> tuple[nn.Module, float]:
    """Train and publish; the model, and the time of a step relative to a plain one."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    run = runs()[name]
    model = model or run.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    data = run.prepare(digits()[0])
    of_data = {"records": data, "microbatch_size": 40, **run.of_data}
    pieces = {"loss": loss, "data": eq.Data(**of_data)}
    if resume:
        training = eq.PrivateTraining.resume(
            folder, model, optimizer, run=eq.Run(scheduler=scheduler), **pieces
        )
    else:
        of_run = {"reproducible": True, "scheduler": scheduler, **run.of_run, **more}
        training = eq.PrivateTraining(
            model,
            optimizer,
            sampling=run.sampling,
            method=run.method,
            run=eq.Run(folder, **of_run),
            **pieces,
            **run.options,
        )
    seconds = []
    while training.steps_done < STEPS:
        began = time.process_time()
        step = training.take_step().step
        seconds.append(time.process_time() - began)
        if step == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        if step % CHECKPOINT_EVERY == 0:
            training.save_checkpoint()
    training.finish()
    return model, statistics.median(seconds) / plain_step(run)


def plain_step(run: Run) -> float:
    """Seconds of a step without privacy, on as many records as a draw is expected to have."""
    model = run.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    batch = {
        name: values[: int(run.sampling.expected_size)] for name, values in run.prepare(digits()[0]).items()
    }
    seconds = []
    for _ in range(STEPS):
        began = time.process_time()
        optimizer.zero_grad()
        loss(model, batch).mean().backward()
        optimizer.step()
        seconds.append(time.process_time() - began)
    return statistics.median(seconds)


# --- ways to make a run
def whole(name: str, folder: Path) -> dict[str, Any]:
    _, ratio = train(name, folder / "run")
    return described(name, folder / "run", ratio)


def killed(name: str, folder: Path) -> dict[str, Any]:
    """Killed between two checkpoints and resumed; it ends where the one ends that nothing interrupts."""
    process = multiprocessing.get_context("spawn").Process(
        target=train, args=(name, folder / "run", KILLED_AFTER)
    )
    process.start()
    process.join()
    train(name, folder / "run", resume=True)
    _, ratio = train(name, folder / "uninterrupted")
    found, other = (described(name, folder / run, ratio) for run in ("run", "uninterrupted"))
    parts = ("weights", "epsilon", "journal")
    checks = {f"{part} as uninterrupted": found[part] == other[part] for part in parts}
    found["checks"] |= {"was killed": process.exitcode == -signal.SIGKILL, **checks}
    return found


def rank(number: int, name: str, folder: Path, port: int) -> None:
    os.environ |= {
        "RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)
    }  # fmt: skip
    model, ratio = train(name, folder / "run")
    torch.save((model.state_dict(), ratio), folder / f"rank{number}.pt")
    torch.distributed.destroy_process_group()


def two_processes(name: str, folder: Path) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.start_processes(rank, (name, folder, port), nprocs=2, start_method="spawn")
    (first, ratio), (second, _) = (torch.load(folder / f"rank{number}.pt") for number in (0, 1))
    found = described(name, folder / "run", ratio)
    found["checks"]["one model"] = digest_of(first) == digest_of(second) == found["weights"]
    return found


def shared_journal(name: str, folder: Path) -> dict[str, Any]:
    """A second run goes on with the model of a first one, and pays for both; their keys are 1 and 2."""
    journal, keys = folder / "journal.jsonl", itertools.count(1)
    options = {"journal": journal, "reproducible": False}  # a public seed has no epsilon to add
    with mock.patch("os.urandom", lambda count: next(keys).to_bytes(count, "big")):
        model, _ = train(name, folder / "first", **options)
        _, ratio = train(name, folder / "run", model=model, **options)
    return described(name, folder / "run", ratio, journal)


# --- what is written of a run
def digest_of(values: Mapping[str, Tensor]) -> str:
    state = hashlib.sha256()
    for name, value in sorted(values.items()):
        state.update(f"{name} {value.dtype} {list(value.shape)};".encode())
        state.update(value.contiguous().numpy().tobytes())
    return state.hexdigest()[:32]


def journal_of(path: Path) -> dict[str, Any]:
    """Lines, releases, and a digest of what every field holds from line to line."""

    def rounded(number: str) -> float:
        return float(f"{float(number):.6g}")

    lines = [json.loads(line, parse_float=rounded) for line in path.read_text().splitlines()]
    lines = [line for line in lines if line["type"] != "snapshot"]  # a sum of the others, with a seal
    fields = {}
    for name in sorted(set().union(*lines) - VOLATILE):
        values = json.dumps([[line[name]] if name in line else [] for line in lines], sort_keys=True)
        fields[name] = hashlib.sha256(values.encode()).hexdigest()[:12]
    return {"lines": len(lines), "releases": sum(line["type"] == "release" for line in lines), **fields}


def described(name: str, folder: Path, ratio: float, journal: Path | None = None) -> dict[str, Any]:
    """What is written of the run in a folder."""
    run, statement = runs()[name], json.loads((folder / "statement.json").read_text())
    model = eq.load_model(run.model(), folder / "model.safetensors").double().eval()
    public = {
        name: values.double() if values.is_floating_point() else values
        for name, values in run.prepare(digits()[2]).items()
    }
    with torch.no_grad():
        right = model(public["input"]).argmax(-1) == public["label"]
        public_loss = loss(model, public).mean()
    published = folder.with_name("published")
    shutil.copytree(folder, published, ignore=shutil.ignore_patterns("private", "checkpoint"))
    folders = {"verifies": folder, "verifies without private files": published}
    checks = {what: eq.verify_run(one).consistent for what, one in folders.items()}
    shutil.rmtree(published)
    return {
        "weights": digest_of(load_file(folder / "model.safetensors")),
        "norm": float(torch.cat([p.detach().flatten() for p in model.parameters()]).norm()),
        "loss": float(public_loss),
        "accuracy": float(right.double().mean()),
        "epsilon": {str(one["delta"]): one["epsilon"] for one in [statement, *statement["epsilons"]]},
        "assumptions": statement["assumptions"],
        "journal": journal_of(journal or folder / "private" / "journal.jsonl"),
        "checks": {"guarantee": statement["guarantee"], **checks},
        "step ratio": round(ratio, 1),
    }


# --- the runs
@dataclass(frozen=True)
class Run:
    """A training, by what differs from DP-SGD of a small network on Poisson draws in one micro-batch."""

    method: eq.Method = eq.DPSGD(clip_norm=0.5, noise_multiplier=1.0)
    sampling: eq.privacy.Sampling = eq.Poisson(BATCH, RECORDS, STEPS)
    model: Callable[[], nn.Module] = mlp
    prepare: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = dict
    options: Mapping[str, Any] = field(default_factory=dict)
    of_data: Mapping[str, Any] = field(default_factory=dict)
    of_run: Mapping[str, Any] = field(default_factory=dict)
    way: Callable[[str, Path], dict[str, Any]] = whole


NOISE: dict[str, Any] = {"clip_norm": 0.5, "noise_multiplier": 1.0}
SLOTS, PARTS = eq.FixedEpochs(BATCH, RECORDS, STEPS), {"microbatch_size": 10}
OF_USERS = {"owner": torch.arange(RECORDS) // 4, "records_per_user": 3}


@functools.cache
def runs() -> dict[str, Run]:
    anchors = {"anchor_batch_size": 100, "anchor_noise_multiplier": 2.0}
    learned = eq.DPSGD(clip_norm=ReleasedQuantile(initial=0.5), noise_multiplier=1.0)
    subspace = PublicSubspace(PublicRecords(digits()[1]), dimension=4)
    exact = eq.WithoutReplacement(BATCH, RECORDS, STEPS)
    each, mean = eq.Users(**OF_USERS), eq.Users(**OF_USERS, rows="mean")
    return {
        "dp-sgd": Run(),
        "dp-sgd, budget": Run(
            eq.DPSGD(), options={"budget": eq.Budget(3.0, 1e-4)}, of_run={"ema_decay": 0.9}
        ),
        "joint whitening": Run(JointWhitening(**NOISE)),
        "dp-mf, slots": Run(eq.DPMF(bands=4, **NOISE), SLOTS, of_data=PARTS),
        "dp-mf, cyclic": Run(eq.DPMF(bands=4, **NOISE), eq.CyclicPoisson(BATCH, RECORDS, STEPS, bands=4)),
        "dice-sgd": Run(eq.DiceSGD(**NOISE), of_data=PARTS),
        "dc-dpsgd": Run(eq.DCDPSGD(**NOISE)),
        "dp-c4": Run(eq.DPC4(noise_multiplier=2.0, **anchors), of_data=PARTS),
        "pcdp-sgd": Run(eq.PCDPSGD(source=subspace, **NOISE)),
        "adaptive rms": Run(AdaptiveRMS(**NOISE), eq.TruncatedPoisson(BATCH, RECORDS, STEPS)),
        "learned threshold": Run(learned, of_data=PARTS),
        "dp-zo, full batch": Run(DPZO(clip_norm=1.0, noise_multiplier=20.0), eq.FullBatch(RECORDS, STEPS)),
        "replace one": Run(sampling=exact, options={"unit": eq.Record(relation="replace_one")}),
        "users, cap": Run(options={"unit": each}),
        "users, mean": Run(sampling=eq.Poisson(8, USERS, STEPS), options={"unit": mean}, of_data=PARTS),
        "cnn, dropout": Run(model=cnn, of_data=PARTS),
        "language model": Run(model=language, prepare=words, of_data=PARTS),
        "hardened": Run(of_run={"hardened": True}),
        "views": Run(model=cnn, of_data={"views": 2, "augmentation": shifted, **PARTS}),
        "items, workers": Run(of_data={"records": Items(), "workers": 2, **PARTS}),
        "killed": Run(learned, SLOTS, model=cnn, of_data=PARTS, way=killed),
        "two processes": Run(learned, SLOTS, of_data=PARTS, way=two_processes),
        "shared journal": Run(sampling=SLOTS, way=shared_journal),
    }


def made(name: str) -> dict[str, Any]:
    """A run, made in a folder that goes again; or why it failed."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a method fits this network badly
        try:
            return runs()[name].way(name, Path(folder))
        except Exception as error:
            traceback.print_exc()
            return {"failed": f"{type(error).__name__}: {error}"}


def machine() -> dict[str, str]:
    """What the bits belong to."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    named = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", text, re.MULTILINE))
    kind = torch.backends.cpu.get_cpu_capability()
    return {"processor": ", ".join([*named.values(), platform.machine(), kind]), "torch": torch.__version__}


# --- the comparison
def near(one: float | None, other: float | None, tolerance: float) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=tolerance)


def differences(before: dict, now: dict, same_machine: bool) -> dict[str, str]:
    """What differs, by column of the table; nothing of a column that is the same."""
    if "failed" in before or "failed" in now:
        return {column: "no run to compare" for column in COLUMNS if column != "checks"} | {
            "checks": f"failed before: {before.get('failed')}; now: {now.get('failed')}"
        }

    def changed(part: str, tolerance: float | None = None) -> list[str]:
        old, new = before[part], now[part]
        keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
        if tolerance is not None and old.keys() == new.keys():
            keys = [key for key in keys if not near(old[key], new[key], tolerance)]
        return [f"{key}: {old.get(key)} -> {new.get(key)}" for key in keys]

    summary = ("norm", "loss", "accuracy")
    if same_machine:
        moved = before["weights"] != now["weights"]
    else:
        moved = not all(near(before[key], now[key], TOLERANCE) for key in ("norm", "loss"))
    old, new = before["assumptions"], now["assumptions"]
    found = {
        "weights": [f"{key} {before[key]:.6g} -> {now[key]:.6g}" for key in summary if moved],
        "epsilon": changed("epsilon", 0.0 if same_machine else EPSILON_TOLERANCE),
        "journal": changed("journal"),
        "assumptions": [f"no more: {one}" for one in old if one not in new]
        + [f"new: {one}" for one in new if one not in old],
        "checks": changed("checks"),
    }
    return {column: "; ".join(lines) for column, lines in found.items() if lines}


def compare(before: dict, here: dict[str, str], now: Iterable[tuple[str, dict]]) -> bool:
    """Print the table; whether anything but assumptions differs.

    Args:
        before: what was written.
        here: this machine.
        now: the runs with their names.
    """
    same_machine, grave = before["machine"] == here, False
    if not same_machine:
        print(textwrap.fill(f"Bits are not compared: {before['machine']} before, {here} now.", 80))
    line = "{:18} {:12} {:7} {:7} {:11} {:7} {}".format
    print(line("run", *COLUMNS, "plain steps"))
    for name, run in now:
        old = before["runs"].get(name, {"failed": "there was no such run"})
        found = differences(old, run, same_machine)
        grave |= bool(found.keys() - {"assumptions"})
        words = {column: "differs" if column in found else "same" for column in COLUMNS}
        if not same_machine and "weights" not in found:
            words["weights"] = "not compared"
        print(line(name, *words.values(), f"{old.get('step ratio')}, {run.get('step ratio')}"), flush=True)
        for column, what in found.items():
            print(textwrap.fill(f"{column}: {what}", 80, initial_indent="  ", subsequent_indent="    "))
    return grave


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path, metavar="FILE", help="make the runs and write what they are")
    what.add_argument("--compare", type=Path, metavar="FILE", help="make them again and compare")
    parser.add_argument("--only", nargs="+", metavar="RUN", choices=runs(), help="not all of the runs")
    given = parser.parse_args()
    found = ((name, made(name)) for name in given.only or runs())
    if given.write:
        written = {"machine": machine(), "runs": dict(found)}
        given.write.write_text(json.dumps(written, indent=1) + "\n")
    else:
        sys.exit(compare(json.loads(given.compare.read_text()), machine(), found))


if __name__ == "__main__":
    main()
