"""What a run begins from: no private record went into it that the run's epsilon does not cover."""

import copy
from contextlib import nullcontext

import pytest
import torch
from flat_arguments import arranged
from small_problems import check_named, loss, network, records, training
from torch import nn

import equipoise as eq
from equipoise.published.non_private import PlainSGD
from equipoise.statements.assumptions import AFTER, START, Assumption
from equipoise.statements.verify import verify_run

USUAL = {"reproducible": False, "steps": 2}


def trained(model=None, **options):
    """A model that a private run left, and the run's name."""
    model = network() if model is None else model
    run = training(model, **(USUAL | options))
    run.run(progress=False)
    return model, run.ledger.record.run


def copy_of_a_run_that_goes_on():
    ALIVE.append(training(**USUAL))
    ALIVE[-1].take_step()
    return copy.deepcopy(ALIVE[-1].model)


def scaled_afterwards():
    model = trained()[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    return model


def loaded_state():
    model = network(seed=2)
    model.load_state_dict(trained()[0].state_dict())
    return model


def head_first():
    model = network()
    model[0].requires_grad_(False)
    trained(model)
    return model.requires_grad_(True)


ALIVE = []
LEFT = [
    copy_of_a_run_that_goes_on,
    scaled_afterwards,
    loaded_state,
    head_first,
    lambda: trained(ema_decay=0.5)[0],
]


@pytest.mark.parametrize("left", LEFT)
def test_a_model_that_a_run_left_is_refused(left):
    model = left()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"journal.*starts_from"):
        training(model, **USUAL)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    stated = training(model, starts_from="public", **USUAL).statement().assumptions
    assert START in stated
    assert Assumption.PUBLIC_START in stated


def test_what_a_run_left_is_refused_at_the_first_step_too():
    model = network()
    run = training(model, **USUAL)
    trained(model)
    with pytest.raises(ValueError, match="starts_from"):
        run.take_step()
    assert run.epsilon_so_far() == 0


def test_a_model_that_was_put_back_needs_no_argument():
    model = network()
    begun = copy.deepcopy(model.state_dict())
    trained(model)
    model.load_state_dict(begun)
    stated = training(model, **USUAL).statement()
    assert START in stated.assumptions
    assert Assumption.PUBLIC_START not in stated.assumptions


def test_a_run_that_claims_nothing_begins_from_anything_and_names_it():
    model, run = trained()
    momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    momentum_step(model, momentum)
    again = training(model, optimizer=lambda *_, **__: momentum, **(USUAL | {"method": PlainSGD()}))
    assert AFTER + run in again.statement().assumptions


def test_runs_of_one_journal_follow_each_other(tmp_path):
    model, run = trained(journal=tmp_path / "journal")
    for other in (tmp_path / "another", None):
        with pytest.raises(ValueError, match="journal"):
            training(model, journal=other, **USUAL)
    again = training(model, journal=tmp_path / "journal", folder=tmp_path / "second", **USUAL)
    stated = again.run(progress=False).statement
    assert stated.other_runs == 1
    assert {START, AFTER + run} <= set(stated.assumptions)
    assert Assumption.PUBLIC_START not in stated.assumptions
    assert verify_run(tmp_path / "second").consistent


def test_a_statement_without_its_start_is_found_out(tmp_path):
    model, run = trained()
    trained(model, starts_from="public", folder=tmp_path / "run")
    check_named(tmp_path / "run", START, Assumption.PUBLIC_START, AFTER + run)


def start_or_resume(folder, model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    options |= {"sampling": eq.Poisson(12, 60, 2), "method": eq.DPSGD(clip_norm=0.5, noise_multiplier=1.0)}
    given = arranged(folder=folder, loss=loss, data=records(), **options)
    return eq.PrivateTraining.start_or_resume(model, optimizer, **given)


def test_two_phases_of_a_script_are_the_same_when_it_is_started_again(tmp_path):
    """Phase two is refused also where phase one had ended before, and its model was read from the file."""
    journal = tmp_path / "journal"
    start_or_resume(tmp_path / "one", network(), journal=journal).run(progress=False)
    model = network(seed=5)
    start_or_resume(tmp_path / "one", model, journal=journal).run(progress=False)
    with pytest.raises(ValueError, match="journal"):
        start_or_resume(tmp_path / "two", model)
    stated = start_or_resume(tmp_path / "two", model, journal=journal).run(progress=False).statement
    assert stated.other_runs == 1


def test_a_model_file_says_whose_it_is(tmp_path):
    """Of the parameters that the run trained: others, such as a public backbone's, are anybody's."""
    folder = tmp_path / "run"
    model = network()
    model[0].requires_grad_(False)
    run = trained(model, folder=folder)[1]
    other = eq.load_model(network(seed=4), folder / "model.safetensors")
    training(nn.Sequential(other[0], nn.Tanh(), nn.Linear(8, 3)), **USUAL)
    model = copy.deepcopy(other)
    with pytest.raises(ValueError, match=f"{run}.*journal"):
        training(model, **USUAL)
    assert AFTER + run in training(model, starts_from="public", **USUAL).statement().assumptions
    training(model, journal=folder / "private" / "journal.jsonl", **USUAL)


def momentum_step(model, optimizer):
    optimizer.zero_grad()
    loss(model, records()).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("kind", "options", "stepped"),
    [
        (torch.optim.SGD, {"momentum": 0.9}, True),
        (torch.optim.Adam, {"amsgrad": True}, True),
        (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}, False),
    ],
)
def test_an_optimiser_that_remembers_steps_is_refused(kind, options, stepped):
    model = network()
    optimizer = kind(model.parameters(), lr=0.1, **options)
    if stepped:
        momentum_step(model, optimizer)
    with pytest.raises(ValueError, match=r"optimizer.*starts_from") if stepped else nullcontext():
        training(model, optimizer=lambda *_, **__: optimizer, **USUAL)
    run = training(model, optimizer=lambda *_, **__: optimizer, starts_from="public", **USUAL)
    assert Assumption.PUBLIC_START in run.statement().assumptions


def test_a_raw_step_of_the_optimizer_between_private_ones_is_refused():
    model = network()
    run = training(model, optimizer=torch.optim.Adam, **USUAL)
    run.take_step()
    before = copy.deepcopy(model.state_dict())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    run.optimizer.step()
    model.load_state_dict(before)  # the parameters are as they were, and the moments are not
    with pytest.raises(RuntimeError, match="optimizer"):
        run.take_step()
    run = training(optimizer=torch.optim.Adam, **USUAL)
    run.take_step()
    run.optimizer.state.clear()  # what it remembers may be cleared
    run.take_step()


def test_a_teacher_in_the_loss_is_known():
    left = trained()[0]

    def distilling(model, batch):
        with torch.no_grad():
            target = left(batch["x"])
        return (model(batch["x"]) - target).square().sum(1)

    with pytest.raises(ValueError, match="loss"):
        training(network(seed=3), loss=distilling, **USUAL)
