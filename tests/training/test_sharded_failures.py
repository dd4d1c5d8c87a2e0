"""Records that fail while processes share every forward of a model: they weigh nothing, and nobody waits."""

import pytest
import torch
from failing_ranks import CASES, CUT, OTHER_PARTS, SEVERAL, trained, work

IN_TWO_PROCESSES = work


def in_one_process(ways: dict[int, str], failing: list[str], **options) -> torch.Tensor:
    return trained({i: "loss" if way in failing else way for i, way in ways.items()}, **options)


@pytest.mark.parametrize("name", [*CASES, *CUT, "checkpointed"])
def test_a_record_that_fails_weighs_what_it_does_in_one_process(name, by_rank):
    first, second = (found[name] for found in by_rank)
    assert torch.equal(first, second)
    options = {"checkpointed": True} if name == "checkpointed" else {}
    ways = (CASES | CUT).get(name, SEVERAL)
    # A tensor parallel model runs other parts as in one process, if PyTorch does.
    alone = in_one_process(ways, ["other operation"] if name in CUT else OTHER_PARTS, **options)
    assert (first - alone).norm() <= 1e-12 * alone.norm()


def test_a_failing_record_is_missed(by_rank):
    assert not torch.allclose(by_rank[0]["loss"], by_rank[0]["other operation"], rtol=1e-6)
