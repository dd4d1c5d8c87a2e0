"""Audits of neighbouring data sets: silent where all is well, loud where records are mixed."""

import math

import pytest
import torch
from flat_arguments import arranged
from torch import nn
from zoo import Net

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

#: A product over five rounds rows by their place on some processors, which DP-ZO divides by little.
FEATURES = 8


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


def check_holds(found, relation, moves=True):
    """A record or a user moves the sum by its bound, which is near to what is claimed, and nothing else."""
    assert found.holds
    kinds = ("replace",) if relation else CHANGES
    assert [pair.change for pair in found.pairs] == [*kinds, *kinds]
    assert sorted([*kinds, *found.left_out]) == sorted(CHANGES)
    if moves:
        assert max(pair.movement for pair in found.pairs if pair.change != "silent") > 0.3
    for pair in found.pairs:
        assert pair.epsilon <= pair.claimed * (1 + 1e-4)


REPLACED = {"relation": "replace_one"}
whitening = {"method": eq.methods.JointWhitening(noise_multiplier=1.0), "steps": 4}
DICE = {"method": eq.DiceSGD(clip_norm=1.0), "budget": eq.Budget(4, 1e-3), "steps": 2}
ONE_RECORD = {
    "mlp": {},
    "Poisson": {"sampling": eq.Poisson(20, 60, 2), "steps": 2},
    "FixedEpochs": {"sampling": eq.FixedEpochs(20, 60, 100), "hardened": True},
    "BallsInBins": {"sampling": eq.BallsInBins(20, 60, 100)},
    "BallsInBins, dp-mf": {
        "sampling": eq.BallsInBins(10, 60, 60),
        "method": eq.DPMF(clip_norm=0.5, bands=2, noise_multiplier=1.0),
    },
    "WithoutReplacement": {"sampling": eq.WithoutReplacement(20, 60, 100), **REPLACED},
    "DiceSGD": {**DICE, "sampling": eq.FullBatch(60, 2)},
    # Whitened by what left from the second step on.
    "joint whitening": {**whitening, "sampling": eq.Poisson(20, 60, 4)},
    "joint whitening replaced": {**whitening, "sampling": eq.WithoutReplacement(20, 60, 4), **REPLACED},
    "dropout": {"model": network(nn.Dropout(0.3))},
}


@pytest.mark.parametrize("name", ONE_RECORD)
def test_one_record_moves_the_sum_by_its_bound_and_nothing_else_moves(name):
    found = audited(**ONE_RECORD[name])
    check_holds(found, "relation" in ONE_RECORD[name], name != "DiceSGD")  # its bound is of two sums together
    assert found.draws_numbers is (name == "dropout")


def test_epsilon_is_that_of_the_movement():
    """One record of C at z = 1 is a Gaussian of mu = 1."""
    (found,) = audited(changes=("add",), threads=(2,)).pairs[:1]
    assert found.threads == 2
    assert found.claimed == gaussian_epsilon(1.0, 0.1 / 60)
    assert found.epsilon == pytest.approx(gaussian_epsilon(found.movement, 0.1 / 60))


def centring(condition):
    """Centres a batch of which this is so."""

    def forward(self, x):
        return self.linear(x - x.mean(0) if bool(condition(x).any()) else x)

    torch.manual_seed(0)
    return Net(forward, linear=nn.Linear(FEATURES, 1))


def test_a_model_that_mixes_records_late_is_seen():
    """The start tries a few records, and one without the smallest or largest number is not among them."""
    data = records()
    data["x"][30, 0] = 0.3125
    found = audited(centring(lambda x: x[:, 0] == 0.3125), data)
    assert not found.holds
    assert found.worst.change == "silent"
    assert found.worst.movement > 1000 * MOVEMENT_SLACK


@pytest.mark.parametrize("items", [False, True])
def test_records_that_enter_are_larger_than_those_of_the_data(items):
    """Though not as large as those of the start; only copies of the data's own had entered."""
    model = centring(lambda x: (x.abs().amax(1) > 12) & (x.abs().amax(1) < 60))
    found = audited(model, Items(records()) if items else None)
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


class Unscanned(Items):
    """Nobody looks for numbers that are none before the training."""

    def __getitem__(self, i):
        return {name: values[i] for name, values in self.data.items()}


