"""A student that starts as its teacher trains though its gradients are rounding; a wrong one does not."""

from __future__ import annotations

import copy

import pytest
from small_problems import MeanBackward, network, training
from torch.nn import functional as F

from equipoise.gradients import CoverageError, CrossRecordError


class Scaled(MeanBackward):
    """Follows the number of records."""

    @staticmethod
    def backward(ctx, grad):
        return grad * len(grad)


LOSSES = {
    "kl": lambda own, other: F.kl_div(own.log_softmax(-1), other.softmax(-1), reduction="none").sum(-1),
    "cosine": lambda own, other: 1 - F.cosine_similarity(own, other, -1),
    "squares": lambda own, other: (own - other).square().sum(-1),
}


def distilled(which, backward=None):
    student = network()
    teacher = copy.deepcopy(student).requires_grad_(False)

    def loss(model, batch):
        own = model(batch["input"])
        own = own if backward is None else backward.apply(own)
        return LOSSES[which](own, teacher(batch["input"]))

    return {"model": student, "loss": loss}


@pytest.mark.parametrize("which", LOSSES)
def test_it_trains(which):
    run = training(**distilled(which), steps=2)
    assert run.independence.word == "proved"
    run.take_step()


@pytest.mark.parametrize("which", ["kl", "cosine"])
def test_a_backward_that_mixes_records_is_refused_or_runs_on_one_record_at_a_time(which):
    try:
        run = training(**distilled(which, MeanBackward), steps=2)
    except (CrossRecordError, CoverageError):
        return
    assert {covered.how for covered in run.engine.coverage()} == {"dense"}


@pytest.mark.few(1)
@pytest.mark.parametrize("which", ["kl", "cosine"])
def test_a_backward_that_follows_the_number_of_records_is_named(which):
    with pytest.warns(UserWarning, match="another function"):
        training(**distilled(which, Scaled), steps=2)
