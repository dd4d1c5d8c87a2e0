"""Models as users bring them, of transformers and of other repositories: rows are those of single records."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from architectures import ARCHITECTURES, TRANSFORMERS
from model_coverage import cover, training_of

QUICK = ["BERT", "GPT-2, padded", "ViT", "U-Net", "GRU tagger", "graph network", "Mamba-like scan"]
SEEDED = ["BERT", "RoBERTa", "DistilBERT", "ViT", "BERT, padded", "DeBERTa"]


@pytest.mark.wide
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES]
)
def test_an_architecture_trains_by_rules_alone(name):
    if name in TRANSFORMERS:
        pytest.importorskip("transformers", reason="needs the extra hf")
    found = cover(ARCHITECTURES[name])
    assert found.worst < 1e-5  # float32, against float64
    assert not found.dense


@pytest.mark.wide
@pytest.mark.parametrize(("name", "seed"), [(name, seed) for name in SEEDED for seed in range(4)])
def test_a_gradient_that_vanishes_is_no_reason_to_refuse_a_model(name, seed):
    """A softmax does not see what the bias of the keys adds: its gradient is rounding, whatever the seed."""
    pytest.importorskip("transformers", reason="needs the extra hf")
    torch.manual_seed(seed)
    one = ARCHITECTURES[name]
    training = training_of(one, one.model(), one.records(12))
    assert {covered.how for covered in training.engine.coverage()} == {"rule"}
