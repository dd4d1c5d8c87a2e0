"""Two processes compute what one computes; one of them keeps the ledger and writes the files."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from small_problems import (
    RECORDS,
    OnDemand,
    loss,
    network,
    parameters,
    records,
    releases,
    training,
    updates_of_users,
    weighted_loss,
    with_overflow,
)

import equipoise as eq
from equipoise._dtensor import all_values
from equipoise.distributed.shared_ledger import own_ledger
from equipoise.methods import (
    PublicRecords,
    PublicSubspace,
    TopShare,
)
from equipoise.statements.assumptions import Assumption
from equipoise.training import step
from tests.shared_fixtures import in_processes

#: What looks at the parameters, with its arguments.
CALLS = {"take_step": (), "finish": (), "save_checkpoint": (), "evaluate": (lambda model: 1.0,)}


def join_group(rank: int, port: int, count: int = 2) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def work(rank: int, port: int, folder: str) -> None:
    join_group(rank, port)
    run = start(Path(folder) / "run")
    next(iter(run))
    said_by_one(rank, run)
    list(run)
    torch.save(parameters(run.model), Path(folder) / f"rank{rank}.pt")
    assert run.processes.count == 2
    if rank == 1:
        with pytest.raises(RuntimeError):
            own_ledger(run.ledger)
    with pytest.raises(ValueError, match="disk on fire"):
        run.processes.first(lambda: (_ for _ in ()).throw(ValueError("disk on fire")))
    run.finish()
    assert run.statement().releases[0]["used"] == 15  # on every process now
    assert Assumption.TRUSTED in run.statement().assumptions  # the second one's data
    fail_alone(rank, Path(folder))
    for call in CALLS:
        move_alone(rank, Path(folder), call)
    write_alone(rank, Path(folder))
    torch.save(read_apart(rank, Path(folder)), Path(folder) / f"read{rank}.pt")
    torch.save({name: trained(name) for name in QUICK}, Path(folder) / f"methods{rank}.pt")
    step.host_waits = lambda device: True  # as on a device
    torch.save(with_a_bad_record(), Path(folder) / f"bad{rank}.pt")
    torch.distributed.destroy_process_group()


def with_a_bad_record() -> dict:
    run = training(data=with_overflow(), loss=weighted_loss, microbatch_size=5, steps=12)
    looked = [run._steps.looks_at_once for _ in run]
    return {"parameters": parameters(run.model), "looked": looked}


def said_by_one(rank: int, run: eq.PrivateTraining) -> None:
    """What the first process knows it says alone; the other one does not wait for it."""
    for ask in (run.statement, run.epsilon_so_far, run.describe):
        if rank == 0:
            ask()
        else:
            with pytest.raises(RuntimeError, match=r"first process keeps the ledger.*finish\(\)"):
                ask()


def noted(rank: int, folder: Path, name: str, call: Callable[[], object]) -> None:
    """Call, and write down what fails; neither process may wait for the other."""
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        (folder / f"{name}{rank}").write_text(f"{type(error).__name__}: {error}")
    assert time.monotonic() - began < 60


def fail_alone(rank: int, folder: Path) -> None:
    """The second process fails in its third step."""

    def failing(model, batch):
        if rank == 1 and steps == 2:
            raise MemoryError("secret-value")  # no fault of a record, so the step fails
        return loss(model, batch)

    def steps_of_run():
        nonlocal steps
        for report in run:
            steps = report.step

    steps = 0
    run = training(network(), steps=6, batch=20, loss=failing, folder=folder / "failing")
    noted(rank, folder, "failed", steps_of_run)
    assert steps == 2
    noted(rank, folder, "afterwards", run.take_step)


def move_alone(rank: int, folder: Path, call: str) -> None:
    """Something moves the parameters of the second process."""
    run = training(network(), steps=6, batch=20, folder=folder / call)
    run.take_step()
    if rank == 1:
        with torch.no_grad():
            next(run.model.parameters()).add_(1)
    # The first process learns of it in its next step at the latest.
    noted(rank, folder, call, lambda: (getattr(run, call)(*CALLS[call]), run.take_step()))


def write_alone(rank: int, folder: Path) -> None:
    """The first process cannot write a file that only it writes."""
    run = training(network(), steps=6, batch=20, folder=folder / "unwritten")
    run.take_step()
    if rank == 0:
        (folder / "unwritten" / "statement.json").mkdir()
    noted(rank, folder, "unwritten", run.finish)


class Mapped(OnDemand):
    """Records in files, which note who is read; one process may read them slowly."""

    def __init__(self, folder: Path, seconds: float) -> None:
        found = {}
        for name, rows in records(dtype=torch.float64).items():
            np.save(folder / f"{name}.npy", rows.numpy())
            found[name] = np.load(folder / f"{name}.npy", mmap_mode="r")
        super().__init__(found)
        self.seconds, self.read = seconds, []

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        time.sleep(self.seconds)
        self.read.append(i)
        return {name: torch.from_numpy(np.array(rows[i])) for name, rows in self.data.items()}


def read_apart(rank: int, folder: Path) -> dict:
    """Each process reads the records of its own part of every draw, at its own speed."""
    files = folder / f"files{rank}"
    files.mkdir()
    data = Mapped(files, seconds=0.02 * rank)
    run = training(network(dtype=torch.float64), data=data, steps=3, batch=20, microbatch_size=8)
    read = []
    for _ in range(3):
        data.read = []
        run.take_step()
        read.append(data.read)
    return {"read": read, "parameters": parameters(run.model)}


def start(folder: Path) -> eq.PrivateTraining:
    method = eq.DPSGD(clip_norm=eq.methods.ReleasedQuantile(initial=0.5), noise_multiplier=1.0)
    model = network(dtype=torch.float64)
    data = records(dtype=torch.float64)
    if os.environ.get("RANK") == "1":  # it makes them one by one, and looks at none beforehand
        data = OnDemand(data)
    # Draws of about two records: some processes get none. Epsilon of this sampling has a closed form.
    sampling = eq.FixedEpochs(batch_size=2, population=60, steps=15)
    return training(model, data=data, sampling=sampling, method=method, folder=folder, microbatch_size=3)


IN_TWO_PROCESSES = work


def test_all_processes_take_a_step_again_where_one_of_them_had_a_bad_record(two_processes):
    first, second = (torch.load(two_processes / f"bad{rank}.pt") for rank in (0, 1))
    alone = with_a_bad_record()
    assert torch.equal(first["parameters"], second["parameters"])
    torch.testing.assert_close(first["parameters"], alone["parameters"], rtol=1e-5, atol=1e-7)
    assert alone["looked"] == [True] * 12
    assert first["looked"] == second["looked"]
    assert first["looked"][0] < first["looked"][-1]  # it came, and was found in the process that had it


def test_two_processes_equal_one(two_processes):
    folder = two_processes
    alone = start(folder / "alone")
    list(alone)
    first, second = (torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    assert torch.equal(first, second)
    expect = parameters(alone.model)
    assert (first - expect).norm() / expect.norm() < 1e-10
    failed = [(folder / f"failed{rank}").read_text() for rank in (0, 1)]
    assert failed[1].startswith("MemoryError: memory ran out")
    assert failed[0].startswith("ProcessError: process 1 (MemoryError) failed; its own message says why.")
    assert "secret-value" not in failed[0]
    for rank in (0, 1):
        assert "Start as many processes again" in (folder / f"afterwards{rank}").read_text()
    assert (folder / "unwritten0").read_text().startswith("IsADirectoryError")
    assert "process 0 (IsADirectoryError) failed" in (folder / "unwritten1").read_text()
    for call in CALLS:
        assert "process 1 (RuntimeError) failed" in (folder / f"{call}0").read_text()
        assert "parameters of the model" in (folder / f"{call}1").read_text()
    check_read_apart(folder)
    assert len(releases(folder / "run")) == 15


def check_read_apart(folder: Path) -> None:
    first, second = (torch.load(folder / f"read{rank}.pt", weights_only=True) for rank in (0, 1))
    alone = read_apart(0, folder / "files1")
    for parts in zip(first["read"], second["read"], alone["read"], strict=True):
        mine, others, whole = map(sorted, parts)
        assert mine
        assert others
        assert sorted([*mine, *others]) == whole
    assert torch.equal(first["parameters"], second["parameters"])
    torch.testing.assert_close(first["parameters"], alone["parameters"], rtol=1e-10, atol=1e-12)


NOISE = {"noise_multiplier": 1.0}
PUBLIC = records(count=20, dtype=torch.float64, seed=9)
SYSTEMS = {
    "dp-c4": lambda: eq.DPC4(anchor_batch_size=40, anchor_noise_multiplier=1.0, **NOISE),
    "dp-mf": lambda: eq.DPMF(clip_norm=0.5, bands=3, **NOISE),
    "dp-zo": lambda: eq.methods.DPZO(clip_norm=0.5, **NOISE),
    "fitted-rate": lambda: eq.methods.FittedRate(**NOISE),
    "dice-sgd": lambda: eq.DiceSGD(clip_norm=0.2, **NOISE),
    "dc-dpsgd": lambda: eq.DCDPSGD(clip_norm=0.5, **NOISE),
    "pcdp-sgd": lambda: eq.PCDPSGD(
        source=PublicSubspace(PublicRecords(PUBLIC), dimension=5), clip_norm=0.5, **NOISE
    ),
    "adaptive-rms": lambda: eq.AdaptiveRMS(clip_norm=0.5, **NOISE),
    "two widths": lambda: eq.DPSGD(clip_norm=0.5, **NOISE),
    "updates of users": lambda: eq.DPSGD(clip_norm=0.5, **NOISE),
}
#: 60 records in microbatches of 5 and draws of all: parts of 30 and of 15 begin and end with microbatches, so
#: that sums are those of one process to the bit.
SAME_BITS = {
    "dp-sgd": lambda: eq.DPSGD(clip_norm=eq.methods.ReleasedQuantile(initial=0.5), **NOISE),
    "dice-sgd": lambda: eq.DiceSGD(clip_norm=0.5, **NOISE),
    "dp-mf": lambda: eq.DPMF(clip_norm=0.5, bands=2, **NOISE),
    "hardened": lambda: eq.DPSGD(clip_norm=0.5, **NOISE),
}
#: Those that the processes of all tests train, too; the others are slow.
QUICK = ("dp-mf", "two widths", "updates of users")


def trained(name: str) -> torch.Tensor:
    model, options = network(dtype=torch.float64), {"data": records(dtype=torch.float64)}
    if name.startswith("updates of users"):
        options = updates_of_users(dtype=torch.float64)
    if name == "two widths":  # all of one process' share
        options["widths"] = [8 + (number < 25) for number in range(RECORDS)]
    list(training(model, steps=6, method=SYSTEMS[name](), microbatch_size=5, **options))
    return parameters(model)


def same_bits(name: str, is_sharded: bool = False) -> torch.Tensor:
    model = network(dtype=torch.float64)  # float32 hides most of what rounds in sums
    if is_sharded:
        torch.distributed.fsdp.fully_shard(model)
    options = {"sampling": eq.FullBatch(60, 4), "microbatch_size": 5, "hardened": name == "hardened"}
    list(training(model, data=records(dtype=torch.float64), method=SAME_BITS[name](), **options))
    return torch.cat([all_values(parameter).flatten() for parameter in model.parameters()])


def train_all(rank: int, port: int, folder: str, count: int = 2) -> None:
    join_group(rank, port, count)
    found = {("bits", name): same_bits(name) for name in SAME_BITS}
    found["bits", "dp-sgd", "sharded"] = same_bits("dp-sgd", True)
    if count == 2:
        found |= {name: trained(name) for name in SYSTEMS if name not in QUICK}
        with pytest.raises(Exception) as caught:
            list(training(method=eq.DCDPSGD(variant=TopShare(), **NOISE)))
        found["top_share"] = str(caught.value)
    torch.save(found, Path(folder) / f"methods{rank}.pt")
    torch.distributed.destroy_process_group()


def train_by_four(rank: int, port: int, folder: str) -> None:
    train_all(rank, port, folder, 4)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_processes_that_share_the_same_microbatches_give_the_bits_of_one(tmp_path, all_methods, count):
    if count == 4:
        in_processes(train_by_four, tmp_path, 4)
    found = torch.load((tmp_path if count == 4 else all_methods) / "methods0.pt")
    for name, values in found.items():
        assert name[0] != "bits" or torch.equal(values, same_bits(name[1])), name


@pytest.fixture(scope="module")
def all_methods(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    in_processes(train_all, folder)
    return folder


CASES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SYSTEMS]


@pytest.mark.parametrize("name", CASES)
def test_two_processes_equal_one_for_every_method(name, request):
    folder = request.getfixturevalue("two_processes" if name in QUICK else "all_methods")
    first, second = (torch.load(folder / f"methods{rank}.pt")[name] for rank in (0, 1))
    alone = trained(name)
    assert torch.equal(first, second)
    assert (first - alone).norm() / alone.norm() < 1e-10
    assert (alone - parameters(network(dtype=torch.float64))).norm() > 1e-3  # it moved


@pytest.mark.slow
def test_rankings_of_a_whole_draw_say_that_they_need_one_process(all_methods):
    assert "in one process" in torch.load(all_methods / "methods1.pt")["top_share"]


def apart(rank: int, port: int, folder: str) -> None:
    join_group(rank, port)
    run = training(steps=3)
    run.take_step()

    def clip(bound: float) -> float:
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.clamp_(-bound, bound)
        return bound

    assert run.public_step(lambda: clip(0.1)) == 0.1
    run.take_step()
    with pytest.raises(RuntimeError, match="public_step"):
        run.public_step(lambda: clip(0.01 * (1 + rank)))
    with pytest.raises(RuntimeError):
        run.take_step()


def test_a_public_step_runs_in_each_process_and_leaves_one_model(tmp_path):
    in_processes(apart, tmp_path)
