"""What the owner hears unasked: tensors that nothing trains, models that learned nothing, what is slow."""

import warnings

import pytest
import torch
from small_problems import training
from torch import nn


def begun(model):
    data = {"input": torch.randn(100, 3), "label": torch.randint(2, (100,))}
    return training(model, data=data, population=100, steps=2)


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x):
        return self.used(x)


def test_run_names_parameters_that_the_loss_does_not_reach():
    with pytest.warns(UserWarning, match=r"idle\.weight, idle\.bias"):
        begun(Half()).run(progress=False)


@pytest.mark.parametrize(("scale", "says"), [(0.0, True), (1.0, False)])
def test_one_answer_for_all_inputs_is_said(scale, says):
    inputs = torch.randn(50, 3)

    run = begun(nn.Linear(3, 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.run(lambda model: float(model(inputs * scale).argmax(1).double().mean()), progress=False)
    assert any("largest output" in str(one.message) for one in caught) is says
