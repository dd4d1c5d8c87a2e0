"""What the training loop changes after the start: switches are tried and named, other parameters refused."""

import pytest
import torch
from small_problems import OnDemand, check_named, network, records, resumed, saved, training
from torch import nn
from torch.nn import functional as F

import equipoise as eq
from equipoise.gradients import CrossRecordError
from equipoise.statements.assumptions import CHANGED, FIRST_VALUES, Assumption
from equipoise.training.constants import MOST_TRIED
from equipoise.training.record_source import DataError
from equipoise.training.setup.training_setup import TrainingSetup

CENTRED = False


def of_global(model, batch):
    out = model(batch["input"])
    return F.cross_entropy(out - out.mean(0) if CENTRED else out, batch["label"], reduction="none")


class Scaled(nn.Module):
    """Centres the batch if its switch is on."""

    def __init__(self, centres=False):
        super().__init__()
        self.centres, self.scale = centres, 1

    def forward(self, values):
        return self.scale * (values - values.mean(0) if self.centres else values)


def of_module(turn):
    model = network().append(Scaled())
    return model, None, lambda on: turn(model, on)


OTHER = Scaled(centres=True)
#: What holds a value in other ways: `tests/gradients/test_attributes.py`.
SWITCHES = {
    "3.centres": lambda: of_module(lambda model, on: setattr(model[3], "centres", on)),
    "_modules": lambda: of_module(lambda model, on: model.__setitem__(3, OTHER if on else Scaled())),
    "CENTRED": lambda: (network(), of_global, lambda on: globals().update(CENTRED=on)),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_that_mixes_records_is_refused_before_a_draw(name):
    model, loss, turn = SWITCHES[name]()
    run = training(model, steps=3, **({} if loss is None else {"loss": loss}))
    run.take_step()
    spent = run.epsilon_so_far()
    turn(True)
    try:
        for _ in range(2):  # tried, and not taken for known
            with pytest.raises(CrossRecordError, match="changed .*" + name):
                run.take_step()
    finally:
        turn(False)
    assert (run.steps_done, run.epsilon_so_far()) == (1, spent)
    assert [step.step for step in run] == [2, 3]


class MixUp:
    """As a collate function and as an augmentation: with the next record, or with noise, once it is on."""

    on, noise = False, 0.0

    def __call__(self, batch, generator=None):
        batch = batch if generator is not None else torch.utils.data.default_collate(batch)
        values = batch["input"]
        if self.on:
            values = 0.6 * values + 0.4 * values.roll(1, 0)
        if self.noise:
            values = values + self.noise * torch.randn(values.shape, generator=generator)
        return batch | {"input": values}


@pytest.mark.parametrize("given", ["collate", "augmentation"])
def test_a_switch_of_collate_or_augmentation_is_refused_before_a_draw(given):
    mix = MixUp()
    run = training(steps=3, data=OnDemand(records()), **{given: mix})
    run.take_step()
    spent, mix.on = run.epsilon_so_far(), True
    for _ in range(2):
        with pytest.raises(DataError, match=r"changed on after the start.*mixes records.*Set it back"):
            run.take_step()
    mix.on = False
    assert (run.steps_done, run.epsilon_so_far()) == (1, spent)
    assert Assumption.RANDOM_PIPELINE not in run.statement().assumptions
    mix.noise = 0.1  # random numbers that a switch lets in are assumed to be each record's own
    assert [step.step for step in run] == [2, 3]
    assert Assumption.RANDOM_PIPELINE in run.statement().assumptions


def test_changes_are_named_and_tried_a_few_times(tmp_path, monkeypatch):
    """Also of a run that is resumed; the rows are those of the model as it is now."""
    model, tried = network().append(Scaled()), []
    monkeypatch.setattr(TrainingSetup, "try_again", lambda setup: tried.append(setup.model[3].scale) or [])
    run = training(model, steps=12, folder=tmp_path / "run", reproducible=False)
    for step in range(8):
        model[3].scale = 1 + step // 2 * 2  # at every second step another one, from the third on
        model.eval()  # a mode is put back, and no change
        run.take_step()
    assert tried == [3, 5, 7]
    model[3].scale = 1  # known
    run.take_step()
    assert len(tried) == 3
    saved(run, steps=0)
    model = network().append(Scaled())
    again = resumed(tmp_path / "run", model)
    for step in range(3):
        model[3].scale = 2 + step
        again.take_step()
    named = [text for text in again.run(progress=False).statement.assumptions if text.startswith(CHANGED)]
    assert named == [CHANGED + "3.scale"]
    counting, before = training(model := network().append(Scaled()), steps=8), len(tried)
    for model[3].scale in range(8):
        counting.take_step()
    assert len(tried) - before == MOST_TRIED
    assert CHANGED + "3.scale" + FIRST_VALUES in counting.statement().assumptions
    found = eq.verify_run(tmp_path / "run")
    assert found.consistent
    assert "further assumptions" not in {finding.subject for finding in found.findings}
    check_named(tmp_path / "run", CHANGED + "3.scale")


PARAMETERS = {
    "unfreeze": lambda model, optimizer: model[0].requires_grad_(True),
    "new layer": lambda model, optimizer: model.append(nn.Linear(3, 3)),
    "leave out": lambda model, optimizer: optimizer.param_groups[0]["params"].pop(),
    "foreign": lambda model, optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]}),
}


@pytest.mark.parametrize("change", PARAMETERS.values(), ids=PARAMETERS)
def test_other_parameters_than_at_the_start_are_refused_before_a_draw(change):
    model = network()
    model[0].requires_grad_(False)
    run = training(model, optimizer=lambda _, lr: torch.optim.SGD(model[2].parameters(), lr=lr), steps=4)
    run.take_step()
    spent = run.epsilon_so_far()
    change(model, run.optimizer)
    with pytest.raises(RuntimeError, match=r"after the start|at the start.*journal"):
        run.take_step()
    assert (run.steps_done, run.epsilon_so_far()) == (1, spent)


@pytest.mark.parametrize("by_hook", [True, False])
def test_a_switch_in_a_buffer_of_a_compared_model_is_tried(by_hook):
    """It reads a value, so that it is compared, and mixes records once its buffer says so."""
    model = nn.Linear(4, 3)
    model.register_buffer("steps", torch.zeros(()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if by_hook:
        optimizer.register_step_post_hook(lambda *_: model.steps.add_(1))

    def loss(model, x):
        return model(x - x.mean(0) if model.steps > 0 else x).square().sum(1)

    given = {"loss": loss, "data": torch.randn(20, 4), "sampling": eq.Poisson(8, 20, 3)}
    run = training(model, optimizer=lambda *_, lr: optimizer, **given)
    run.take_step()
    if not by_hook:
        run.public_step(lambda: (model.steps.fill_(1), model.register_buffer("more", torch.ones(1))))
    with pytest.raises(CrossRecordError, match="steps"):
        run.take_step()
