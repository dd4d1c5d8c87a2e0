"""An error in a step: the repeated step is the same step, it is not charged again, and the key stays."""

import itertools
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import pytest
import torch
from small_problems import loss, network, parameters, releases, training
from torch import nn

import equipoise as eq
from equipoise import _host
from equipoise.privacy import digests

STEPS = 6


def whole() -> torch.Tensor:
    model = network()
    list(training(model, steps=STEPS))
    return parameters(model)


@pytest.mark.parametrize(
    ("step", "moved", "error"),
    [
        (0, True, RuntimeError("broken optimiser")),
        (3, False, KeyboardInterrupt()),
        (STEPS - 1, False, torch.OutOfMemoryError("out of memory")),
    ],
)
def test_an_error_after_the_release_costs_nothing(tmp_path, step, moved, error):
    """The optimiser fails in a step, before or after it moves the parameters, which then is done."""
    model = network()
    run = training(model, steps=STEPS, folder=tmp_path / "run")
    update, broken = run.optimizer.step, []

    def failing():
        fails = run.steps_done == step and not broken
        if moved or not fails:
            update()
        if fails:
            broken.append(step)
            raise error

    run.optimizer.step = failing
    with pytest.raises(type(error)):
        run.run(progress=False)
    assert run.steps_done == step + moved
    assert all(p.grad is None for p in model.parameters())
    assert not (tmp_path / "run" / "statement.json").exists()
    if step == STEPS - 1 and not moved:  # every release is booked, but the last one was not used yet
        assert not run.finish().finished
    result = run.run(progress=False)
    assert (result.finished, result.steps) == (True, STEPS)
    assert releases(tmp_path / "run") == list(range(STEPS))
    assert torch.equal(parameters(model), whole())


class Far(torch.Tensor):
    """Lies on a device until it is copied; the copies of `interrupted`, counted from one, are interrupted."""

    copies, interrupted = 0, ()

    def numpy(self, *args):
        raise TypeError("it is not on the host")

    def cpu(self):
        Far.copies += 1
        if Far.copies in Far.interrupted:
            raise KeyboardInterrupt
        return self.as_subclass(torch.Tensor)


@pytest.fixture
def on_a_device(monkeypatch):
    """Digests are as on a device, where the host waits in a copy."""
    compressed = digests.compressed
    monkeypatch.setattr(
        digests, "compressed", lambda *given: (part.as_subclass(Far) for part in compressed(*given))
    )
    monkeypatch.setattr(digests, "HASHED_WHERE_THEY_ARE", ("cpu",))
    monkeypatch.setattr(_host, "host_waits", lambda device: True)
    monkeypatch.setattr(Far, "interrupted", ())


def interrupt(*copies: int) -> None:
    Far.copies, Far.interrupted = 0, copies


