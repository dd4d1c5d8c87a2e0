"""Records that other machines hold: a loss is given their places, and asks there."""

import queue

import pytest
import torch
from flat_arguments import arranged
from torch import nn

import equipoise as eq
from equipoise.statements.assumptions import Assumption
from equipoise.training.record_source import DataError, NoAnswerError, RecordPlaces

COUNT, STEPS = 40, 3
ROWS = torch.randn(COUNT + 2, 3, generator=torch.Generator().manual_seed(0))


def training(asked=None, fails=None, error=None, **options):
    """A linear loss with these rows; `asked` gets what was announced, whenever private rows are asked for."""
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    data = RecordPlaces(torch.arange(2, COUNT + 2))

    def loss(model, places):
        numbers = places.tolist()
        if asked is not None and max(numbers) > 1:
            asked.put((data.announced.tolist(), [n for n in numbers if n > 1]))
        if fails in numbers and run is not None:
            raise error
        return (model.weight * ROWS[places]).sum(1)

    loss.records_elsewhere = data
    usual = {
        "sampling": eq.Poisson(20, COUNT, STEPS), "method": eq.DPSGD(clip_norm=10.0, noise_multiplier=0.5),
        "reproducible": True, "microbatch_size": 6,
    }  # fmt: skip
    run = None
    run = eq.PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        **arranged(loss=loss, data=data, **(usual | options)),
    )
    return run


def test_a_whole_draw_is_announced_before_its_first_forward():
    asked = queue.SimpleQueue()  # what lists hold is put back after a forward
    run = training(asked)
    assumptions = run.statement().assumptions
    assert {Assumption.ELSEWHERE, Assumption.TRUSTED} <= {*assumptions}
    assert Assumption.SCANNED not in assumptions
    for _ in range(STEPS):
        while not asked.empty():
            asked.get()
        run.take_step()
        announced, parts = zip(*[asked.get() for _ in range(asked.qsize())], strict=True)
        assert len(parts) > 1
        assert all(one == announced[0] for one in announced)
        assert announced[0] == [number for part in parts for number in part]


PLACES = RecordPlaces(torch.arange(2, COUNT + 2))
APART = {
    "places of nobody's": (PLACES, None),
    "places of another loss": (PLACES, RecordPlaces(torch.arange(2, COUNT + 2))),
    "some of them": (torch.utils.data.Subset(PLACES, range(20)), PLACES),
    "tensors": (torch.arange(2, COUNT + 2), PLACES),
}


@pytest.mark.parametrize("name", APART)
def test_loss_and_data_belong_together(name):
    data, of_loss = APART[name]

    def loss(model, places):
        return model.weight.sum() * places

    loss.records_elsewhere = of_loss
    model = nn.Linear(3, 1, bias=False)
    options = {"sampling": eq.Poisson(20, COUNT, STEPS), "method": eq.DPSGD(noise_multiplier=0.5)}
    with pytest.raises(DataError, match="do not belong together"):
        eq.PrivateTraining(
            model, torch.optim.SGD(model.parameters()), **arranged(loss=loss, data=data, **options)
        )


def test_a_machine_that_does_not_answer_ends_the_step_and_books_nothing():
    run = training(fails=17, error=NoAnswerError("machine 3"), sampling=eq.FullBatch(COUNT, STEPS))
    with pytest.raises(NoAnswerError, match="machine 3"):
        run.take_step()
    assert (run.steps_done, run.epsilon_so_far(), run.model.weight.abs().sum().item()) == (0, 0.0, 0.0)
    other = training(fails=17, error=ValueError("record 17"), sampling=eq.FullBatch(COUNT, STEPS))
    other.take_step()  # a record that fails is left out
    assert other.steps_done == 1
