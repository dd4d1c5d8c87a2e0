"""What a table or a data function declares is used, or refused by name; a statement names what ran."""

import sys
import types

import pytest
import torch

import equipoise._version
from equipoise.app.data_loading import load_data
from equipoise.app.option_checks import SettingsError
from equipoise.app.settings import RunSettings
from equipoise.data import DataFileError, DataSet, Records
from equipoise.data.readers.schema import load_table
from equipoise.statements.statement import versions


def test_a_logarithmic_target_is_refused(tmp_path):
    (tmp_path / "t.csv").write_text("x,y\n1,2\n3,4\n")
    (tmp_path / "t.schema.toml").write_text(
        'population = 2\ntarget = "y"\n[columns.x]\ntype = "number"\nlow = 0\nhigh = 9\n'
        '[columns.y]\ntype = "number"\nlow = 0\nhigh = 9\nlog = true\n'
    )
    with pytest.raises(DataFileError, match=r"the target 'y' must be .* without log"):
        load_table(tmp_path / "t.csv", test_share=0.5)


def test_a_field_that_no_loss_uses_is_refused(monkeypatch):
    def records():
        rows = Records(
            {"input": torch.zeros(4, 2), "label": torch.tensor([0, 1, 0, 1]), "weight": torch.ones(4)}
        )
        return DataSet("toy", train=rows, test=rows, population=4, num_classes=2)

    module = types.ModuleType("weighted")
    module.records = records
    monkeypatch.setitem(sys.modules, "weighted", module)
    with pytest.raises(SettingsError, match="weight"):
        load_data(RunSettings(data="weighted:records"))


def test_a_statement_names_the_version_of_the_code_that_ran(monkeypatch):
    monkeypatch.setattr(
        "equipoise.statements.statement.__version__", equipoise._version.__version__ + ".next"
    )
    assert versions.__wrapped__()["equipoise"].endswith(".next")


def test_flowers_telemetry_is_off_though_flower_was_imported_first(monkeypatch):
    telemetry = pytest.importorskip("flwr.supercore.telemetry")
    monkeypatch.setattr(telemetry, "FLWR_TELEMETRY_ENABLED", "1")
    monkeypatch.delenv("FLWR_TELEMETRY_ENABLED", raising=False)
    for name in [name for name in sys.modules if name.startswith("equipoise.federated.flower")]:
        monkeypatch.delitem(sys.modules, name)
    import equipoise.federated.flower  # noqa: F401

    assert telemetry.FLWR_TELEMETRY_ENABLED == "0"
