"""Samplers follow the law that their events assume."""

import itertools
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from scipy import stats

from equipoise import privacy as ep
from equipoise.privacy.noise.uniform import (
    keyed_hash,
    keyed_integers,
    uniform_integers,
    uniform_order,
    uniform_subset,
)
from equipoise.privacy.sampling import Sampling, sampling_from
from equipoise.training.owners import keys_of_ids
from equipoise.training.record_source import RecordSource

N, DRAWS, Q = 40, 3000, 0.2
SECRETS = ep.Secrets(reproducible_seed=11)


SCHEMES = [
    ep.Poisson(8, N, 10),
    ep.TruncatedPoisson(8, N, 10, 9),
    ep.CyclicPoisson(8, N, 10, 3),
    ep.WithoutReplacement(8, N, 10),
    ep.FullBatch(N, 10),
    ep.FixedEpochs(8, N, 10),
    ep.BallsInBins(8, N, 10),
    ep.BallsInBins(8, N, 10, bands=2),
]
every_scheme = pytest.mark.parametrize("sampling", SCHEMES, ids=lambda s: type(s).__name__)


@every_scheme
def test_samples_are_sorted_repeatable_and_fresh(sampling):
    """A step that is repeated with other parameters learns of others, unless turns are fixed."""
    a, b, c = (sampling.sample(SECRETS, i, N) for i in (3, 3, 4))
    assert a.dtype == torch.int64
    assert torch.equal(a, a.sort().values)
    assert torch.equal(a, b)
    assert isinstance(sampling, ep.FullBatch) or a.tolist() != c.tolist()
    assert sampling_from(sampling.describe()) == sampling
    secrets = ep.Secrets()
    one, two, again = (sampling.sample(secrets, ep.Draw("batch", 3, 3, of), N).tolist() for of in "aba")
    assert one == again
    assert (one == two) == isinstance(sampling, ep.FullBatch | ep.FixedEpochs | ep.BallsInBins)
    if not isinstance(sampling, ep.TruncatedPoisson | ep.CyclicPoisson):  # which ask for more than a size
        found = type(sampling).of_size(8.0, N, 10)
        assert (found.population, found.steps) == (N, 10)
        assert found.expected_size == (N if isinstance(found, ep.FullBatch) else 8)


def test_sizes_steps_and_numbers_follow_public_values():
    assert ep.Poisson(0.001, N, 1).sample(SECRETS, 0, N).shape == (0,)
    assert (
        100 < len(ep.Poisson(256, 60_000, 10).sample(SECRETS, 0, 30_000)) < 160
    )  # half the records are there
    found = ep.Poisson(batch_size=256, population=60_000, epochs=20)
    assert found == sampling_from(found.describe()) == ep.Poisson(256, 60_000, 4688)
    assert ep.Poisson(batch_size=718.5, population=1437, epochs=2).steps == 4  # rounding makes no fifth
    assert ep.Poisson(batch_size=100, population=1000, epochs=0.01).steps == 1
    draw = ep.Draw("batch", 0, secret=b"s" * 32)
    numbers = [draw.number("dropout", place) for place in range(200)]
    assert len(set(numbers)) == 200
    assert 2**62 <= max(numbers) < 2**63
    assert {number % 2 for number in numbers} == {0, 1}
    assert numbers[7] == int.from_bytes(draw.secret_bytes(8, "dropout", 7), "little") // 2
    pairs = torch.cartesian_prod(torch.arange(9), torch.arange(9))
    of_pairs, of_firsts = (keyed_integers(2**40, those, b"k" * 32) for those in (pairs, pairs[:, 0]))
    assert len(of_pairs.unique()) == 81
    assert torch.equal(of_firsts, of_pairs[pairs[:, 1] == 0].repeat_interleave(9))


BLOCKS = 1000
LARGE = [(10**6, 1000, 600), (10**9, 30_000, 40)]
"""Population, expected batch size and draws."""


