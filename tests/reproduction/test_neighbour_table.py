"""Ordinary models and pipelines: one record moves the sum by its bound, and nobody else."""

from __future__ import annotations

import pytest

from reproduction.neighbours import PIPELINES, audit


@pytest.mark.slow
@pytest.mark.parametrize("name", PIPELINES)
def test_nothing_else_moves(name):
    assert audit(name).holds


def test_one_pipeline_in_short():
    assert audit("LoRA by hand", positions=1, threads=(1,)).holds
