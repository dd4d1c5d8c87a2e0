"""What a table or a data function declares is used, or refused by name; a statement names what ran."""

import sys
import types

import pytest
import torch

import equipoise._version
from equipoise.app.data_loading import load_data
from equipoise.app.option_checks import SettingsError
from equipoise.app.settings import RunSettings
from equipoise.data import DataSet, Records
from equipoise.statements.statement import versions


def test_a_field_that_no_loss_uses_is_refused(monkeypatch):
    def records():
        rows = Records(
            {"input": torch.zeros(4, 2), "label": torch.tensor([0, 1, 0, 1]), "wave": torch.ones(4)}
        )
        return DataSet("toy", train=rows, test=rows, population=4, num_classes=2)

    module = types.ModuleType("weighted")
    module.records = records
    monkeypatch.setitem(sys.modules, "weighted", module)
    with pytest.raises(SettingsError, match="wave"):
        load_data(RunSettings(data="weighted:records"))


def test_a_statement_names_the_version_of_the_code_that_ran(monkeypatch):
    monkeypatch.setattr(
        "equipoise.statements.statement.__version__", equipoise._version.__version__ + ".next"
    )
    assert versions.__wrapped__()["equipoise"].endswith(".next")
