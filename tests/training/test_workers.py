"""Worker processes read a draw's items ahead, and nothing else changes by them."""

import functools
import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from small_problems import RECORDS, network, parameters, records, training

from equipoise.training.reading import WorkersLostError
from equipoise.training.record_source import RecordSource

COUNTS = (0, 3)


class Items(torch.utils.data.Dataset):
    """Records that draw random numbers, some of which cannot be read, some only sometimes."""

    def __init__(self, fails=(), fails_at_random=False, together=False):
        self.data, self.fails, self.fails_at_random = records(), fails, fails_at_random
        if together:
            self.__getitems__ = lambda numbers: [self[number] for number in numbers]

    def __len__(self):
        return RECORDS

    def __getitem__(self, i):
        if i in self.fails:
            raise KeyError(f"record {i} cannot be read")
        scale = 1 + 0.1 * (random.random() + np.random.rand() + float(torch.rand(())))
        if self.fails_at_random and random.random() < 0.1:
            raise OSError(f"record {i} could not be read")
        return {"input": scale * self.data["input"][i], "label": self.data["label"][i]}


def begun(data, workers, steps=4, **options):
    return training(network(dropout=0.2), data=data, steps=steps, batch=20, workers=workers, **options)


def rows_of(run):
    """The private diagnostics: records, failures, losses."""
    rows = (run.folder.private / "diagnostics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(row).items() if key != "seconds"} for row in rows]


def trained(*given, **options):
    run = begun(*given, **options)
    list(run)
    return run


@pytest.mark.parametrize(
    "options",
    [
        {"fails": (3, 17, 40)},
        {"fails": (3, 17, 40), "together": True},
        pytest.param({"fails_at_random": True}, marks=pytest.mark.wide),
    ],
)
def test_any_number_of_workers_gives_the_same_bits(tmp_path, options):
    alone, run = (
        trained(Items(**options), count, microbatch_size=4, folder=tmp_path / str(count)) for count in COUNTS
    )
    assert torch.equal(parameters(run.model), parameters(alone.model))
    assert rows_of(run) == rows_of(alone)
    assert run.ledger.record.used == alone.ledger.record.used


def pids(run):
    return [*run._setup.rows.source._workers.pool._processes]


def test_a_killed_worker_changes_nothing(tmp_path, caplog):
    whole = trained(Items(), 0, steps=6, microbatch_size=4, folder=tmp_path / "whole")
    run = begun(Items(), 2, steps=6, microbatch_size=4, folder=tmp_path / "run")

    def kill(model):  # where the training catches signals, which a worker must not
        if run.steps_done in (2, 4):
            os.kill(pids(run)[run.steps_done // 4], signal.SIGKILL)
        return 0.0

    with caplog.at_level(logging.WARNING, logger="equipoise.training"):
        run.run(kill, progress=False, evaluate_every=1)
    assert len([one for one in caplog.records if one.name.startswith("equipoise")]) == 2
    assert torch.equal(parameters(run.model), parameters(whole.model))
    assert rows_of(run) == rows_of(whole)
    assert run.ledger.record.num_draws == whole.ledger.record.num_draws == 6


@pytest.fixture(scope="module")
def late():
    """A record that is drawn first in a later step."""
    read = []

    class Noted(Items):
        def __getitem__(self, i):
            read.append(i)
            return super().__getitem__(i)

    run = begun(Noted(), 0, steps=6)
    read.clear()
    run.take_step()
    before = set(read)
    list(run)
    return next(i for i in read if i not in before)


class Deadly(Items):
    """A record that ends the worker that reads it, as often as a file says."""

    def __init__(self, number, file, times):
        super().__init__()
        self.number, self.file, self.main = number, file, os.getpid()
        file.write_text("x" * times)

    def __getitem__(self, i):
        left = self.file.read_text()
        if i == self.number and left and os.getpid() != self.main:
            self.file.write_text(left[1:])
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(i)


def test_workers_that_die_again_and_again_stop_the_step_which_can_be_repeated(tmp_path, late):
    whole = trained(Items(), 0, steps=6)
    run = begun(Deadly(late, tmp_path / "times", 3), 2, steps=6)
    with pytest.raises(WorkersLostError, match="workers=2") as error:
        list(run)
    assert re.findall(r"\d+", str(error.value)) == ["2"]  # and no number of a record
    done = run.steps_done
    list(run)  # a third death, and then it can be read
    assert done < run.steps_done == 6
    assert torch.equal(parameters(run.model), parameters(whole.model))
    assert run.ledger.record.used == whole.ledger.record.used


def generator(kind, seed):
    return torch.Generator().manual_seed(seed)


def test_answers_that_nobody_took_are_not_those_of_the_next_pass():
    nobodys, ones = (functools.partial(generator, seed=seed) for seed in (0, 1))
    parts, source, plain = torch.arange(20).split(10), RecordSource(Items(), workers=2), RecordSource(Items())
    abandoned = source.ahead(parts, nobodys)
    next(abandoned)
    for _, part in zip(source.ahead(parts, ones), parts, strict=True):
        assert sorted(source._read_ahead) == part.tolist()
        for numbers in (ones, nobodys):
            assert torch.equal(source.take(part, numbers)["input"], plain.take(part, numbers)["input"])
        abandoned.close()
    source.close()


def test_workers_end_with_the_training():
    run = trained(Items(), 2, steps=2)
    started = [*run._setup.rows.source._workers.pool._processes.values()]
    run.close()
    assert len(started) == 2
    assert not any(process.is_alive() for process in started)


ALONE = """
import os, sys, time, torch
from test_workers import Items, training
run = training(data=Items(), workers=2)
run.take_step()
print(*run._setup.rows.source._workers.pool._processes, flush=True)
time.sleep(60)
"""


def test_workers_end_when_the_process_that_trains_is_killed():
    process = subprocess.Popen(
        [sys.executable, "-c", ALONE], cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    workers = [int(pid) for pid in process.stdout.readline().split()]
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGINT)  # as Ctrl-C at a terminal sends it to all
    time.sleep(0.2)
    assert Path(f"/proc/{workers[0]}").exists()
    process.kill()
    process.wait()
    end = time.monotonic() + 20
    while any(alive(pid) for pid in workers) and time.monotonic() < end:
        time.sleep(0.2)
    assert not any(alive(pid) for pid in workers)


def alive(pid):
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_nothing_shows_who_was_drawn(tmp_path, capfd, caplog):
    secret = tmp_path / "secret"

    class Telling(Items):
        def __getitem__(self, i):
            title = Path(f"/proc/{os.getpid()}/cmdline").read_bytes() + Path("/proc/self/comm").read_bytes()
            with secret.open("ab") as file:
                file.write(title + b"\n")
            return super().__getitem__(i)

    with caplog.at_level(logging.DEBUG):
        run = trained(Telling(fails=range(0, RECORDS, 2)), 2)
        os.kill(pids(run)[0], signal.SIGKILL)
        assert run.steps_done == 4
    out, err = capfd.readouterr()
    assert "cannot be read" not in out + err + caplog.text
    assert "record" not in out + err
    assert len(set(secret.read_bytes().split(b"\n"))) <= 3  # one title, whatever is read
