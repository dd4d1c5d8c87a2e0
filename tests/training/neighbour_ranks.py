"""Two processes on neighbouring data sets, and on data that are not the same in both."""

import functools
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sharded_ranks import NOISE, cut, dropped_layers, layers, sharded
from small_problems import RECORDS, OnDemand, records, training
from test_processes import join_group
from torch import Tensor, nn

import equipoise as eq
from equipoise._dtensor import all_values
from equipoise.distributed.shared_ledger import SharedLedger
from equipoise.gradients.capture.sharded import found_by_any, note_sharding
from equipoise.privacy import Ledger
from equipoise.privacy.private import unwrap

HOW = ("whole", "sharded", "cut")
#: What is trained, and which record is missing from the neighbour. Where records share random numbers, those
#: before the missing one stay where they are; elsewhere all behind it move up, some into the other process.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "one sum": ({}, 0),
    "two sums": ({"method": eq.DiceSGD(clip_norm=0.5, noise_multiplier=1.0)}, 7),
    "shared numbers": ({"loss": dropped_layers}, RECORDS - 1),
}


def built(how: str) -> nn.Module:
    model = layers()
    return model if how == "whole" else {"sharded": sharded, "cut": cut}[how](model)


def without(missing: int | None) -> dict[str, Tensor]:
    rows = torch.arange(RECORDS) != (RECORDS if missing is None else missing)
    return {name: values[rows] for name, values in records(dtype=torch.float64).items()}


def heard(run: Callable[[], object]) -> list[dict[str, Any]]:
    """The raw sums of each release, their bounds and their noise."""
    found: list[dict[str, Any]] = []
    kind: Any = SharedLedger if dist.is_initialized() else Ledger
    own = kind.release

    def flat(tensors: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([all_values(unwrap(value)).double().flatten() for value in tensors.values()])

    def release(self: Any, draw: Any, sums: Any, checks: Any = ()) -> Any:
        raws = {name: flat(one.value).clone() for name, one in sums.items()}
        released = own(self, draw, sums, checks)
        for name, raw in raws.items():
            noise = flat(released[name]) - raw
            found.append({"raw": raw, "noise": noise, "bound": sums[name].add_remove})
        return released

    kind.release = release
    try:
        run()
    finally:
        kind.release = own
    return found


@functools.cache
def sums(name: str, how: str, missing: bool) -> list[dict[str, Any]]:
    """Of a step."""
    options, record = CASES[name]
    run = training(
        built(how),
        data=without(record if missing else None),
        sampling=eq.FullBatch(RECORDS, 1),
        microbatch_size=14,
        **({"method": eq.DPSGD(**NOISE)} | options),
    )
    return heard(run.take_step)


class Broken(OnDemand):
    """One of its records can be read in one process only."""

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        if i == 0 and dist.get_rank() == 1:
            raise OSError("no such file")
        return super().__getitem__(i)


def refused(how: str, rank: int) -> dict[str, str]:
    """What is said where the processes have other data."""
    data = records(dtype=torch.float64)
    turned = {name: values.flip(0) if rank else values for name, values in data.items()}
    last = {name: values.clone() for name, values in data.items()}
    last["input"][-1] += rank
    given: dict[str, dict[str, Any]] = {
        "another order": {"data": turned},
        "another order on demand": {"data": OnDemand(turned)},
        "one other record": {"data": last},
        "fewer": {"data": {name: values[: RECORDS - rank] for name, values in data.items()}},
        "unreadable": {"data": Broken(data)},
        "owner": {
            "data": data,
            "owner": torch.arange(RECORDS).div(2 + rank, rounding_mode="floor"),
            "unit": "user",
            "records_per_user": 1,
        },
    }
    if how != "whole":  # they differ in who waits for whom
        given = {name: given[name] for name in ("another order on demand", "unreadable")}
    said = {}
    for name, options in given.items():
        try:
            training(built(how), **options)
            said[name] = "nothing"
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def work(rank: int, port: int, folder: str) -> None:
    join_group(rank, port)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found: dict[str, Any] = {
        (name, how, missing): sums(name, how, missing)
        for name in CASES
        for how in HOW
        for missing in (False, True)
    }
    found |= {("refused", how): refused(how, rank) for how in HOW}
    for how in HOW[1:]:
        model = built(how)
        note_sharding(model)
        found["any", how] = found_by_any(model, {"a name": "a reason"} if rank else {})
    torch.save(found, Path(folder) / f"found{rank}.pt")
    dist.destroy_process_group()
