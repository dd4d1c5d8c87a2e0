"""What a data function declares is used, or refused by name."""

import sys
import types

import pytest
import torch

from equipoise.app.data_loading import load_data
from equipoise.app.option_checks import SettingsError
from equipoise.app.settings import RunSettings
from equipoise.data import DataSet, Records


def test_a_field_that_no_loss_uses_is_refused(monkeypatch):
    def records():
        labels = torch.tensor([0, 1, 0, 1])
        rows = Records({"input": torch.zeros(4, 2), "label": labels, "wave": torch.ones(4)})
        return DataSet("toy", train=rows, test=rows, population=4, num_classes=2)

    module = types.ModuleType("weighted")
    module.records = records
    monkeypatch.setitem(sys.modules, "weighted", module)
    with pytest.raises(SettingsError, match="wave"):
        load_data(RunSettings(data="weighted:records"))
