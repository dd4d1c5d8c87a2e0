"""A step makes the host wait for a device no more often than it did, nor launch more, in no regime."""

import pytest
import torch

from benchmarks import host_waits


@pytest.mark.parametrize("micro_batch_size", [None, 2])
@pytest.mark.parametrize("regime", host_waits.REGIMES)
def test_a_step_waits_and_launches_no_more_often_than_it_did(tmp_path, regime, micro_batch_size):
    if regime in ("gpt2", "lora"):
        pytest.importorskip("transformers", reason="needs an optional package")
    if regime == "lora":
        pytest.importorskip("peft", reason="needs an optional package")
    torch.manual_seed(0)
    waits, _, launches = host_waits.of_a_step(
        host_waits.REGIMES[regime](), tmp_path / "run", micro_batch_size
    )
    assert waits.total() == host_waits.WAITS  # the noise needs a digest, and so does the next draw
    assert micro_batch_size is not None or launches <= host_waits.LAUNCHES
    assert all(place.startswith("_host.py") for place in waits)