@contextmanager
def interrupted_at_line(number: int, *files: str) -> Iterator[list[int]]:
    """Inside, the line of these files that is run as this one, counted from one, raises KeyboardInterrupt.

    Yields:
        The numbers of the lines that were run.
    """
    passed: list[int] = []

    def each_line(frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            passed.append(frame.f_lineno)
            if len(passed) == number:
                sys.settrace(None)
                raise KeyboardInterrupt
        return each_line

    def each_call(frame: FrameType, event: str, _: object) -> Any:
        return each_line if frame.f_code.co_filename.endswith(files) else None

    before = sys.gettrace()
    sys.settrace(each_call)
    try:
        yield passed
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("where", ["on the host", "on a device"])
def test_a_digest_that_was_interrupted_is_that_of_its_value(where, request):
    if where == "on a device":
        request.getfixturevalue("on_a_device")
    taken = digests.KeyedDigest(bytes(32), "a test")
    value = {"w": torch.arange(10.0), "at": 3}
    expected = taken(value).value()
    for number in itertools.count(1):
        unread = taken(value)
        try:
            with interrupted_at_line(number, "privacy/digests.py", "_host.py"):
                unread.value()
            break
        except KeyboardInterrupt:
            assert unread.value() == expected
    assert number > 3


@pytest.mark.slow
def test_an_interrupt_at_any_line_of_a_step_costs_nothing():
    files = ("training/step.py", "training/watch.py", "privacy/digests.py", "_host.py", "ledger/ledger.py")

    def begun() -> eq.PrivateTraining:
        run = training(steps=100_000, sampling=eq.FixedEpochs(12, 60, 100_000))
        run.take_step()
        return run

    run = begun()
    with interrupted_at_line(0, *files) as passed:
        run.take_step()
    for number in range(1, len(passed)):
        with suppress(KeyboardInterrupt), interrupted_at_line(number, *files):
            run.take_step()
        run.take_step()
        assert run.ledger.record.num_draws == run.steps_done


def test_an_interrupt_between_a_step_and_what_follows_it_leaves_both_right(tmp_path):
    """At every line: average and scheduler follow a step once, by the next one or when it is saved."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    files = ("training/step.py", "training/moving_average.py", "optim/lr_scheduler.py")
    run = training(
        model,
        optimizer=lambda *_, **__: optimizer,
        sampling=eq.FixedEpochs(12, 60, 100_000),
        scheduler=scheduler,
        ema_decay=0.2,
        folder=tmp_path / "run",
    )
    average, done = parameters(model).double(), 0

    def look() -> None:
        nonlocal average, done
        if run.steps_done > done:
            assert run.steps_done == done + 1
            decay = min(0.2, (1 + done) / (10 + done))
            average, done = decay * average + (1 - decay) * parameters(model), done + 1

    interrupted = 0
    for number in itertools.count(1):
        try:
            with interrupted_at_line(number, *files):
                run.take_step()
        except KeyboardInterrupt:
            interrupted += 1
        else:
            break
        look()
        if number % 5:
            run.take_step()
            look()
        else:
            run.save_checkpoint()
        assert scheduler.last_epoch == done
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.3 * 0.999**done)
        found = torch.cat([value.flatten() for value in run._setup.average.values.values()])
        torch.testing.assert_close(found.double(), average, rtol=1e-5, atol=1e-6)
    assert interrupted > 100


@pytest.mark.parametrize(("copy", "done"), [(1, 3), (2, 4)])
def test_an_interrupt_where_the_host_waits_costs_nothing(tmp_path, on_a_device, copy, done):
    """In the copy for the noise, and in that at the end of the step, which counts then."""
    expected, model = whole(), network()
    run = training(model, steps=STEPS, folder=tmp_path / "run")
    for _ in range(3):
        run.take_step()
    interrupt(copy)
    with pytest.raises(KeyboardInterrupt):
        run.take_step()
    assert run.steps_done == done
    interrupt()
    list(run)
    assert releases(tmp_path / "run") == list(range(STEPS))
    assert torch.equal(parameters(model), expected)


@pytest.mark.parametrize("times", [1, 2])
def test_a_step_that_moved_the_parameters_counts_or_nothing_goes_on(tmp_path, on_a_device, times):
    """Interrupted in the optimizer, and again where the handler waits."""
    run = training(steps=STEPS, folder=tmp_path / "run")
    run.take_step()
    update = run.optimizer.step

    def interrupted() -> None:
        update()
        run.optimizer.step = update
        interrupt(*range(times))
        raise KeyboardInterrupt

    run.optimizer.step = interrupted
    with pytest.raises(KeyboardInterrupt):
        run.take_step()
    interrupt()
    assert run.steps_done == (2 if times == 1 else 1)
    if times == 1:
        list(run)
        assert releases(tmp_path / "run") == list(range(STEPS))
    else:
        with pytest.raises(RuntimeError, match=r"parameters of the model .* not by a step"):
            run.take_step()


def test_a_loss_that_fails_on_every_record_costs_a_step_and_is_told_once(tmp_path, caplog):
    """Whether a step stops must not hang on records and parameters; the keeper's log says what happened."""
    fails = []

    def sometimes(model, batch):
        if fails:
            raise NameError("a misspelt name")
        return loss(model, batch)

    run = training(steps=STEPS, loss=sometimes, folder=tmp_path / "run")
    run.take_step()
    fails.append(1)
    list(run)
    assert releases(tmp_path / "run") == list(range(STEPS))
    assert [one.levelname for one in caplog.records if one.name.startswith("equipoise")] == ["ERROR"]
    assert "every record of a draw" in caplog.text


RECORDS = {"x": torch.randn(120, 2)}


def loss_of_stops(model, batch):
    return model(batch["x"])[:, 0].square()


def begun(folder, **settings):
    given = {"loss": loss_of_stops, "data": RECORDS, "sampling": eq.Poisson(50, population=120, steps=4)}
    given |= {"method": eq.DPSGD(), "budget": eq.Budget(2.0, 1e-4), "reproducible": False}
    return training(nn.Linear(2, 1), folder=folder, **given, **settings)


def sends(number):
    def evaluate(model):
        os.kill(os.getpid(), number)
        return 0.0

    return evaluate


@pytest.mark.parametrize(
    ("number", "stop", "interactive", "exits"),
    [
        (signal.SIGTERM, None, False, True),
        (signal.SIGTERM, None, True, False),
        (signal.SIGTERM, "return", False, False),
        (signal.SIGINT, "exit", False, False),
    ],
)
def test_a_terminated_script_does_not_count_as_done(tmp_path, monkeypatch, number, stop, interactive, exits):
    if interactive:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    run = begun(tmp_path / "run")
    given = {"evaluate": sends(number), "evaluate_every": 2, "progress": False, "stop": stop}
    before = signal.getsignal(number)
    if exits:
        with pytest.raises(SystemExit) as raised:
            run.run(**given)
        assert raised.value.code == 143
    else:
        assert not run.run(**given).finished
    assert run.steps_done == 2
    assert signal.getsignal(number) is before
    assert list((tmp_path / "run" / "checkpoint").iterdir())  # written before it exits


def test_sigterm_in_the_last_step_is_no_failure(tmp_path):
    assert begun(tmp_path / "run").run(sends(signal.SIGTERM), evaluate_every=4, progress=False).finished
