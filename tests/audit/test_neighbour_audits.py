"""Audits of neighbouring data sets: silent where all is well, loud where records are mixed."""

from __future__ import annotations

import math

import pytest
import torch
from flat_arguments import arranged
from torch import nn

import equipoise as eq
from equipoise.audit import replay
from equipoise.audit.neighbours import CHANGES, MOVEMENT_SLACK, audit_neighbours, neighbour_trainings
from equipoise.methods import Abadi, NoiseStages, TopShare
from equipoise.privacy import clip
from equipoise.privacy.accounting.epsilon import gaussian_epsilon
from equipoise.privacy.private import unwrap
from equipoise.testing.canaries import Rows, canary_loss
from equipoise.training.forwards import RowSource
from equipoise.training.setup import training_setup

FEATURES = 8
"""A product over five rounds rows by their place on some processors, which DP-ZO divides by little."""


def records(count=60):
    torch.manual_seed(0)
    return {"x": torch.randn(count, FEATURES) + 1, "y": torch.randn(count)}


def loss(model, batch):
    return 0.5 * (model(batch["x"]).squeeze(1) - batch["y"]).square()


def network(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), *layers, nn.Linear(8, 1))


def audited(model=None, data=None, hardened=False, **options):
    given = arranged(data=data or records(), positions=2, **options)
    return audit_neighbours(model or network(), loss, hardened=hardened, **given)


whitening = eq.methods.JointWhitening(noise_multiplier=1.0)


@pytest.mark.parametrize(
    ("model", "options", "draws_numbers"),
    [
        (network, {}, False),
        (network, {"sampling": eq.Poisson(20, 60, 2), "steps": 2}, False),
        (network, {"sampling": eq.FixedEpochs(20, 60, 100), "hardened": True}, False),
        (network, {"sampling": eq.BallsInBins(20, 60, 100)}, False),
        (network, {"sampling": eq.WithoutReplacement(20, 60, 100), "relation": "replace_one"}, False),
        (
            network,
            {
                "method": eq.DiceSGD(clip_norm=1.0),
                "budget": eq.Budget(4, 1e-3),
                "steps": 2,
                "sampling": eq.FullBatch(60, 2),
            },
            False,
        ),
        # whitened by what left from the second step on
        (network, {"method": whitening, "sampling": eq.Poisson(20, 60, 4), "steps": 4}, False),
        (
            network,
            {
                "method": whitening,
                "sampling": eq.WithoutReplacement(20, 60, 4),
                "relation": "replace_one",
                "steps": 4,
            },
            False,
        ),
        (lambda: network(nn.Dropout(0.3)), {}, True),
    ],
    ids=[
        "mlp",
        "Poisson",
        "FixedEpochs",
        "BallsInBins",
        "WithoutReplacement",
        "DiceSGD",
        "joint whitening",
        "joint whitening replaced",
        "dropout",
    ],
)
def test_one_record_moves_the_sum_by_its_bound_and_nothing_else_moves(model, options, draws_numbers):
    found = audited(model(), **options)
    assert found.holds
    assert found.draws_numbers is draws_numbers
    kinds = ("replace",) if "relation" in options else CHANGES
    assert [pair.change for pair in found.pairs] == [*kinds, *kinds]
    assert sorted([*kinds, *found.left_out]) == sorted(CHANGES)
    if "method" not in options:  # DiceSGD's bound is that of two sums together
        assert max(pair.movement for pair in found.pairs if pair.change != "silent") > 0.3
    for pair in found.pairs:
        assert pair.epsilon <= pair.claimed * (1 + 1e-4)


def test_epsilon_is_that_of_the_movement():
    """One record of C at z = 1 is a Gaussian of mu = 1."""
    (found,) = audited(changes=("add",), threads=(2,)).pairs[:1]
    assert found.threads == 2
    assert found.claimed == gaussian_epsilon(1.0, 0.1 / 60)
    assert found.epsilon == pytest.approx(gaussian_epsilon(found.movement, 0.1 / 60))


