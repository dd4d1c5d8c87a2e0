"""What the optimiser cannot go on with is refused when it is loaded."""

from __future__ import annotations

import copy

import pytest
import torch

from equipoise.training.folder.checkpoint import collect_state, restore_state
from equipoise.training.setup.argument_checks import check_step


def pieces():
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", True),
        ("weight_decay", True),
        ("dampening", False),
        ("momentum", "0.9"),
        ("lr", None),
        ("lr", float("nan")),
        ("lr", 10**400),
        ("nesterov", 1),
    ],
)
def test_a_setting_of_another_kind_is_refused(name, value):
    state = copy.deepcopy(collect_state(*pieces(), None))
    restore_state(state, *pieces(), None)
    state["optimizer"]["param_groups"][0][name] = value
    with pytest.raises(ValueError, match=f"the optimizer's {name} is"):
        restore_state(state, *pieces(), None)


def test_whole_and_broken_numbers_stand_for_each_other():
    state = copy.deepcopy(collect_state(*pieces(), None))
    state["optimizer"]["param_groups"][0].update(lr=1, weight_decay=0.5)
    restore_state(state, *pieces(), None)


class Counting(torch.optim.SGD):
    """Of the user's own: it holds something, and needs a closure where it is told so."""

    def __init__(self, params, needs_closure):
        super().__init__(params, lr=0.1)
        self.steps, self.needs_closure = 0, needs_closure

    def step(self, closure=None):
        self.steps += 1
        if self.needs_closure:
            closure()
        return super().step(closure)


def test_a_step_is_tried_on_a_copy_and_leaves_the_optimiser_alone():
    model = torch.nn.Linear(3, 2)
    before = copy.deepcopy(model.state_dict())
    optimizer = Counting(model.parameters(), needs_closure=False)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # it puts its own function in the place of `step`
    optimizer.register_step_post_hook(lambda *_: pytest.fail("a hook may write to the model"))
    check_step(optimizer)
    assert (optimizer.steps, len(optimizer.state)) == (0, 0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.warns(UserWarning, match="Counting"):  # it may be the copy's fault
        check_step(Counting(model.parameters(), needs_closure=True))