def bags(items):
    width = max(len(item["x"]) for item in items)
    texts = torch.stack([nn.functional.pad(item["x"], (0, width - len(item["x"]))) for item in items])
    return {"x": texts, "y": torch.stack([item["y"] for item in items])}


@pytest.mark.parametrize(("padding", "dropout"), [(True, 0.0), (False, 0.0), (False, 0.5)])
def test_a_long_text_among_short_ones_is_tried(padding, dropout, monkeypatch):
    """At equal distances none of three records is the long one. Masks in another shape are no movement."""

    def forward(self, x):
        mask = torch.ones_like(x) if padding else x > 0
        words = self.dropout(self.words(x)) * mask[..., None]
        return self.linear(words.sum(1) / mask.sum(1, keepdim=True).clamp(min=1))

    texts = [torch.randint(1, 30, (20 if i == 77 else 5,)) for i in range(200)]
    monkeypatch.setattr(training_setup, "check_pipeline", lambda *_: True)  # the start refuses it, too
    found = audit_neighbours(
        Net(forward, words=nn.Embedding(30, 8), linear=nn.Linear(8, 1), dropout=nn.Dropout(dropout)),
        loss,
        eq.Data(Unscanned({"x": texts, "y": torch.arange(200.0) % 2}), collate=bags),
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
    assert max(pair.position for pair in found.pairs) > 0 == min(pair.position for pair in found.pairs)


def test_a_random_data_set_does_not_hide_padding_with_a_mean_of_the_batch():
    def padded(items):
        mean = torch.stack([item["x"] for item in items]).mean(0)
        return bags([item | {"x": torch.cat([item["x"][:3], mean[3:]])} for item in items])

    with pytest.raises(ValueError, match="mixes records"):
        audited(data=Items(records(), noise=0.5), collate=padded)


def test_a_population_of_no_more_than_the_records_will_do():
    """Where records are dealt to places one more than the population would be refused."""
    skipping = Net(lambda self, x: self.network(x * (torch.rand(()) < 0.5)), network=network())
    assert audited(skipping, sampling=eq.Poisson(20, 60, 100), microbatch_size=8).holds


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


ALONE = records(6) | {"owner": torch.zeros(6, dtype=torch.long)}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data": {"x": torch.zeros(1, FEATURES), "y": torch.zeros(1)}}, "at least two"),
        ({"data": ALONE, "owner": "owner", "records_per_user": 3}, "data holds 1 user"),
        ({"changes": ("swap",)}, "is unknown"),
        ({"sampling": eq.WithoutReplacement(20, 60, 4), "changes": ("add",)}, "replace-one alone"),
        ({"method": eq.published.DiceSGD(clip_norm=1.0, noise_multiplier=1.0)}, "without a proof"),
        ({"positions": 0}, "positions"),
        ({"threads": ()}, "threads=0 must be at least 1"),
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


def multiplied(factor, monkeypatch):
    """Sums that are so many times as long."""
    raw = replay._raw_sums
    wrong = lambda sums: {n: {k: factor * t for k, t in v.items()} for n, v in raw(sums).items()}  # noqa: E731
    monkeypatch.setattr(replay, "_raw_sums", wrong)


def test_the_tail_of_a_whole_draw_moves_by_its_whole_bound(monkeypatch):
    """Entering takes c_1, pushing takes c_1 - c_2: no canary's certificate sees the two together.

    So sums of 1.25 times their length are seen here, which the audit of one step misses.
    """
    data, method = against_the_edge_of_the_tail(), eq.DCDPSGD(variant=TopShare(), noise_multiplier=2.0)
    found = audit_neighbours(Rows(61), canary_loss(), data, method=method, positions=1)
    assert found.holds
    assert found.worst_of("add").movement == pytest.approx(1.0, abs=1e-5)
    assert found.worst_of("silent") is None  # its score belongs to the draw, and cannot be left out
    assert found.to_json()["left_out"] == {"silent": "the method looks at all rows of a draw at once"}
    multiplied(1.25, monkeypatch)
    found = audit_neighbours(Rows(61), canary_loss(), data, method=method, positions=1)
    assert found.worst.movement == pytest.approx(1.25, abs=1e-4)
    assert not found.holds


def test_sums_that_are_no_numbers_do_not_hold(monkeypatch):
    multiplied(math.nan, monkeypatch)
    found = audited(changes=("add",))
    assert not found.holds
    assert found.worst.movement == math.inf


LEARNED = eq.methods.ReleasedQuantile(0.5)
scaled = eq.methods.AdaClip(clip_norm=LEARNED, decay=0.5, noise_multiplier=1.0)
ahead = eq.methods.DiSK(clip_norm=0.5, noise_multiplier=1.0)
over_steps = eq.DPMF(clip_norm=0.5, bands=2, noise_multiplier=1.0)
OWNERS = torch.tensor([user for user in range(30) for _ in range((5, 1, 2)[user % 3])])
USERS = {
    "Poisson": {"sampling": eq.Poisson(20, 80, 2), "steps": 2},
    "dropout": {"model": network(nn.Dropout(0.3))},
    "mean": {"rows": "mean"},
    "sum": {"rows": "sum", "sampling": eq.Poisson(10, 30, 2), "steps": 2},
    "WithoutReplacement": {"rows": "mean", "sampling": eq.WithoutReplacement(10, 30, 2), **REPLACED},
    "AdaClip": {"method": scaled, "sampling": eq.Poisson(20, 80, 3), "steps": 3},
    "DiSK": {"rows": "mean", "method": ahead, "sampling": eq.Poisson(10, 30, 3), "steps": 3},
    "DP-MF in slots": {
        "rows": "sum",
        "method": over_steps,
        "sampling": eq.FixedEpochs(10, 30, 4),
        "steps": 4,
    },
}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", USERS)
def test_one_user_moves_the_sum_by_the_bound_of_all_records(name):
    """30 users: every third owns five records, more than any run uses, the others one or two."""
    data, unit = records(len(OWNERS)) | {"owner": OWNERS}, {"owner": "owner", "records_per_user": 3}
    found = audited(data=data, **unit, **USERS[name])
    assert found.unit == "user"
    check_holds(found, "relation" in USERS[name])


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
    "fitted-rate": eq.methods.FittedRate(**ONE),
}
UNITS = {
    "record": (eq.Poisson(20, 80, 4), {}),
    "drawn records": (eq.Poisson(20, 80, 4), {"records_per_user": 3, "owner": OWNERS}),
    "drawn users": (eq.Poisson(10, 30, 4), {"records_per_user": 3, "rows": "mean", "owner": OWNERS}),
}
ORDINARY, HOSTILE = (1.0, -10.0), (float("nan"), float("inf"), 1e30, 1e4, 0.0)
#: The draws of a user are not apart where noise goes over steps.
CASES = [(m, unit) for m in METHODS for unit in UNITS if (m, unit) != ("dp-mf", "drawn records")]