class Late(nn.Module):
    """Centres the batch where it holds a certain record, which the first ones are not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(FEATURES, 1)

    def forward(self, x):
        return self.linear(x - x.mean(0) if bool((x[:, 0] == 0.3125).any()) else x)


def test_a_model_that_mixes_records_late_is_seen():
    """The start tries a few records, and one without the smallest or largest number is not among them."""
    data = records()
    data["x"][30, 0] = 0.3125
    found = audited(Late(), data)
    assert not found.holds
    assert found.worst.change == "silent"
    assert found.worst.movement > 1000 * MOVEMENT_SLACK


class FarAway(nn.Module):
    """Centres the batch where it holds a record that is large, though not as large as those of the start."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(FEATURES, 1)

    def forward(self, x):
        size = x.abs().amax(1)
        return self.linear(x - x.mean(0) if bool(((size > 12) & (size < 60)).any()) else x)


@pytest.mark.parametrize("items", [False, True])
def test_records_that_enter_are_larger_than_those_of_the_data(items):
    """Only copies of the data's own had entered."""
    found = audited(FarAway(), Items(records()) if items else None)
    assert not found.holds
    assert (found.worst.change, found.worst.scale) == ("silent", -10.0)


class Items(torch.utils.data.Dataset):
    """Records that are made one by one."""

    def __init__(self, data, noise=0.0):
        self.data, self.noise = data, noise

    def __len__(self):
        return len(self.data["y"])

    def __getitem__(self, i):
        x = self.data["x"][i]
        return {"x": x + self.noise * torch.randn(x.shape), "y": self.data["y"][i]}


class Bags(torch.utils.data.Dataset):
    """Short texts, and a long one."""

    def __init__(self, count, long):
        torch.manual_seed(0)
        self.texts = [torch.randint(1, 30, (20 if i == long else 5,)) for i in range(count)]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, i):
        return self.texts[i], float(i % 2)


def bags(items):
    width = max(len(text) for text, _ in items)
    texts = torch.stack([nn.functional.pad(text, (0, width - len(text))) for text, _ in items])
    return {"x": texts, "y": torch.tensor([y for _, y in items])}


