"""Noise over steps: its strategies, what they cost, and what they are refused for."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.linalg import toeplitz

from equipoise import privacy as ep
from equipoise.privacy import (
    epsilon,
    gaussian_epsilon,
    optimal_coefficients,
    prefix_error,
    square_root_coefficients,
)
from equipoise.privacy.bounds.bounded import make_bounded
from equipoise.privacy.mechanisms.toeplitz import (
    geometric_coefficients,
    geometric_prefix_error,
    inverse_coefficients,
    least_error_decay,
    squared_sensitivity,
)

DELTA = 1e-5


def strategy(coefficients, count):
    """C, dense."""
    column = np.zeros(count)
    column[: len(coefficients)] = coefficients[:count]
    return np.tril(toeplitz(column))


def test_the_square_root_and_its_inverse():
    root = strategy(square_root_coefficients(50), 50)
    assert np.abs(root @ root - np.tril(np.ones((50, 50)))).max() < 1e-6
    found = inverse_coefficients(square_root_coefficients(5), 5)
    assert found.tolist() == [1, -1 / 2, -1 / 8, -1 / 16, -5 / 128]
    dense = np.linalg.inv(strategy(square_root_coefficients(3), 9))
    assert inverse_coefficients(square_root_coefficients(3), 9) == pytest.approx(dense[:, 0], abs=1e-12)


@pytest.mark.parametrize(
    ("coefficients", "exact"),
    [
        (square_root_coefficients(4), True),
        ((1.0, 0.9, 0.9, 0.1, 0.1), True),
        (optimal_coefficients(5, 9), True),
        ((1.0, 0.5, 0.8), False),
        ((1.0, 0.1, 0.8), False),
        ((1.0, -0.5, 0.3), False),
    ],
)
@pytest.mark.parametrize(("times", "apart"), [(1, 1), (2, 1), (3, 2), (3, 3), (2, 6), (3, 4), (2, 9)])
def test_sensitivity_against_every_pattern_and_sign(coefficients, exact, times, apart):
    count = 9
    columns, most = strategy(coefficients, count).T, 0.0
    for k in range(1, times + 1):
        for steps in itertools.combinations(range(count), k):
            if all(b - a >= apart for a, b in itertools.pairwise(steps)):
                for signs in itertools.product((-1, 1), repeat=k - 1):
                    moved = np.array([1, *signs]) @ columns[list(steps)]
                    most = max(most, float(moved @ moved))
    found = squared_sensitivity(coefficients, times, apart, count)
    assert found >= most - 1e-12
    if exact or times == 1 or apart >= len(coefficients):  # no row in common
        assert found == pytest.approx(most)


def test_prefix_error_is_that_of_the_dense_matrices():
    def dense(coefficients):
        found = np.tril(np.ones((30, 30))) @ np.linalg.inv(strategy(coefficients, 30))
        return np.sqrt((found**2).sum() / 30)

    c = square_root_coefficients(4)
    assert prefix_error(c, 30) == pytest.approx(dense(c) * np.linalg.norm(c))
    assert prefix_error([1.0], 2400) == pytest.approx(math.sqrt(2401 / 2))
    for decay in (0.3, 0.95):
        expected = dense(geometric_coefficients(decay, 30)) / math.sqrt(1 - decay**2)
        assert geometric_prefix_error(decay, 30) == pytest.approx(expected)


@pytest.mark.parametrize("bands", [2, 40])
def test_optimal_coefficients_are_a_minimum(bands):
    best = optimal_coefficients(bands, 300)
    error = prefix_error(best, 300)
    assert error < prefix_error(square_root_coefficients(bands), 300)
    for k in range(1, bands):
        for moved in (best[k] * 1.05, best[k] * 0.95):
            assert prefix_error((*best[:k], moved, *best[k + 1 :]), 300) >= error


@pytest.mark.parametrize("count", [1, 2, 7, 100_000])
def test_the_search_does_better_than_the_square_root_at_every_size(count):
    for bands in (2, 64):
        best, root = optimal_coefficients(bands, count), square_root_coefficients(min(bands, count))
        assert list(best) == sorted(best, reverse=True)
        better = prefix_error(best, count) / prefix_error(root, count)
        assert better == 1 if count == 1 else better < 1
    # If (2 + (1 - c)^2) (1 + c^2) / 2 is least, 2 c^3 - 3 c^2 + 4 c - 1 = 0.
    (root,) = [r.real for r in np.roots([2, -3, 4, -1]) if abs(r.imag) < 1e-9]
    known = {2: root, 100_000: 0.97322}
    assert count not in known or optimal_coefficients(2, count)[1] == pytest.approx(known[count], abs=1e-4)


@pytest.mark.parametrize(("times", "apart", "count"), [(8, 54, 400), (21, 117, 2400), (1, 50, 50), (4, 1, 4)])
def test_the_decay_of_least_error_is_a_minimum(times, apart, count):
    def error(decay):
        c = geometric_coefficients(decay, count)
        return (
            geometric_prefix_error(decay, count) ** 2
            * (1 - decay**2)
            * squared_sensitivity(c, times, apart, count)
        )

    least = min(error(1 - gap) for gap in np.geomspace(1e-5, 0.999, 1000))
    assert error(least_error_decay(times, apart, count)) <= least * (1 + 1e-4)


def test_only_ratios_of_coefficients_matter():
    noise = ep.BandedGaussian((2.0, 1.0), 3.0)
    assert noise == ep.BandedGaussian((1.0, 0.5), 3.0)
    columns = np.linalg.inv(np.linalg.inv(strategy(noise.coefficients, 8)) * math.hypot(*noise.coefficients))
    assert np.linalg.norm(columns[:, :7], axis=0) == pytest.approx(np.ones(7), abs=1e-6)


@pytest.mark.parametrize(
    ("coefficients", "message"),
    [
        ((0.0, 1.0), "first above 0"),
        ((1.0, math.nan), "finite"),
        ((1.0, 1.0001), "grows"),  # to 80 times its size within 4,096 steps, and on
        (np.poly([0.98] * 6), "to more than"),
    ],
)
def test_coefficients_that_make_no_noise_are_refused(coefficients, message):
    with pytest.raises(ValueError, match=message):
        ep.BandedGaussian(coefficients, 1.0)


@pytest.mark.parametrize("size", [0.5, 0.97, 0.999, 1.001, 1.05])
def test_noise_grows_where_a_pole_lies_outside_the_unit_circle(size):
    for others in ([], [0.3], [0.5 + 0.4j, 0.5 - 0.4j], [-0.9, 0.2]):
        for pole in ([size], [-size], [size * (0.6 + 0.8j), size * (0.6 - 0.8j)]):
            coefficients = tuple(np.poly([*others, *pole]).real)
            if size < 1:
                ep.BandedGaussian(coefficients, 1.0)
            else:
                with pytest.raises(ValueError, match="grows without end"):
                    ep.BandedGaussian(coefficients, 1.0)


EPOCHS = ep.FixedEpochs(10, 80, 24, same_slots=True)  # eight draws an epoch, three epochs


def plan_of(mechanism, sampling=EPOCHS, relation="add_or_remove_one"):
    return ep.PrivacyPlan([ep.Release("a", 5.0, mechanism)], sampling, relation)


def take(ledger, size, parameters):
    draw = ledger.open("batch", parameters)
    zero = {key: ep.Private(torch.zeros(size), draw) for key in ("v", "w")}
    return ledger.release(draw, {"a": make_bounded(zero, 1.5, 3.0, draw)})["a"]


@pytest.mark.parametrize(
    ("bands", "relation"), [(1, "add_or_remove_one"), (6, "replace_one"), (10, "add_or_remove_one")]
)
def test_groups_in_turn_amplify_noise_over_as_many_steps(bands, relation):
    sampling = ep.CyclicPoisson(60, 6000, 205, 10)
    z = 4.0 if relation == "replace_one" else 2.0
    plan = plan_of(ep.BandedGaussian(square_root_coefficients(bands), z), sampling, relation)
    poisson = ep.Poisson(600, 6000, 21)
    expected = plan_of(ep.Gaussian(z), poisson, relation).epsilon(DELTA).value
    assert plan.epsilon(DELTA).value == pytest.approx(expected, rel=1e-6)


def test_draws_of_groups_that_were_not_released_leave_their_epochs_to_pay():
    """Eight releases, all in the turn of one group, are eight participations and not ceil(8 / 4)."""
    sampling = ep.CyclicPoisson(6, 600, 32, 4)
    plan = plan_of(ep.BandedGaussian(square_root_coefficients(4), 2.0), sampling)
    ledger = ep.Ledger(plan)
    for step in range(32):
        if step % 4 == 0:
            take(ledger, 3, f"p{step}")
        else:
            ledger.open("batch", f"p{step}")
    assert ledger.record.epochs == {"batch": 8}
    assert ledger.spent(DELTA).value == pytest.approx(plan.epsilon(DELTA).value)


@pytest.mark.parametrize("made", [range(8), (0, 1, 2, 5, 6), (1, 3, 5, 7)])
@pytest.mark.parametrize("sampling", [ep.FullBatch(40, 8), ep.FixedEpochs(20, 40, 8)])
@pytest.mark.parametrize("coefficients", [(1.0, 0.5), square_root_coefficients(6), (1.0, -0.3, 0.1)])
def test_a_record_in_draws_that_follow_each_other_costs_the_sensitivity_of_them_all(
    coefficients, sampling, made
):
    """No less than its worst choice of draws and signs, with the noise afresh after every gap."""
    plan = plan_of(ep.BandedGaussian(coefficients, 2.0), sampling)
    (pattern,) = plan.patterns()
    left = left_of(coefficients, made) / np.linalg.norm(coefficients) / 2.0
    slots = sampling.draws_per_epoch
    epochs = {ordinal // slots for ordinal in made}
    met = [[i for i, ordinal in enumerate(made) if ordinal // slots == epoch] for epoch in epochs]
    most = 0.0
    for steps in itertools.product(*met):  # one draw of each epoch
        for signs in itertools.product((-1, 1), repeat=len(steps)):
            most = max(most, float(np.square(left[:, steps] @ signs).sum()))
    event = plan.event({pattern: len(made)}, {"batch": len(epochs)} if sampling.takes_turns else None)
    cost = epsilon(event, DELTA).value
    assert cost >= gaussian_epsilon(math.sqrt(most), DELTA) * (1 - 1e-9)
    if min(coefficients) > 0 and slots == 1 and made == range(len(made)):
        assert cost == pytest.approx(gaussian_epsilon(math.sqrt(most), DELTA))


def left_of(coefficients, made):
    """The strategy of the draws that are released of eight: the noise starts afresh after every gap."""
    matrix, begun = strategy(coefficients, 8), 0
    for ordinal in range(8):
        if ordinal - 1 not in made:
            begun = ordinal
        matrix[ordinal, :begun] = 0
    return matrix[np.ix_(made, made)]


MECHANISMS = [
    *(ep.BandedGaussian(square_root_coefficients(b), 2.0) for b in (2, 4, 8)),
    ep.OneStepGaussian(0.9, 2.0),
]


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=repr)
def test_a_run_with_gaps_costs_no_less_than_its_matrix(mechanism):
    """For every set of draws of two epochs of four."""
    plan = plan_of(mechanism, ep.FixedEpochs(10, 40, 8, same_slots=True))
    (pattern,) = plan.patterns()
    # Of all its coefficients, those beyond the run too.
    norm = np.linalg.norm(mechanism.first_coefficients(1000)) * 2.0
    for made in itertools.chain(*(itertools.combinations(range(8), count) for count in range(1, 9))):
        left = left_of(mechanism.first_coefficients(8), made) / norm
        slots = [[i for i, o in enumerate(made) if o % 4 == slot] for slot in range(4)]
        most = max(float(np.square(left[:, slot].sum(axis=1)).sum()) for slot in slots)
        epochs = len({ordinal // 4 for ordinal in made})
        cost = epsilon(plan.event({pattern: len(made)}, {"batch": epochs}), DELTA).value
        assert cost >= gaussian_epsilon(math.sqrt(most), DELTA) * (1 - 1e-9), made
        assert cost <= plan.epsilon(DELTA).value * (1 + 1e-9)


@pytest.mark.parametrize("mechanism", [ep.BandedGaussian((1.0, 0.5), 2.0), ep.OneStepGaussian(0.5, 2.0)])
@pytest.mark.parametrize("sizes", [(5, 4), (1, 5)])
def test_sums_of_other_shapes_than_before_are_refused_and_cost_nothing(sizes, mechanism):
    """Noise of one number, stretched to five, would be the same for all of them."""
    ledger = ep.Ledger(plan_of(mechanism))
    take(ledger, sizes[0], "p0")
    spent = ledger.spent(DELTA).value
    with pytest.raises(ep.LedgerError, match=rf"'v': 'torch.float32\[{sizes[1]}\]'.*Nothing was released"):
        take(ledger, sizes[1], "p1")
    assert ledger.spent(DELTA).value == spent
    assert sum(ledger.record.used.values()) == 1
    take(ledger, sizes[1], "p2")  # after a gap the noise starts afresh