def check_tried(method, unit, scales, monkeypatch):
    """What enters is multiplied by these numbers; eight records of the data are as hostile."""
    monkeypatch.setattr(neighbour_trainings, "SCALES", scales)
    data = records(len(OWNERS))
    for number, scale in enumerate(scales):
        data["x"][5 * number + 2] *= scale
    data["x"][60], data["y"][60] = data["x"][61], data["y"][61]  # a record of two users
    sampling, options = UNITS[unit]
    options = options | {"method": METHODS[method], "sampling": sampling, "steps": 4}
    positions = max(4, len(scales))
    found = audit_neighbours(network(), loss, Unscanned(data), **arranged(positions=positions, **options))
    assert found.holds
    assert all(math.isfinite(pair.epsilon) for pair in found.pairs)
    assert found.worst_of("silent").movement < 1e-6
    assert 0.3 < found.worst_of("add").movement < 1 + 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("scales", [ORDINARY, HOSTILE], ids=["ordinary", "hostile"])
@pytest.mark.parametrize(("method", "unit"), CASES)
def test_every_method_and_unit(method, unit, scales, monkeypatch):
    """NaN, infinity, overflow, zeros and copies of others are clipped or left out, and move nobody else."""
    check_tried(method, unit, scales, monkeypatch)


@pytest.mark.parametrize(("method", "unit"), [("dp-mf", "drawn users"), ("dp-zo", "record")])
def test_hostile_numbers_move_nobody_else(method, unit, monkeypatch):
    check_tried(method, unit, HOSTILE, monkeypatch)
