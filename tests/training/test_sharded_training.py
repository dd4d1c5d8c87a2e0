"""Private training of models of which two processes hold parts, by `fully_shard` or tensor parallel."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import sharded_ranks
import torch
from sharded_ranks import CASES, RESUMED, built, trained, work
from small_problems import lines, releases

import equipoise as eq
from equipoise.distributed.checkpoint import check_parts
from tests.shared_fixtures import free_port

IN_TWO_PROCESSES = work


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).norm() <= 1e-12 * expected.norm())


@pytest.mark.parametrize("name", CASES)
def test_a_sharded_model_trains_as_in_one_process(name, by_rank):
    first, second = (found[name] for found in by_rank)
    assert torch.equal(first, second)
    begun = sharded_ranks.values(built(name, False))
    assert (first[: len(begun)] - begun).norm() > 1e-2  # it moved
    if name != "shared numbers":  # these follow the places, which the number of processes moves
        assert close(first, trained(name, False))


@pytest.mark.parametrize("name", RESUMED)
def test_a_sharded_run_is_resumed_with_its_records_and_noise(name, two_processes, by_rank):
    for found in (found[f"resumed {name}"] for found in by_rank):
        assert found["begun at"] == 3
        assert torch.equal(found["whole"], found["resumed"])
        assert torch.equal(found["whole"], found["ended"])
        model = eq.load_model(built(name, False), two_processes / name / "whole" / "model.safetensors")
        assert torch.equal(sharded_ranks.values(model), found["whole"])
    for run in (two_processes / name / "whole", two_processes / name / "left"):
        assert releases(run) == [*range(len(releases(run)))]
        assert eq.verify_run(run).consistent


@pytest.mark.parametrize(
    ("name", "how"), [("adam", "lacks memory"), ("adam", "is killed"), ("cut", "is killed")]
)
def test_a_process_that_fails_in_a_forward_ends_the_others(name, how):
    script = Path(sharded_ranks.__file__)
    environment = os.environ | {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command, of_rank = [sys.executable, script, "fail", name, how], [{"RANK": "0"}, {"RANK": "1"}]
    ranks = [subprocess.Popen(command, env=environment | own, stderr=subprocess.PIPE) for own in of_rank]
    try:
        said = [rank.communicate(timeout=200)[1].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode != 0 for rank in ranks)
    assert "secret-value" not in said[0]
    if how == "lacks memory":
        assert "secret-value" in said[1]
    if how == "lacks memory" and name == "adam":
        assert "process 1 (MemoryError) failed" in said[0]
    else:  # it left an exchange in which the other one waits
        assert "and end with this one" in said[0] or "another process of this training ended" in said[0]


def test_a_changed_file_of_a_sharded_checkpoint_is_seen(two_processes, by_rank):
    (newest,) = sorted((two_processes / "adam" / "whole" / "checkpoint").glob("*.shards"))[-1:]
    state = torch.load(newest.with_suffix(".pt"), weights_only=True)["state"]["parts"]["files"]
    assert set(state) == {path.name for path in newest.iterdir()}
    check_parts(newest, state)
    with (newest / "__1_0.distcp").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ValueError, match=r"__1_0\.distcp is missing, or is not the file"):
        check_parts(newest, state)


def test_one_process_goes_on_with_the_parts_of_two(two_processes, by_rank):
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(sharded_ranks.__file__)
    command = [sys.executable, script, two_processes / "two", two_processes / "one.pt"]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.load(two_processes / "one.pt", weights_only=True)
    # Two steps behind the checkpoint are asked in another way: new noise, a new charge, two steps fewer.
    assert found["steps"] == 4
    assert releases(two_processes / "two") == list(range(6))
    entries = lines(two_processes / "two" / "private" / "journal.jsonl")
    assert len({entry["answer"] for entry in entries if entry["type"] == "release"}) == 6


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("method", "NotImplementedError: .*'adaptive-rms'"),
        ("cut, method", "NotImplementedError: .*'adaptive-rms'"),
        ("cut, hardened", "NotImplementedError: .*hardened=True"),
        ("cut, whole", "CheckpointError: .*parallelize_module"),
        ("cut, weights apart", r"RuntimeError: the processes do not agree on the model's parameters"),
        ("describe", r"NotImplementedError: describe\(\).*before fully_shard"),
    ],
)
def test_what_sharded_models_do_not_take_is_refused_by_name(what, said, by_rank):
    for found in by_rank:
        assert re.match(said, found["refused"][what]), found["refused"][what]


@pytest.mark.parametrize("how", ["adam", "cut"])
def test_a_process_holds_its_part_of_model_optimizer_sums_and_noise_alone(how, by_rank):
    for kind in ("kept", "sums", "noised"):
        parts = [found["memory", how][kind] for found in by_rank]
        whole = by_rank[0]["memory", how]["whole"] * (3 if kind == "kept" else 1)
        assert max(parts) <= 0.7 * whole
        assert sum(parts) == whole or how == "cut"  # which holds copies of some parameters


@pytest.mark.parametrize("how", ["whole", "sharded", "cut"])
def test_exchanges_of_a_step_do_not_grow_with_the_number_of_tensors(how, by_rank):
    for found in by_rank:
        few, many = (found["exchanges"][depth, how] for depth in (1, 9))
        assert few == many
        assert few["broadcast_object_list"] <= 1 + (how != "whole")
        assert sum(few.values()) <= 16
