import pytest
import torch

from equipoise.data.readers.files import DataFileError
from equipoise.data.records import DataSet, Records


def rows(n: int = 6, classes: int = 3) -> Records:
    generator = torch.Generator().manual_seed(0)
    return Records(
        {"input": torch.randn(n, 2, generator=generator), "label": torch.arange(n) % classes},
        num_classes=classes,
    )


def test_indexing_gives_batches():
    records = rows()
    batch = records[torch.tensor([4, 1])]
    assert batch["input"].shape == (2, 2)
    assert torch.equal(batch["label"], torch.tensor([1, 1]))
    assert torch.equal(batch["input"][0], records.fields["input"][4])
    assert records[0]["input"].shape == (2,)
    assert records[-1]["label"].item() == 2
    assert len(records[1:3]["label"]) == 2
    assert records[torch.tensor([True, False] * 3)]["label"].tolist() == [0, 2, 1]
    assert records[torch.empty(0, dtype=torch.int64)]["input"].shape == (0, 2)
    assert [int(record["label"]) for record in records] == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("index", [6, -7, torch.tensor([6]), torch.tensor([-1]), torch.tensor([True])])
def test_indices_out_of_range(index: object):
    with pytest.raises(IndexError):
        rows()[index]  # type: ignore[index]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "at least the field"),
        ({"input": [1.0, 2.0]}, "not a tensor"),
        ({"input": torch.tensor(1.0)}, "not a tensor"),
        ({"input": torch.zeros(3), "label": torch.tensor([0, 1])}, "numbers of records"),
        ({"input": torch.zeros(2), "label": torch.tensor([0, 3])}, "a label lies outside 0 .. 2"),
        ({"input": torch.zeros(2), "label": torch.tensor([-1, 0])}, "a label lies outside 0 .. 2"),
        ({"input": torch.zeros(2), "label": torch.tensor([0.0, 1.0])}, "whole class number"),
        ({"input": torch.zeros(2), "label": torch.tensor([True, False])}, "whole class number"),
        ({"input": torch.zeros(2), "label": torch.tensor([[0], [1]])}, r"squeeze"),
        ({"input": torch.tensor([0.0, float("nan")])}, "in 1 records .the first is number 1"),
        ({"input": torch.tensor([[0.0, float("inf")], [-float("inf"), 1.0]])}, "in 2 records"),
    ],
)
def test_bad_fields_are_refused(fields: dict, message: str):
    with pytest.raises(DataFileError, match=message):
        Records(fields, num_classes=3)


def test_split_is_a_partition_fixed_by_its_seed():
    records = Records({"input": torch.arange(50)})
    first, second = records.split(0.6, seed=3)
    assert len(first) == 30
    together = torch.cat([first.fields["input"], second.fields["input"]])
    assert torch.equal(together.sort().values, torch.arange(50))
    again, _ = records.split(0.6, seed=3)
    other, _ = records.split(0.6, seed=4)
    assert torch.equal(first.fields["input"], again.fields["input"])
    assert not torch.equal(first.fields["input"], other.fields["input"])


def test_fingerprint_follows_content_names_types_and_shapes():
    x = torch.arange(6.0).reshape(3, 2)
    base = Records({"input": x}).fingerprint()
    assert base == Records({"input": x.clone()}).fingerprint()
    changed = x.clone()
    changed[1, 1] += 1e-6
    others = [
        Records({"input": changed}),
        Records({"other": x}),
        Records({"input": x.double()}),
        Records({"input": x.reshape(3, 1, 2)}),
        Records({"input": x[:2]}),
        Records({"input": x.flip(0)}),
        Records({"input": x, "label": torch.zeros(3, dtype=torch.int64)}),
    ]
    prints = [base, *(other.fingerprint() for other in others)]
    assert len(set(prints)) == len(prints)
    transposed = Records({"input": torch.ones(2, 3).t()})
    assert transposed.fingerprint() == Records({"input": torch.ones(3, 2)}).fingerprint()
    odd = Records({"input": torch.ones(2, dtype=torch.bfloat16), "empty": torch.ones(2, 0)})
    assert len(odd.fingerprint()) == 64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"population": 0}, "population"),
        ({"population": 2.5}, "population"),
        ({"population": True}, "population"),
        ({"num_classes": 1}, "num_classes"),
        ({"num_classes": 2}, "outside 0 .. 1"),
        ({"class_names": ("a",)}, "class_names"),
        ({"train": Records({"input": torch.zeros(2)})}, "train lacks the fields"),
        (
            {"test": Records({"input": torch.zeros(2, 3), "label": torch.zeros(2, dtype=torch.int64)})},
            "Prepare both",
        ),
    ],
)
def test_data_set_checks_its_parts(changes: dict, message: str):
    arguments = {"name": "toy", "train": rows(), "test": rows(), "population": 6, "num_classes": 3} | changes
    with pytest.raises(DataFileError, match=message):
        DataSet(**arguments)
