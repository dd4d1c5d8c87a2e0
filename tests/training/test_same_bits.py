"""The bits of a training do not follow how many processes share its microbatches, nor their order."""

import os
from pathlib import Path

import pytest
import torch
from small_problems import RECORDS, network, records, training

import equipoise as eq
from equipoise._dtensor import all_values
from equipoise.methods import ReleasedQuantile
from tests.shared_fixtures import in_processes

NOISE = {"noise_multiplier": 1.0}
METHODS = {
    "dp-sgd": lambda: eq.DPSGD(clip_norm=ReleasedQuantile(initial=0.5), **NOISE),
    "dice-sgd": lambda: eq.DiceSGD(clip_norm=0.5, **NOISE),
    "dp-mf": lambda: eq.DPMF(clip_norm=0.5, bands=2, **NOISE),
}
HARDENED = {"hardened": lambda: eq.DPSGD(clip_norm=0.5, **NOISE)}
#: 60 records in microbatches of 5 and draws of all: parts of 30 and of 15 begin and end with microbatches.
MICRO_BATCH = 5


def trained(name: str, is_sharded: bool = False) -> torch.Tensor:
    model = network(dtype=torch.float64)  # float32 hides most of what rounds in sums
    if is_sharded:
        torch.distributed.fsdp.fully_shard(model)
    run = training(
        model,
        data=records(dtype=torch.float64),
        sampling=eq.FullBatch(RECORDS, 4),
        method=(METHODS | HARDENED)[name](),
        microbatch_size=MICRO_BATCH,
        hardened=name in HARDENED,
    )
    for _ in run:
        pass
    return torch.cat([all_values(parameter).flatten() for parameter in model.parameters()])


def work(rank: int, port: int, folder: str, count: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)
    }  # fmt: skip
    found = {name: trained(name) for name in METHODS | HARDENED}
    found["dp-sgd, sharded"] = trained("dp-sgd", True)
    torch.save(found, Path(folder) / f"found{rank}.pt")
    torch.distributed.destroy_process_group()


def two(rank: int, port: int, folder: str) -> None:
    work(rank, port, folder, 2)


def four(rank: int, port: int, folder: str) -> None:
    work(rank, port, folder, 4)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [two, four])
def test_processes_that_share_the_same_microbatches_give_the_bits_of_one(tmp_path, ranks):
    in_processes(ranks, tmp_path, {two: 2, four: 4}[ranks])
    alone = {name: trained(name) for name in METHODS | HARDENED}
    for name, values in torch.load(tmp_path / "found0.pt").items():
        assert torch.equal(values, alone[name.removesuffix(", sharded")]), name
