"""Two processes compute what one computes; one of them keeps the ledger and writes the files."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import torch
import torch.multiprocessing as mp
from small_problems import network, parameters, records, training

import equipoise as eq


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
    torch.distributed.destroy_process_group()


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
    lines = (tmp_path / "run" / "private" / "journal.jsonl").read_text().splitlines()
    assert sum('"release"' in line for line in lines) == 15
