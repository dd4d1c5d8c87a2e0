"""Per-sample gradients of models of which two processes hold parts, fully sharded or tensor parallel."""

import re

import parallel_engine
import pytest
import torch
from sharded_engine import CASES, work

IN_TWO_PROCESSES = work


@pytest.mark.parametrize("name", CASES)
def test_rows_and_sums_are_those_of_one_process(name, by_rank):
    for found in by_rank:
        assert "raised" not in found[name], found[name]["raised"]
        assert found[name]["error"] < 1e-12
        assert found[name]["same plan"]
        assert found[name]["covered"]
        assert found[name]["still sharded"]


def test_what_has_no_rule_is_refused_by_name(by_rank):
    for found in by_rank:
        said = found["refusals"]["values"]
        assert said.startswith("CoverageError")
        assert "weight" in said
        assert "freeze" in said


def test_sums_stay_float32_in_mixed_precision(by_rank):
    assert all(found["bf16"] <= 1 + 1e-3 for found in by_rank)


@pytest.mark.parametrize("name", parallel_engine.CASES)
def test_rows_of_a_tensor_parallel_model_are_those_of_the_whole(name, by_rank):
    for found in (found["parallel"][name] for found in by_rank):
        wrong = {what: error for what, error in found["errors"].items() if not error < 1e-12}
        assert not wrong
        assert found["same plan"]
        assert found["covered"]
        assert found["placed"]
        # Weights and branches follow from norms: the same bits everywhere.
        assert found["same norms"]
    assert torch.equal(*(found["parallel"][name]["copies"] for found in by_rank))


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            "sequence",
            r"CoverageError.*block\.norm\.weight.*layer_norm.*sequence parallel.*parallelize_module",
        ),
        ("of_loss", r"TypeError.*loss_parallel.*output_layouts=Replicate"),
        ("values", r"CoverageError.*layer\.weight.*hidden.*before fully_shard or parallelize_module"),
    ],
)
def test_what_tensor_parallel_models_may_not_do_is_refused_by_name(what, said, by_rank):
    for found in by_rank:
        assert re.match(said, found["parallel"]["refusals"][what], re.DOTALL)