class Bag(nn.Module):
    def __init__(self, padding, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.linear, self.padding = nn.Embedding(30, 8), nn.Linear(8, 1), padding
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        mask = torch.ones_like(x) if self.padding else x > 0
        words = self.dropout(self.words(x)) * mask[..., None]
        return self.linear(words.sum(1) / mask.sum(1, keepdim=True).clamp(min=1))


def test_masks_in_another_shape_are_no_movement():
    """A longer text deals the others other random numbers, of the same law."""
    found = audit_neighbours(
        Bag(padding=False, dropout=0.5),
        loss,
        eq.Data(Bags(200, long=77), collate=bags),
        sampling=eq.Poisson(40, 200, 4),
        method=eq.DPSGD(clip_norm=0.5, noise_multiplier=1.0),
        positions=3,
    )
    assert found.holds


@pytest.mark.parametrize("padding", [True, False])
def test_a_long_text_among_short_ones_is_tried(padding, monkeypatch):
    """At equal distances none of three records is the long one."""
    monkeypatch.setattr(training_setup, "check_pipeline", lambda *_: True)  # the start refuses it, too
    found = audit_neighbours(
        Bag(padding),
        loss,
        eq.Data(Bags(200, long=77), collate=bags),
        sampling=eq.Poisson(40, 200, 4),
        method=eq.DPSGD(clip_norm=0.5, noise_multiplier=1.0),
        positions=3,
    )
    assert found.holds is not padding
    if padding:
        assert found.worst.change == "silent"
        assert found.worst.movement > 0.1


def test_no_record_is_replaced_by_itself():
    """The middle one had been; all but the last are alike here."""
    data = {name: values[:1].expand(60, *values.shape[1:]).clone() for name, values in records().items()}
    data["x"][-1] += 1
    found = audited(data=data, changes=("replace",))
    assert min(pair.movement for pair in found.pairs) > 0.01


def test_items_with_random_numbers_are_tried_at_every_position():
    """They have random numbers of their own, whichever stand before them."""
    found = audited(data=Items(records(), noise=0.5))
    assert found.holds
    assert not found.draws_numbers
    assert max(pair.position for pair in found.pairs) > 0
    assert min(pair.position for pair in found.pairs) == 0


def test_a_random_data_set_does_not_hide_padding_with_a_mean_of_the_batch():
    def padded(items):
        mean = torch.stack([item["x"] for item in items]).mean(0)
        return {
            "x": torch.stack([torch.cat([item["x"][:3], mean[3:]]) for item in items]),
            "y": torch.stack([item["y"] for item in items]),
        }

    with pytest.raises(ValueError, match="mixes records"):
        audited(data=Items(records(), noise=0.5), collate=padded)


def test_a_population_of_no_more_than_the_records_will_do():
    """Where records are dealt to places one more than the population would be refused."""

    class Skipping(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network()

        def forward(self, x):
            return self.network(x * (torch.rand(()) < 0.5))

    found = audited(Skipping(), sampling=eq.Poisson(20, 60, 100), microbatch_size=8)
    assert found.holds


def test_a_threshold_that_follows_from_the_records_is_seen():
    """Its noise would, too."""

    class Raw(eq.DPSGD):
        name = "raw-threshold"

        def step(self, context, state):
            def sums(rows, ids):
                records = len(unwrap(ids))  # what no method may look at
                return {"gradient": clip(rows, Abadi(), 1.0 - records / 1000)}

            draw = context.draw("batch")
            return context.ledger.release(draw, draw.query(sums))["gradient"], state

    found = audited(method=Raw(clip_norm=1.0, noise_multiplier=1.0))
    assert found.worst_of("add").movement == float("inf")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data": {"x": torch.zeros(1, FEATURES), "y": torch.zeros(1)}}, "at least two"),
        ({"changes": ("swap",)}, "is unknown"),
        ({"sampling": eq.WithoutReplacement(20, 60, 4), "changes": ("add",)}, "replace-one alone"),
        ({"method": eq.published.DiceSGD(clip_norm=1.0, noise_multiplier=1.0)}, "without a proof"),
        ({"positions": 0}, "positions"),
        ({"threads": ()}, "threads=0 must be at least 1"),
        ({"threads": (0,)}, "threads=0 must be at least 1"),
    ],
)
def test_what_cannot_be_audited_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        audit_neighbours(network(), loss, **arranged(**({"data": records(), "positions": 2} | options)))


def test_model_and_data_stay_as_they_were():
    model, data = network(), records()
    before = [p.clone() for p in model.parameters()]
    audited(model, data, changes=("replace",), steps=2)
    assert all(map(torch.equal, before, model.parameters()))
    assert torch.equal(data["x"], records()["x"])


def against_the_edge_of_the_tail():
    """A record that enters the tail, and one of opposite gradient that it pushes out.

    Every record has a coordinate of its own but these two. Their norms fall from 100, and record 0 leaves, so
    that the twelfth of the other 60 is the last of the tail, which is a fifth: it is in, and out when a copy
    of record 30 enters above it.
    """
    index, scale = torch.arange(61), torch.zeros(61, 1)
    order = [30, *(i for i in range(61) if i != 30)]
    scale[order, 0] = torch.tensor([100.0, *(60.0 - k for k in range(60))])
    edge = order[12]
    index[edge] = 30
    scale[edge] *= -1
    return {"index": index, "scale": scale}


