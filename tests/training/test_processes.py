"""Two processes compute what one computes; one of them keeps the ledger and writes the files."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import torch
import torch.multiprocessing as mp
from small_problems import loss, network, parameters, records, training

import equipoise as eq
from equipoise.training.processes import ProcessError


def work(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    run = start(Path(folder) / "run")
    for _ in run:
        pass
    torch.save(parameters(run.model), Path(folder) / f"rank{rank}.pt")
    assert run.processes.count == 2
    if rank == 1:
        try:
            _ = run.desk.ledger
        except RuntimeError:
            (Path(folder) / "no-ledger").touch()
    try:
        run.processes.first(lambda: (_ for _ in ()).throw(ValueError("disk on fire")))
    except ValueError as error:
        (Path(folder) / f"error{rank}").write_text(str(error))
    run.finish()
    fail_alone(rank, Path(folder))
    torch.distributed.destroy_process_group()


def fail_alone(rank: int, folder: Path) -> None:
    """The second process fails in its third step; neither may wait for the other."""
    model = network()

    def failing(model, batch):
        if rank == 1 and steps == 2:
            raise NameError("secret-value")
        return loss(model, batch)

    steps = 0
    run = training(model, steps=6, batch=20, loss=failing, run_dir=folder / "failing")
    began = time.monotonic()
    try:
        for step in run:
            steps = step.step
    except Exception as error:
        (folder / f"failed{rank}").write_text(f"{type(error).__name__} {steps}: {error}")
    try:
        run.take_step()
    except ProcessError as error:
        (folder / f"afterwards{rank}").write_text(str(error))
    assert time.monotonic() - began < 60


def start(folder: Path) -> eq.PrivateTraining:
    method = eq.DPSGD(clip_norm=eq.ReleasedQuantile(initial=0.5), noise_multiplier=1.0)
    model = network(dtype=torch.float64)
    data = records(dtype=torch.float64)
    # Draws of about two records: some processes get none. Epsilon of this sampling has a closed form.
    sampling = eq.Unamplified(batch_size=2, population=60, steps=15)
    return training(model, data=data, sampling=sampling, method=method, run_dir=folder, micro_batch_size=3)


def test_two_processes_equal_one(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.start_processes(work, args=(port, str(tmp_path)), nprocs=2, start_method="spawn")
    alone = start(tmp_path / "alone")
    for _ in alone:
        pass
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    assert torch.equal(first, second)
    expect = parameters(alone.model)
    assert (first - expect).norm() / expect.norm() < 1e-10
    assert (tmp_path / "no-ledger").exists()
    assert [(tmp_path / f"error{rank}").read_text() for rank in (0, 1)] == ["disk on fire"] * 2
    failed = [(tmp_path / f"failed{rank}").read_text() for rank in (0, 1)]
    assert failed[1] == "NameError 2: secret-value"
    assert failed[0].startswith("ProcessError 2: process 1 (NameError) failed; its own message says why.")
    assert "secret-value" not in failed[0]
    for rank in (0, 1):
        assert "Start the processes again" in (tmp_path / f"afterwards{rank}").read_text()
    lines = (tmp_path / "run" / "private" / "journal.jsonl").read_text().splitlines()
    assert sum('"release"' in line for line in lines) == 15
