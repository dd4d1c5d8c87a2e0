"""Noise on the grid: its law to the last cell, its sensitivity, and that nothing but integers meets data."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
import torch
from scipy import stats

from equipoise import privacy as ep
from equipoise.privacy import capped
from equipoise.privacy.bounds.bounded import make_bounded
from equipoise.privacy.mechanisms import grid_gaussian as grid
from equipoise.privacy.mechanisms.grid_gaussian import GridStream, grid_unit, to_grid
from equipoise.published import PublishedPlan, Unproven
from equipoise.statements import check_published, check_with_journal, statement_of


def cells(bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Integers within four standard deviations, and the normal probability of their cells."""
    ks = np.arange(-4 * 2**bits, 4 * 2**bits)
    return ks, stats.norm.cdf((ks + 1) / 2**bits) - stats.norm.cdf(ks / 2**bits)


def p_value(found: np.ndarray, bits: int) -> float:
    ks, chances = cells(bits)
    counts = np.array([(found == k).sum() for k in ks])
    counts, chances = np.append(counts, len(found) - counts.sum()), np.append(chances, 1 - chances.sum())
    wide = chances * len(found) >= 5
    pooled = [np.append(x[wide], x[~wide].sum()) for x in (counts, chances * len(found))]
    return float(stats.chisquare(*pooled).pvalue)


# With the larger slack one comparison in three is done in decimals: both ways must have the same law.
@pytest.mark.parametrize("slack", [2.0**-40, 0.15])
@pytest.mark.parametrize("bits", [0, 2])
def test_the_law_cell_by_cell(bits, slack):
    count = 40_000 if slack < 0.1 else 4_000
    assert p_value(GridStream(b"k" * 32, bits, slack).draw(count), bits) > 1e-4
    assert bits != 2 or p_value(np.round(GridStream(b"k" * 32, 4).draw(40_000) * 0.95 / 4), 2) < 1e-6


def test_the_law_at_full_width():
    found = GridStream(b"k" * 32).draw(100_000) / 2.0**grid.BITS
    assert stats.kstest(found, "norm").pvalue > 1e-4
    assert stats.kstest(found * 0.96, "norm").pvalue < 1e-6


def test_comparisons_that_need_more_bits():
    """A uniform number that agrees with the probability on all its bits is decided by the next ones."""
    asked = []
    bits = random.Random(0)

    def more():
        asked.append(1)
        return bits.getrandbits(64)

    v, f = 1, 2**63  # x = 1/2: exp(-(1/2 + 1/8))
    u = math.floor(math.exp(-0.625) * 2**63) // 2**12 * 2**12
    answers = {offset: grid._accepted_exactly(v, f, u + offset, more) for offset in (-(2**20), 2**20)}
    assert answers == {-(2**20): True, 2**20: False}
    assert not asked
    # x begins with 64 zeros and the uniform number with 63 ones: the next bits of both decide
    answers = [grid._accepted_exactly(0, 0, 2**63 - 1, more) for _ in range(40)]
    assert set(answers) == {True}, "1 - x^2/2 with x below 2^-64 is above any number that is not all ones"
    assert asked
    threshold = grid._thresholds(64)[0]
    assert grid._whole_exactly(threshold - 1, more) == 0
    assert grid._whole_exactly(threshold + 1, more) == 1
    below, above = (grid._whole_exactly(threshold, lambda bits=bits: bits) for bits in (0, 2**64 - 1))
    assert (below, above) == (0, 1)


@pytest.mark.parametrize("multiplier", [0.5, 1.0, 20.0])
@pytest.mark.parametrize("coordinates", [1, 1000])
def test_the_noise_is_the_multiplier_times_the_sensitivity_on_the_grid(coordinates, multiplier):
    """Of two sums at the bound's distance, the rounded ones are at most 2^24 / z units apart."""
    bound = 3.0
    unit = grid_unit(bound, coordinates, multiplier)
    rng = np.random.default_rng(0)
    allowed = 2.0**grid.BITS / multiplier
    for _ in range(50):
        a, step = rng.normal(size=coordinates) * 100, rng.normal(size=coordinates)
        # all rounding errors on one side: the worst there is
        a = np.round(a / unit) * unit + 0.4999 * unit
        b = a + step * bound / np.linalg.norm(step)
        apart = to_grid(torch.from_numpy(a), unit) - to_grid(torch.from_numpy(b), unit)
        assert np.linalg.norm(apart.astype(float)) <= allowed
    assert 2.0**grid.BITS * unit >= multiplier * bound, "never less noise than without a grid"
    assert 2.0**grid.BITS * unit <= multiplier * bound * 1.001