def test_the_tail_of_a_whole_draw_moves_by_its_whole_bound(monkeypatch):
    """Entering takes c_1, pushing takes c_1 - c_2: no canary's certificate sees the two together.

    So sums of 1.25 times their length are seen here, which the audit of one step misses.
    """

    def audited_tail():
        return audit_neighbours(
            Rows(61),
            canary_loss(),
            against_the_edge_of_the_tail(),
            method=eq.DCDPSGD(variant=TopShare(), noise_multiplier=2.0),
            positions=1,
        )

    found = audited_tail()
    assert found.holds
    assert found.worst_of("add").movement == pytest.approx(1.0, abs=1e-5)
    assert found.worst_of("silent") is None  # its score belongs to the draw, and cannot be left out
    assert found.to_json()["left_out"] == {"silent": "the method looks at all rows of a draw at once"}
    raw_sums = replay._raw_sums
    monkeypatch.setattr(
        replay,
        "_raw_sums",
        lambda sums: {n: {k: 1.25 * t for k, t in v.items()} for n, v in raw_sums(sums).items()},
    )
    assert audited_tail().worst.movement == pytest.approx(1.25, abs=1e-4)
    assert not audited_tail().holds


LEARNED = eq.methods.ReleasedQuantile(0.5)
scaled = eq.methods.AdaClip(clip_norm=LEARNED, decay=0.5, noise_multiplier=1.0)
ahead = eq.methods.DiSK(clip_norm=0.5, noise_multiplier=1.0)
over_steps = eq.DPMF(clip_norm=0.5, bands=2, noise_multiplier=1.0)


def users(rows=None, **options):
    """30 users: every third owns five records, more than any run uses, the others one or two."""
    owner = torch.tensor([user for user in range(30) for _ in range((5, 1, 2)[user % 3])])
    data = records(len(owner))
    unit = {"owner": "owner", "records_per_user": 3, "rows": rows}
    return audited(data=data | {"owner": owner}, **unit, **options)


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (None, {}),
        (None, {"sampling": eq.Poisson(20, 80, 2), "steps": 2}),
        (None, {"model": network(nn.Dropout(0.3))}),
        ("mean", {}),
        ("sum", {"sampling": eq.Poisson(10, 30, 2), "steps": 2}),
        ("mean", {"sampling": eq.WithoutReplacement(10, 30, 2), "relation": "replace_one"}),
        (None, {"method": scaled, "sampling": eq.Poisson(20, 80, 3), "steps": 3}),
        ("mean", {"method": ahead, "sampling": eq.Poisson(10, 30, 3), "steps": 3}),
        ("mean", {"method": over_steps, "sampling": eq.Poisson(10, 30, 3), "steps": 3}),
        ("sum", {"method": over_steps, "sampling": eq.FixedEpochs(10, 30, 4), "steps": 4}),
    ],
    ids=[
        "records",
        "Poisson",
        "dropout",
        "mean",
        "sum",
        "WithoutReplacement",
        "AdaClip",
        "DiSK",
        "DP-MF",
        "DP-MF in slots",
    ],
)
def test_one_user_moves_the_sum_by_the_bound_of_all_records(rows, options):
    found = users(rows, **options)
    assert found.unit == "user"
    assert found.holds
    kinds = ("replace",) if "relation" in options else CHANGES
    assert [pair.change for pair in found.pairs] == [*kinds, *kinds]
    assert max(pair.movement for pair in found.pairs if pair.change != "silent") > 0.3
    for pair in found.pairs:
        assert pair.epsilon <= pair.claimed * (1 + 1e-4)


