"""``equipoise check``: proved, or what stands against it."""

import sys

import pytest

MODELS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.layer, self.how = nn.Linear(64, 10), how

    def forward(self, x):
        out = self.layer(x.flatten(1))
        if self.how == "place":
            out = out * torch.arange(len(x)).add(1).sign().unsqueeze(1)
        if self.how == "branch" and bool(x.isnan().any()):
            raise ValueError("no picture")
        if self.how == "mixed":
            out = out - out.mean(0)
        return out


def apart(dataset):
    return Net("apart")


def place(dataset):
    return Net("place")


def mixed(dataset):
    return Net("mixed")


def branch(dataset):
    return Net("branch")
"""


@pytest.mark.parametrize(
    ("how", "word", "said"),
    [
        ("apart", "proved", ""),
        ("place", "compared", "checked_models.py, line 14"),
        ("branch", "compared", "checked_models.py, line 15"),
        ("mixed", "refused", "checked_models.py, line 18"),
    ],
)
def test_a_proof_or_what_stands_against_it(how, word, said, equipoise, tmp_path, monkeypatch):
    (tmp_path / "checked_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "checked_models", raising=False)
    found = equipoise(f"check checked_models:{how} --data digits --json")
    assert (found.code, found.value["independence"]) == (int(how != "apart"), word), found.err
    assert said in found.value["reason"]