def test_a_grid_too_coarse_is_refused_before_anything_is_charged():
    with pytest.raises(ep.LedgerError, match="half rounding"):
        grid_unit(1.0, 10**14, 1.0)
    plan = ep.PrivacyPlan([ep.Release("sum", 5.0, ep.Gaussian(1e7))], ep.FullBatch(100, 4))
    ledger = ep.Ledger(plan.hardened())
    with pytest.raises(ep.LedgerError, match="half rounding"):
        release(ledger)
    assert not any(entry.kind == "release" for entry in ledger.journal.entries())


PLAN = ep.PrivacyPlan([ep.Release("sum", 5.0, ep.Gaussian(2.0))], ep.FullBatch(100, 400))


def release(ledger, value=1.0, parameters=None):
    draw = ledger.open("batch", parameters)
    sums = {"sum": capped(ep.Private(torch.full((3,), value), draw), upper=5.0)}
    return ledger.release(draw, sums)["sum"]["sum"]


def test_releases_are_odd_multiples_of_half_a_unit_with_the_planned_noise():
    ledger = ep.Ledger(PLAN.hardened(), secrets=ep.Secrets(reproducible_seed=0))
    unit = grid_unit(5.0, 1, 2.0)
    found = np.array([float(release(ledger)) for _ in range(400)])
    assert stats.kstest((found - 3.0) / 10.0, "norm").pvalue > 1e-4
    halves = to_grid(torch.tensor([1.25, -1.25], dtype=torch.float64), unit)
    assert halves.dtype == np.int64
    assert halves[0] == -halves[1]
    rows = {"a": torch.ones(2, 3, dtype=torch.float64), "b": torch.ones(4)}
    ledger = ep.Ledger(
        ep.PrivacyPlan([ep.Release("g", 9.0, ep.Gaussian(1e-3))], ep.FullBatch(10, 2)).hardened()
    )
    draw = ledger.open("batch")
    made = make_bounded({n: ep.Private(v, draw) for n, v in rows.items()}, 4.0, 8.0, draw)
    out = ledger.release(draw, {"g": made})["g"]
    assert {n: (v.shape, v.dtype) for n, v in out.items()} == {n: (v.shape, v.dtype) for n, v in rows.items()}
    assert float((out["a"] - 1).abs().max()) < 0.1


def test_a_repeated_step_gets_the_same_noise_and_another_kind_of_noise_is_refused(tmp_path):
    secrets = ep.Secrets(reproducible_seed=3)
    first = ep.Ledger(PLAN.hardened(), journal=ep.Journal(tmp_path / "j"), secrets=secrets)
    found = release(first, parameters="p")
    again = ep.Ledger(PLAN.hardened(), journal=ep.Journal(tmp_path / "j"), secrets=secrets)
    assert float(release(again, parameters="p")) == float(found)
    assert again.spent(1e-5).value == first.spent(1e-5).value
    with pytest.raises(ep.LedgerError, match="another plan"):
        ep.Ledger(PLAN, journal=ep.Journal(tmp_path / "j"), secrets=secrets)


def test_a_statement_says_which_noise_it_was_and_what_is_not_on_the_grid_is_refused():
    ledger = ep.Ledger(PLAN.hardened())
    release(ledger)
    statement = json.loads(statement_of(ledger, delta=1e-5).to_json())
    assert statement["noise"] == "grid"
    entries = ledger.journal.entries()
    assert all(f.ok is not False for f in check_with_journal(statement, entries) + check_published(statement))
    statement["noise"] = "floating_point"
    for found in (check_with_journal(statement, entries), check_published(statement)):
        assert any(f.ok is False for f in found)
    shared = ep.JointGaussian(("a",), [[1.0]], lambda norms: norms.clamp(max=1.0)[:, None], (1.0,))
    with pytest.raises(ep.PlanError, match=r"joint_gaussian.*independent"):
        ep.PrivacyPlan([ep.Release("a", 1.0, shared)], ep.FullBatch(10, 2)).hardened()
    for releases in ([], PLAN.releases):
        with pytest.raises(
            ep.PlanError, match=r"hardened=True.*\['update'\].*floating point.*leave hardened"
        ):
            PublishedPlan(releases, ep.FullBatch(100, 400), unproven=[Unproven("update")]).hardened()
    mixed = PublishedPlan(PLAN.hardened().releases, ep.FullBatch(100, 400), unproven=[Unproven("update")])
    ledger = ep.Ledger(mixed)
    assert ledger.journal.entries()[0].noise == "floating_point"
    assert statement_of(ledger, delta=1e-5).noise == "floating_point"


def test_what_is_too_close_to_tell_is_decided_exactly(monkeypatch):
    monkeypatch.setattr(grid, "_accepted_exactly", lambda *numbers: False)
    few, many = (len(GridStream(bytes(32), slack=slack)._candidates(1000)) for slack in (1.0, 0.0))
    assert 0 == few < 600 < many