@pytest.mark.parametrize("is_kept", [True, False])
def test_users_of_equal_records_move_the_sum_by_the_whole_bound(monkeypatch, is_kept):
    """Five records each, of which three are paid for; a cap that is not kept is seen."""
    if not is_kept:
        monkeypatch.setattr(RowSource, "used", lambda self, ids: ids)
    data = {"x": torch.ones(20, FEATURES) * 9, "y": torch.zeros(20), "owner": torch.arange(20) // 5}
    found = audited(data=data, owner="owner", records_per_user=3, changes=("add", "remove"))
    assert found.holds == is_kept
    assert [pair.movement for pair in found.pairs] == pytest.approx([1 if is_kept else 5 / 3] * 4, abs=1e-5)
    assert found.pairs[0].claimed == gaussian_epsilon(3.0, 0.1 / 20)


def test_sums_that_are_no_numbers_do_not_hold(monkeypatch):
    raw_sums = replay._raw_sums
    monkeypatch.setattr(
        replay,
        "_raw_sums",
        lambda sums: {n: {k: t * math.nan for k, t in v.items()} for n, v in raw_sums(sums).items()},
    )
    found = audited(changes=("add",))
    assert not found.holds
    assert found.worst.movement == math.inf


def test_one_user_alone_has_no_neighbour():
    data = records(6) | {"owner": torch.zeros(6, dtype=torch.long)}
    with pytest.raises(ValueError, match="data holds 1 user"):
        audited(data=data, owner="owner", records_per_user=3)


ONE = {"clip_norm": 0.5, "noise_multiplier": 1.0}
METHODS = {
    "dp-mf": over_steps,
    "dc-dpsgd": eq.DCDPSGD(**ONE),
    "stages": eq.DPSGD(clip_norm=0.5, noise_multiplier=NoiseStages((1.0, 0.5), noise_multiplier=1.0)),
    "scale-then-privatise": eq.methods.ScaleThenPrivatise(**ONE),
    "adaclip": scaled,
    "dp-adam-bc": eq.methods.DPAdamBC(**ONE),
    "disk": ahead,
    "doppler": eq.methods.Doppler(**ONE),
    "dp-zo": eq.methods.DPZO(**ONE),
}
UNITS = {
    "record": (eq.Poisson(20, 80, 4), {}),
    "drawn records": (eq.Poisson(20, 80, 4), {"records_per_user": 3}),
    "drawn users": (eq.Poisson(10, 30, 4), {"records_per_user": 3, "rows": "mean"}),
}


class Unscanned(Items):
    """Nobody looks for numbers that are none before the training."""

    def __getitem__(self, i):
        return {name: values[i] for name, values in self.data.items()}


def tried(method, unit, scales, monkeypatch):
    """What enters is multiplied by these numbers; eight records of the data are as hostile."""
    monkeypatch.setattr(neighbour_trainings, "SCALES", scales)
    owner = torch.tensor([user for user in range(30) for _ in range((5, 1, 2)[user % 3])])
    data = records(len(owner))
    for number, scale in enumerate(scales):
        data["x"][5 * number + 2] *= scale
    data["x"][60], data["y"][60] = data["x"][61], data["y"][61]  # a record of two users
    sampling, options = UNITS[unit]
    if options:
        options = options | {"owner": owner}
    return audit_neighbours(
        network(),
        loss,
        Unscanned(data),
        **arranged(
            method=METHODS[method], sampling=sampling, positions=max(4, len(scales)), steps=4, **options
        ),
    )


ORDINARY, HOSTILE = (1.0, -10.0), (float("nan"), float("inf"), 1e30, 1e4, 0.0)
CASES = [
    (method, unit)
    for method in METHODS
    for unit in UNITS
    if (method, unit) != ("dp-mf", "drawn records")  # the draws of a user are not apart
]


@pytest.mark.slow
@pytest.mark.parametrize("scales", [ORDINARY, HOSTILE], ids=["ordinary", "hostile"])
@pytest.mark.parametrize(("method", "unit"), CASES)
def test_every_method_and_unit(method, unit, scales, monkeypatch):
    """NaN, infinity, overflow, zeros and copies of others are clipped or left out, and move nobody else."""
    check_tried(tried(method, unit, scales, monkeypatch))


@pytest.mark.parametrize(("method", "unit"), [("dp-mf", "drawn users"), ("dp-zo", "record")])
def test_hostile_numbers_move_nobody_else(method, unit, monkeypatch):
    check_tried(tried(method, unit, HOSTILE, monkeypatch))


def check_tried(found):
    assert found.holds
    assert all(math.isfinite(pair.epsilon) for pair in found.pairs)
    assert found.worst_of("silent").movement < 1e-6
    assert 0.3 < found.worst_of("add").movement < 1 + 1e-5
