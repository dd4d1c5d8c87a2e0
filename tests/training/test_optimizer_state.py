"""What the optimiser cannot go on with is refused when it is loaded."""

from __future__ import annotations

import copy

import pytest
import torch

from equipoise.training.folder.checkpoint import collect_state, restore_state


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