def poisson_p_values(draw, population: int, batch: int, draws: int) -> dict[str, float]:
    """Two-sided tests that `draw(index)` has each record by itself with probability q, afresh every time."""
    rate, sampled = batch / population, [draw(index) for index in range(draws)]
    sizes = np.array([len(ids) for ids in sampled])
    # Of independent counts, whose number in a block of a draw is binomial with a mean of batch / BLOCKS.
    counts = np.stack([np.bincount(ids.numpy() * BLOCKS // population, minlength=BLOCKS) for ids in sampled])
    mean, variance = batch / BLOCKS, batch / BLOCKS * (1 - rate)
    spread = ((counts - mean) ** 2).sum() / variance
    common = sum(int(torch.isin(a, b).sum()) for a, b in itertools.pairwise(sampled))
    expected = (draws - 1) * population * rate**2
    sides = {
        "number of all": stats.norm.cdf((sizes.sum() - draws * batch) / np.sqrt(draws * batch * (1 - rate))),
        "numbers of draws": stats.chi2.cdf(((sizes - batch) ** 2).sum() / batch / (1 - rate), draws),
        "places": stats.chi2.cdf(((counts.sum(0) - draws * mean) ** 2).sum() / draws / variance, BLOCKS),
        "places in a draw": stats.norm.cdf(
            (spread / counts.size - 1) * np.sqrt(counts.size / (2 + 1 / mean))
        ),
        "common to two draws": stats.norm.cdf((common - expected) / np.sqrt(expected)),
        "no record twice": 0.5 if all(bool((ids.diff() > 0).all()) for ids in sampled) else 0.0,
    }
    return {name: float(2 * min(side, 1 - side)) for name, side in sides.items()}


@pytest.mark.parametrize(("population", "batch", "draws"), LARGE)
def test_poisson_draws_of_large_populations_have_the_exact_law(population, batch, draws):
    sampling = ep.Poisson(batch, population, draws)
    p_values = poisson_p_values(lambda i: sampling.sample(SECRETS, i, population), population, batch, draws)
    assert min(p_values.values()) > 1e-3, p_values


def of_strata(population, batch, index):
    """One record of each of `batch` equal strata: right frequencies and places, and no independence."""
    within = torch.randint(population // batch, (batch,), generator=torch.Generator().manual_seed(index))
    return torch.arange(batch) * (population // batch) + within


WRONG_DRAWS = {
    "number of all": lambda n, b, i: ep.Poisson(0.99 * b, n, 1).sample(SECRETS, i, n),
    "numbers of draws": lambda n, b, i: ep.WithoutReplacement(b, n, 1).sample(SECRETS, i, n),
    "places": lambda n, b, i: ep.Poisson(b, n, 1).sample(SECRETS, i, n - n // BLOCKS),  # never the last block
    "places in a draw": of_strata,
    "common to two draws": lambda n, b, i: ep.Poisson(b, n, 1).sample(SECRETS, i // 2, n),
    "no record twice": lambda n, b, i: ep.Poisson(b, n, 1).sample(SECRETS, i, n).repeat_interleave(2),
}
"""By the test that must notice it."""


@pytest.mark.parametrize("fault", WRONG_DRAWS)
@pytest.mark.parametrize(("population", "batch", "draws"), LARGE[:1])
def test_the_tests_of_the_law_reject_other_draws(fault, population, batch, draws):
    p_values = poisson_p_values(lambda i: WRONG_DRAWS[fault](population, batch, i), population, batch, draws)
    assert p_values[fault] < 1e-6, p_values


def test_a_further_record_changes_nothing_for_the_others():
    sampling = ep.Poisson(300, 1000, 5)
    few, more = (sampling.sample(SECRETS, 2, count) for count in (900, 1000))
    assert few.tolist() == [i for i in more.tolist() if i < 900]
    assert sampling.sample(SECRETS, 2, 0).tolist() == []


@pytest.mark.parametrize("scheme", [ep.Poisson, ep.WithoutReplacement])
@pytest.mark.parametrize("population", [10**6, 10**9])
def test_a_draw_costs_what_it_holds(scheme, population):
    """No tensor of the population's size is made: that of 10^9 float64 numbers has 8 GB."""
    sampling = scheme(1000, population, 10)
    with torch.profiler.profile(profile_memory=True) as profile:
        ids = sampling.sample(SECRETS, 0, population)
    assert 800 < len(ids) < 1200
    assert max(event.self_cpu_memory_usage for event in profile.key_averages()) < 10**6


def low_share(values: torch.Tensor, limit: int, bound: int) -> float:
    """How many standard deviations the share of values below the limit is from that of uniform ones."""
    share = limit / bound
    return abs(float((values < limit).double().mean()) - share) / np.sqrt(share * (1 - share) / len(values))


def test_low_numbers_are_drawn_no_more_often():
    """Remainders of 32 or 63 bits would have the lowest third twice as often as the rest."""
    generator = torch.Generator().manual_seed(0)
    for bound in (3 * 2**30, 3 * 2**61):
        assert low_share(uniform_integers(bound, 20_000, generator), bound // 3, bound) < 5
    assert low_share(uniform_subset(3 * 2**30, 20_000, generator), 2**30, 3 * 2**30) < 5
    # By `torch.randperm` the positions below 2^32 mod n were drawn 1.7% more often than the others.
    population = 199_766_362
    ids = ep.WithoutReplacement(500_000, population, 1).sample(SECRETS, 0, population)
    assert len(ids) == 500_000 == len(ids.unique())
    assert low_share(ids, 2**32 % population, population) < 5


OUTCOMES = {
    **{
        f"{k} of 5": (partial(uniform_subset, 5, k), [*itertools.combinations(range(5), k)])
        for k in (0, 1, 2, 3, 5)
    },
    "orders of 3": (partial(uniform_order, 3), [*itertools.permutations(range(3))]),
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_all_outcomes_of_a_uniform_draw_are_equally_likely(name):
    (draw, outcomes), generator = OUTCOMES[name], torch.Generator().manual_seed(1)
    found = Counter(tuple(draw(generator).tolist()) for _ in range(1500))
    assert set(found) == set(outcomes)
    assert len(outcomes) == 1 or stats.chisquare([*found.values()]).pvalue > 1e-3


ERRORS = [
    (lambda: ep.Poisson(float("nan"), 10, 1), ValueError, "expected_batch_size"),
    (lambda: ep.Poisson(11, 10, 1), ValueError, "population=10"),
    (lambda: ep.Poisson(1, 10**12, 1), ValueError, "population=1000000000000"),
    (lambda: ep.Poisson(1, 10, 0), ValueError, "steps"),
    (lambda: ep.CyclicPoisson(5, 10, 1, 3), ValueError, "bands"),
    (lambda: ep.BallsInBins(5, 10, 1, bands=3), ValueError, "bands=3 holds; lower bands to at most 2"),
    (lambda: ep.WithoutReplacement(2.5, 10, 1), TypeError, "batch_size"),
    (lambda: ep.WithoutReplacement(2, 10, 1).sample(SECRETS, 0, 11), ValueError, "records=11"),
    (lambda: ep.FixedEpochs(20, 10, 1), ValueError, "batch_size=20"),
    (lambda: ep.TruncatedPoisson(20, 100, 10, 19), ValueError, "max_batch_size=19"),
    (lambda: ep.TruncatedPoisson(20, 100, 10, 101), ValueError, "max_batch_size=101"),
    (lambda: ep.TruncatedPoisson(20, 100, 10).sample(SECRETS, 0, 101), ValueError, "records=101"),
    (lambda: ep.Poisson(batch_size=5, population=10, steps=2, epochs=3.0), TypeError, "epochs"),
    *(
        (lambda kind=kind: kind.of_size(7.5, N, 10), (TypeError, ValueError), r"batch_size=7\.5")
        for kind in (ep.WithoutReplacement, ep.FixedEpochs, ep.BallsInBins)
    ),
]


def test_fixed_epochs_deal_a_large_population_in_parts(monkeypatch):
    scheme, secrets = ep.FixedEpochs(100, 1000, 20), ep.Secrets(reproducible_seed=3)
    whole = [scheme.sample(secrets, k, 1000) for k in range(20)]
    monkeypatch.setattr("equipoise.privacy.sampling._DEALT_AT_ONCE", 37)
    parts = [scheme.sample(secrets, k, 1000) for k in range(20)]
    assert all(torch.equal(one, other) for one, other in zip(whole, parts, strict=True))
    for epoch in (parts[:10], parts[10:]):
        assert torch.equal(torch.cat(epoch).sort().values, torch.arange(1000))


@pytest.mark.parametrize(("action", "kind", "text"), ERRORS)
def test_errors_name_the_argument(action, kind, text):
    with pytest.raises(kind, match=text):
        action()


def test_bins_of_groups_are_uniform_and_as_many_steps_apart():
    """Each record once an epoch, always in the turn of its group, there anew; groups and bins all equal."""
    bands, bins, epochs, records = 3, 4, 40, 600
    sampling = ep.BallsInBins(50, records, 12 * epochs, bands)
    drawn = torch.zeros(12 * epochs, records, dtype=torch.int64)
    for number in range(12 * epochs):
        drawn[number, sampling.sample(SECRETS, number, records)] += 1
    by_epoch = drawn.unflatten(0, (epochs, bins, bands))
    assert (by_epoch.sum((1, 2)) == 1).all()
    group = by_epoch.sum((0, 1)).argmax(0)
    assert (by_epoch.sum((0, 1)).max(0).values == epochs).all()
    places = by_epoch.sum(2).argmax(1)  # epoch, record
    for counts in (
        group.bincount(),
        places.flatten().bincount(),
        (places[1:] * bins + places[:-1]).flatten().bincount(),
    ):
        assert stats.chisquare(counts).pvalue > 1e-3


def test_groups_in_turn_have_the_law_of_their_event():
    """Rate b q in the draws of a record's turn, independent every time, and nothing in the others."""
    sampling = ep.CyclicPoisson(expected_batch_size=Q * N, population=N, steps=DRAWS, bands=4)
    m = np.zeros((DRAWS, N))
    for index in range(DRAWS):
        m[index, sampling.sample(SECRETS, index, N).numpy()] = 1
    turns = m.reshape(-1, 4, N).sum(axis=0)  # how often in the draws of each turn
    group = turns.argmax(axis=0)
    assert ((turns > 0).sum(axis=0) == 1).all()
    met, rate, trials = turns.max(axis=0), 4 * Q, DRAWS // 4
    statistic = ((met - trials * rate) ** 2).sum() / (trials * rate * (1 - rate))
    assert 1e-3 < float(stats.chi2.sf(statistic, N)) < 1 - 1e-3
    own = np.stack([m[group[i] :: 4, i] for i in range(N)])
    assert abs((own[:, 1:] * own[:, :-1]).mean() - rate**2) < 5 / np.sqrt(own.size)
    # Two records of one group enter together as often as two independent ones.
    pairs = [(i, j) for i, j in itertools.combinations(range(N), 2) if group[i] == group[j]]
    together = np.mean([np.mean(own[i] * own[j]) for i, j in pairs])
    assert abs(together - rate**2) < 5 / np.sqrt(len(pairs) * trials)


def test_the_event_of_groups_in_turn():
    """Poisson at rate bands q, ceil(T / bands) times; one group is Poisson sampling, bit for bit."""
    event = ep.CyclicPoisson(8, 800, 10, 4).event(1.5, 10)
    assert (event.count, event.event.sampling_probability) == (3, 0.04)
    assert event.event.event.noise_multiplier == 1.5
    assert [ep.FixedEpochs(8, N, 10).event(2.0, count).count for count in (10, 11)] == [2, 3]
    whole = ep.CyclicPoisson(10, 40, 12, 4)
    assert whole.event(2.0, 12) == ep.FixedEpochs(10, 40, 12, same_slots=True).event(2.0, 12)
    ours, theirs = ep.CyclicPoisson(8, N, 10, 1), ep.Poisson(8, N, 10)
    assert all(torch.equal(ours.sample(SECRETS, i, N), theirs.sample(SECRETS, i, N)) for i in range(10))
    assert ours.event(1.5, 10) == theirs.event(1.5, 10)


@pytest.mark.parametrize("sampling", [*SCHEMES[:-1], ep.CyclicPoisson(10, 40, 8, 4)], ids=repr)
def test_a_replaced_record_counts_twice_where_records_are_drawn_by_themselves(sampling):
    """Whatever its sum's own ratio: it may be in a draw that the other is not in."""
    moves = 1.0 if isinstance(sampling, ep.WithoutReplacement | ep.FullBatch) else 2.0
    plan = ep.PrivacyPlan(
        [ep.Release("a", 1.0, ep.Gaussian(3.0), replace_ratio=1.0)], sampling, "replace_one"
    )
    assert plan.combined_multiplier(frozenset({"a"})) == pytest.approx(3.0 / moves)
    assert Sampling.draws_by_itself  # a scheme that says nothing counts for the dearer


ASSIGNING = [
    ep.FixedEpochs(50, 500, 30),
    ep.FixedEpochs(50, 500, 30, same_slots=True),
    ep.CyclicPoisson(50, 500, 30, 10),
]
"""Samplings that assign records to draws by their keys, with draws that take whole groups."""


def draws_of(sampling, keys, secrets):
    """The draws that each key is in."""
    found = {}
    for t in range(sampling.steps):
        for i in sampling.sample(secrets, t, keys).tolist():
            found.setdefault(int(keys[i]), []).append(t)
    return found


@pytest.mark.parametrize("sampling", ASSIGNING, ids=repr)
@pytest.mark.parametrize("change", ["removed", "added", "replaced", "moved"])
def test_a_record_keeps_its_draws_whatever_happens_to_another_one(sampling, change):
    assert sampling.takes_turns
    keys, secrets = torch.randint(2**62, (500,), generator=torch.Generator().manual_seed(2)), ep.Secrets()
    new = torch.tensor([77])
    after = {
        "removed": torch.cat([keys[:3], keys[4:]]),
        "added": torch.cat([keys[:3], new, keys[3:]]),
        "replaced": torch.cat([keys[:3], new, keys[4:]]),
        "moved": torch.cat([keys[:3], keys[4:], keys[3:4]]),
    }[change]
    before, now = draws_of(sampling, keys, secrets), draws_of(sampling, after, secrets)
    others = set(keys.tolist()) - ({int(keys[3])} if change in ("removed", "replaced") else set())
    assert {key: now[key] for key in others} == {key: before[key] for key in others}
    assert set(now) - others <= {77}


def fields():
    rng = torch.Generator().manual_seed(3)
    return [
        torch.randn(30, 3, 5, generator=rng),
        torch.randint(9, (30,), generator=rng),
        torch.randint(9, (30, 5), generator=rng).to(torch.uint8),
        torch.randn(30, generator=rng) > 0,
        torch.zeros(30, 0),
        torch.randn(30, 2, generator=rng).to(torch.float64).t().contiguous().t(),
    ]


def test_the_hash_of_rows_stays_as_it_is(monkeypatch):
    found = keyed_hash(fields(), b"k" * 32)
    assert found[:2].tolist() == [-4080448431265590769, 2728220703294401707]
    assert keyed_hash(fields(), b"m" * 32).tolist() != found.tolist()
    for field in (0, 1, 2, 3, 5):  # every field of a row counts, and for its row alone
        changed = fields()
        changed[field][4] = ~changed[field][4] if field == 3 else changed[field][4] + 1
        assert (keyed_hash(changed, b"k" * 32) != found).tolist() == [i == 4 for i in range(30)]
    rows = torch.cartesian_prod(*[torch.tensor([0.0, 0.5, 1.0, 2.0])] * 8)  # of words with many zeros
    assert len(keyed_hash([rows], b"k" * 32).unique()) == len(rows) == 4**8
    monkeypatch.setattr("equipoise.privacy.noise.uniform._HASHED_AT_ONCE", 100)
    assert torch.equal(keyed_hash(fields(), b"k" * 32), found)


def test_equal_records_have_keys_of_their_own_and_take_one_anothers_place():
    """So they are not always drawn together, and which of them is withdrawn changes nothing."""
    rows = torch.arange(300) % 100
    secrets = ep.Secrets()
    keys = RecordSource(rows).keys(secrets)
    assert len(keys.unique()) == 300
    without_first, without_last = (
        RecordSource(torch.cat([rows[:i], rows[i + 1 :]])).keys(secrets) for i in (7, 207)
    )
    assert set(without_first.tolist()) == set(without_last.tolist()) == {*keys.tolist()} - {int(keys[207])}
    both = [RecordSource({name: {"a": -rows, "b": rows}[name] for name in order}) for order in ("ba", "ab")]
    assert torch.equal(*(source.keys(secrets) for source in both))
    # Of names, too: records of one key would be drawn together, and show where each of them is.
    ids = [5 + k * 2**64 for k in range(50)] + [-k for k in range(1, 50)] + [2**63 + k for k in range(50)]
    assert len(keys_of_ids(ids, len(ids)).unique()) == len(ids)


@pytest.mark.parametrize(
    "sampling", [ep.FixedEpochs(100, 6000, 60), ep.CyclicPoisson(100, 6000, 60, 60)], ids=repr
)
def test_slots_are_uniform_and_independent_with_equal_records_among_them(sampling):
    """Sizes of slots, and of those of equal records, follow the multinomial law; half a key would not."""
    rows = torch.cat([torch.arange(3000), torch.zeros(3000, dtype=torch.long)])
    keys = RecordSource(rows).keys(ep.Secrets(reproducible_seed=5))

    def p_values(keys):
        slots = [sampling.sample(SECRETS, t, keys) for t in range(60)]
        assert sorted(torch.cat(slots).tolist()) == list(range(6000))
        own = torch.empty(6000, dtype=torch.long)
        for t, slot in enumerate(slots):
            own[slot] = t
        groups = own, own[:3000], own[3000:]
        even = [stats.chisquare(torch.bincount(group, minlength=60).numpy()).pvalue for group in groups]
        pairs = torch.bincount(own[:3000] * 60 + own[3000:], minlength=3600).numpy()
        return [*even, stats.chi2.sf(((pairs - 3000 / 3600) ** 2).sum() / (3000 / 3600), 3599)]

    assert all(1e-3 < p < 1 - 1e-3 for p in p_values(keys)), p_values(keys)
    together = keyed_integers(
        2**62, torch.stack([rows, 0 * rows], 1), bytes(32)
    )  # one key for all equal ones
    assert min(p_values(together)) < 1e-6


@pytest.mark.parametrize(
    "sampling", [ep.CyclicPoisson(10, 80, 48, 4), ep.FixedEpochs(10, 80, 48, same_slots=True)], ids=repr
)
def test_draws_of_a_record_are_as_far_apart_as_the_scheme_says(sampling):
    """Noise over steps rests on it, and the ledger does not look."""
    secrets, last, closest = ep.Secrets(reproducible_seed=1), {}, 48
    for step in range(48):
        for record in sampling.sample(secrets, step, 80).tolist():
            closest = min(closest, step - last.get(record, -48))
            last[record] = step
    assert closest >= sampling.min_separation > 1
