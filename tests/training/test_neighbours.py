"""One record more, and nothing else may move: sums of neighbouring data sets, before their noise."""

import math
import random
from collections import Counter
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flat_arguments import arranged
from small_problems import Listening
from torch import Tensor, nn
from torch.utils.data import default_collate
from zoo import backward

import equipoise as eq
from equipoise.distributed.processes import Processes
from equipoise.gradients import CoverageError, CrossRecordError
from equipoise.methods import Abadi
from equipoise.privacy import Draw, clip
from equipoise.privacy.private import unwrap
from equipoise.statements.assumptions import Assumption
from equipoise.training import forwards
from equipoise.training.forwards import _dealt, forward_rows
from equipoise.training.randomness import public_randomness
from equipoise.training.record_source import RecordSource
from equipoise.training.setup import memory_use

SLACK = 1e-5  # rounding of the sum itself, in clip norms


def listening(model: nn.Module, loss: Callable, data: dict[str, Tensor], **options) -> Listening:
    """A training on all records at every step, at C = 1, whose parameters do not move."""
    usual = {"sampling": eq.FullBatch(500, 2), "method": eq.DPSGD(clip_norm=1.0, noise_multiplier=1.0)}
    given = arranged(loss=loss, data=data, **(usual | options))
    return Listening(model, torch.optim.SGD(model.parameters(), lr=0.0), **given)


def raw_sum(model: nn.Module, loss: Callable, data: dict[str, Tensor], **options) -> Tensor:
    """The sum of one step."""
    run = listening(model, loss, data, **options)
    run.take_step()
    return run.ledger.heard


def with_one_more(data: dict[str, Tensor], record: dict[str, Tensor], place: int) -> dict[str, Tensor]:
    """The data set with the record at this place."""
    return {name: torch.cat([v[:place], record[name][None], v[place:]]) for name, v in data.items()}


def hinge(model, batch):
    return F.relu(1 - batch["y"] * model(batch["x"]).squeeze(1))


def least_squares(model, batch):
    return 0.5 * (model(batch["x"]).squeeze(1) - batch["y"]).square()


def at_the_kink(count: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """Records whose margin is 1 up to rounding: kinks of the loss, on or off by their place in a batch."""
    generator, model = torch.Generator().manual_seed(0), nn.Linear(1000, 1)
    with torch.no_grad():
        model.weight.copy_(torch.randn(1, 1000, generator=generator))
        model.bias.zero_()
        x = torch.randn(count, 1000, generator=generator)
        for _ in range(3):
            x -= ((model(x) - 1) / model.weight.square().sum()) * model.weight
        x[:14] *= 0.5  # the first ones, on which the engine is tried, are not at the kink
    return model, {"x": x, "y": torch.ones(count)}


class FillsMissing(nn.Module):
    """A learned number stands for what is missing; where nothing is, the operation is left out.

    With a coin for the batch, which says whether the features change their signs.
    """

    def __init__(self, layer: nn.Module, has_coin: bool = False) -> None:
        super().__init__()
        self.layer, self.has_coin, self.missing = layer, has_coin, nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        gone = x == -1e3
        if bool(gone.any()):
            x = torch.where(gone, self.missing, x)
        if self.has_coin and float(torch.rand(())) < 0.5:
            x = -x
        return self.layer(x)


class Balance(torch.autograd.Function):
    """Scales gradients by what the module keeps of those before them."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        scale = ctx.module.scale
        ctx.module.scale = 0.9 * scale + 0.1 * float(g.abs().mean())
        return g * 1e3 * scale, None


class Balanced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head, self.scale = nn.Linear(3, 4), nn.Linear(4, 1), 1e-4

    def forward(self, x: Tensor) -> Tensor:
        return self.head(Balance.apply(self.inner(x).tanh(), self))


def test_what_a_backward_keeps_is_forgotten():
    data = {"x": 0.01 * torch.randn(64, 3), "y": 0.01 * torch.randn(64)}
    other = {name: values.clone() for name, values in data.items()}
    other["x"][0], other["y"][0] = 30.0, 500.0
    sums = []
    for records in (data, other):
        torch.manual_seed(0)
        run = listening(Balanced(), least_squares, records)
        for _ in range(2):
            run.take_step()
        sums.append(run.ledger.heard)
    assert (sums[1] - sums[0]).norm() <= 2 + SLACK


class Transformed(torch.utils.data.Dataset):
    """Items with random noise, as transforms are ordinarily written."""

    def __init__(self, data, draw):
        self.data, self.draw = data, draw

    def __len__(self):
        return len(self.data["y"])

    def __getitem__(self, i):
        return {"x": self.data["x"][i] + self.draw(), "y": self.data["y"][i]}


def noised(batch, *generator):
    """As a collate function's last step, or as an augmentation that ignores its generator."""
    return {**batch, "x": batch["x"] + torch.randn_like(batch["x"])}


RANDOM_DATA = {
    "torch": (lambda: torch.randn(3), {}),
    "numpy": (lambda: torch.from_numpy(np.random.randn(3)).float(), {}),
    "python": (random.random, {}),
    "collate": (lambda: 0.0, {"collate": lambda items: noised(default_collate(items))}),
    "augmentation": (lambda: 0.0, {"augmentation": noised}),
}


@pytest.mark.parametrize("name", RANDOM_DATA)
def test_random_numbers_of_the_data_are_secret_and_replay_with_their_step(name):
    """The script's own seed decides nothing: two runs after the same seed draw other numbers."""
    draw, options = RANDOM_DATA[name]
    data = Transformed({"x": torch.randn(40, 3), "y": torch.randn(40)}, draw)
    sums = []
    for reproducible in (False, False, True, True):
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(0)
        sums.append(raw_sum(nn.Linear(3, 1), least_squares, data, reproducible=reproducible, **options))
    assert (sums[0] - sums[1]).norm() > 1e-3
    assert torch.equal(sums[2], sums[3])


def test_an_item_has_its_random_numbers_whatever_is_read_beside_it():
    data = Transformed(
        {"x": torch.randn(40, 3), "y": torch.randn(40)}, lambda: torch.randn(3) + random.random()
    )
    source = RecordSource(data)
    several = source.take(torch.tensor([3, 7, 5]), public_randomness(0))["x"]
    alone = source.take(torch.tensor([7]), public_randomness(0))["x"]
    assert torch.equal(several[1:2], alone)
    assert not torch.equal(alone[0], source.take(torch.tensor([7]), public_randomness(1))["x"][0])


class Noisy(nn.Module):
    """A linear model with noise on its inputs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x):
        return self.linear(x + 0.1 * torch.randn_like(x))


def with_count(items):
    return {**default_collate(items), "num_items": len(items)}


def over_the_count(model, batch):
    return least_squares(model, batch) / batch["num_items"]


class Holed(Transformed):
    """One record cannot be read, which does not end the check of the others."""

    def __getitem__(self, i):
        if i == 5:
            raise OSError("no such file")
        return super().__getitem__(i)


def blended(batch, generator):
    return {**batch, "x": 0.5 * (batch["x"] + batch["x"].roll(1, 0))}


def every_other(batch, generator):
    x = batch["x"].clone()
    x[::2] = x[::2].flip(1)
    return {**batch, "x": x}


OWN = torch.Generator().manual_seed(0)

#: What moved the sum by up to 50 clip norms where one record entered, unseen: loss, items and options. The
#: zoo has more of the kind.
MIXING = {
    "a count of random items": (
        over_the_count, lambda data: Transformed(data, lambda: torch.randn(3)), {"collate": with_count}
    ),
    "augmented by place": (least_squares, None, {"augmentation": every_other}),
    "blended with the next": (least_squares, lambda data: Holed(data, float), {"augmentation": blended}),
    "items of a generator of their own": (
        least_squares, lambda data: Transformed(data, lambda: torch.randn(3, generator=OWN)), {}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_records_is_refused(name):
    loss, draw, options = MIXING[name]
    data = {"x": torch.randn(64, 3) + 1, "y": torch.randn(64)}
    data = data if draw is None else draw(data)
    with pytest.raises((ValueError, CoverageError, CrossRecordError)):
        raw_sum(nn.Linear(3, 1), loss, data, **options)


def test_public_records_that_fail_later_take_no_record_with_them():
    """Parameters may come where the model fails on zeros; each record then runs next to its own copies."""
    data = {"x": torch.randn(47, 3) + 1, "y": torch.randn(47)}
    model, fails = nn.Linear(3, 1), []

    def picky(model, batch):
        if fails and not bool(batch["x"].any(1).all()):
            raise ValueError("a record of zeros")
        return least_squares(model, batch)

    run = listening(model, picky, data, microbatch_size=16)
    run.take_step()
    before = run.ledger.heard
    fails.append(True)
    run.take_step()
    assert (run.ledger.heard - before).norm() <= SLACK * before.norm()


class LayerDrop(nn.Module):
    """Leaves its first layer out, for a whole batch, where a coin says so."""

    def __init__(self, coin):
        super().__init__()
        self.first, self.second, self.coin = nn.Linear(3, 3), nn.Linear(3, 1), coin

    def forward(self, x):
        x = x if self.coin(len(x)) else 3 + self.first(x)
        return self.second(x)


class RandomBackward(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 1).requires_grad_(False)
        self.factor = factor

    def forward(self, x):
        return self.second(backward(lambda g: g * self.factor(len(g)))(self.first(x).tanh()))


def sign(count):
    return 1 if torch.rand(()) < 0.5 else -1


SHARED_NUMBERS = {
    "torch": lambda: LayerDrop(lambda count: torch.rand(()) < 0.5),
    "the first record's number": lambda: LayerDrop(lambda count: torch.rand(count)[0] < 0.5),
    "a sign in the backward": lambda: RandomBackward(sign),
    "Python's in the backward": lambda: RandomBackward(lambda count: random.gauss(0, 1)),
}


class Tolerant(nn.Module):
    """A layer is left out where it raises; a learned number stands for what is missing."""

    def __init__(self):
        super().__init__()
        self.missing = nn.Parameter(torch.zeros(()))
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x):
        gone = x == 0.125
        try:
            hidden = self.first(torch.where(gone, self.missing, x) if bool(gone.any()) else x)
        except RuntimeError:
            hidden = x
        return self.second(hidden)


class OfOneKind(torch.utils.data.Dataset):
    """Records of one kind, but for the last of 201, which joins with no other."""

    def __init__(self, count):
        self.count, self.x = count, 1 + torch.rand(201, 3, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return {"x": self.x[i], "y": torch.tensor(5.0), "kind": torch.tensor(int(i == 200))}


def signed(items):
    """One sign for all that are joined; two kinds are not joined."""
    batch = default_collate(items)
    if len(batch["kind"].unique()) > 1:
        raise ValueError("two kinds of records in a batch")
    return batch | {"x": batch["x"] * (1.0 if torch.rand(()) < 0.5 else -1.0)}


def failing(model, batch):
    if bool((batch["y"] == 0.125).any()):
        raise ValueError("no such label")
    return least_squares(model, batch)


def kinked(options, missing=False):
    """A record whose own gradient is zero enters among those at a kink; it may run other operations."""
    layer, data = at_the_kink(422)
    weight = layer.weight.detach()[0]
    far = {"x": 5 * weight / weight.square().sum(), "y": torch.tensor(1.0)}
    far["x"][0] = -1e3 if missing else far["x"][0]
    more = with_one_more(data, far, 100 if missing else 0)
    return (lambda: FillsMissing(layer) if missing else layer), hinge, data, more, options, 0


def entering(model, record, count, loss=least_squares, size=16, shift=0.0, scale=1.0, bound=1):
    """A record of these inputs and this label enters behind `count` Gaussian ones."""
    generator = torch.Generator().manual_seed(0)
    data = {
        "x": shift + scale * torch.randn(count, 3, generator=generator),
        "y": torch.randn(count, generator=generator),
    }
    last = {"x": torch.tensor(record[:-1]), "y": torch.tensor(record[-1])}
    return model, loss, data, with_one_more(data, last, count), {"microbatch_size": size}, bound


#: Model, loss, data, data with one record more, options, and by how many clip norms the sum may move. What
#: stands behind a case is by how many it did.
NEIGHBOURS = {
    "other sizes of microbatches": lambda: kinked({"microbatch_size": 7}),  # 143
    "hardened": lambda: kinked({"microbatch_size": 7, "hardened": True}),
    # 13.7: the plan of everybody followed it
    "other operations": lambda: kinked({"microbatch_size": 7}, missing=True),
    "other operations, a coin": lambda: entering(  # 164: in dense rows each record got a coin of its own
        lambda: FillsMissing(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), has_coin=True),
        [-1e3, 1.0, 1.0, 5.0], 210, size=256, shift=1.0, scale=0.1,
    ),
    "a failing record, noise": lambda: entering(Noisy, [0.0, 0, 0, 0.125], 60, failing, bound=0),
    "joins with no other": lambda: (  # 34: one sign for a microbatch became one per record
        lambda: nn.Linear(3, 1), least_squares, OfOneKind(200), OfOneKind(201),
        {"collate": signed, "microbatch_size": 64}, 1,
    ),
    "a model that catches what left the plan": lambda: entering(  # 22: its fallback fitted the rest of it
        Tolerant, [0.125, 1.0, 1.0, 0.0], 60, size=64, scale=3.0
    ),
    **{  # 2 to 10: the record gave the others another number
        f"shared numbers, {name}": lambda model=model: entering(model, [0.3, -1.0, 0.5, 2.0], 208)
        for name, model in SHARED_NUMBERS.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_one_record_more_moves_its_own_row_alone(name):
    torch.manual_seed(0)
    model, loss, data, more, options, bound = NEIGHBOURS[name]()
    sums = []
    for records in (data, more):
        torch.manual_seed(0)
        sums.append(raw_sum(model(), loss, records, **{"reproducible": True} | options))
    assert sums[0].norm() > 0.5
    assert (sums[1] - sums[0]).norm() <= bound + SLACK


@pytest.mark.parametrize("first", [0.0, 1.0])
def test_fillers_do_not_follow_the_first_private_record(first):
    data = {"x": torch.ones(40, 3), "has": torch.ones(40), "y": torch.ones(40)}
    data["has"][0] = first
    rows = listening(nn.Linear(3, 1), least_squares, data, microbatch_size=16)._setup.rows
    assert not any(bool(leaf.any()) for leaf in rows.fillers(rows.example).values())


class Noting(eq.DPSGD):
    """Notes the numbers and the norms of the records of each forward of two passes over a draw."""

    def step(self, context, state):
        def noted(ids):
            self.forwards.append(unwrap(ids).tolist())
            return ids

        def sums(rows, ids):
            noted(ids)
            self.norms.append(unwrap(rows.row_norms()))
            return {"gradient": clip(rows, Abadi(), 1.0)}

        draw = context.draw("batch")
        self.whole.extend(unwrap(draw.rows(lambda rows, ids: noted(ids))).tolist())
        return context.ledger.release(draw, draw.query(sums))["gradient"], state


def with_missing(places, loss: Callable = least_squares, of=torch.randn):
    """A training on 40 records, of which those at these places lack an entry, and its method."""
    torch.manual_seed(0)
    data = {"x": of(40, 3), "y": of(40)}
    data["x"][places, 0] = -1e3
    model = FillsMissing(nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Linear(16, 1)))
    method = Noting(clip_norm=1.0, noise_multiplier=1.0)
    for name in ("forwards", "whole", "norms"):
        object.__setattr__(method, name, [])
    options = {"microbatch_size": 16, "sampling": eq.FullBatch(40, 1), "reproducible": True}
    return listening(model, loss, data, method=method, **options), method


def test_no_record_decides_over_the_forward_of_another():
    """Where one of a micro-batch runs other operations, each has a forward of its own, and the same row."""
    run, noted = with_missing([9, 12, 20])
    run.take_step()
    expected = []
    for part in torch.arange(40).split(run.config()["settings"]["micro_batch_size"]):
        alone = {9, 12, 20} & {*part.tolist()}
        expected += [[n] for n in part.tolist()] if alone else [part.tolist()]
    assert noted.forwards == 2 * expected
    assert noted.whole == list(range(40))  # in the draw's order


@pytest.mark.parametrize("missing", [slice(0), slice(8, 24)], ids=["together", "by themselves"])
def test_equal_records_have_random_numbers_of_their_own(missing):
    """In one microbatch, in several, and where records run other operations than planned."""
    run, noted = with_missing(missing, of=torch.ones)
    run.take_step()
    assert len(torch.cat(noted.norms)) == 40
    assert len(torch.cat(noted.norms).unique()) > 30


def test_records_that_fail_only_together_have_forwards_of_their_own():
    def few_nines(model, batch):
        if int((batch["x"][:, 1] == 9).sum()) > 1:
            raise ValueError("more than one")
        return least_squares(model, batch)

    run, noted = with_missing([9], few_nines)
    run._setup.rows.source.batch()["x"][10:13, 1] = 9.0
    run.take_step()
    assert Counter(n for numbers in noted.forwards for n in numbers) == dict.fromkeys(range(40), 2)
    assert all(len(numbers) == 1 for numbers in noted.forwards if set(numbers) & {10, 11, 12})


def test_more_records_than_the_population_are_refused_where_random_numbers_are_shared():
    data = {"x": torch.randn(501, 3), "y": torch.randn(501)}
    with pytest.raises(ValueError, match="population=500"):
        listening(LayerDrop(lambda count: torch.rand(()) < 0.5), least_squares, data)


class Masking(Holed):
    """Joins records, and hides random entries of each; one of them cannot be read."""

    @staticmethod
    def collate(items):
        batch = default_collate(items)
        return batch | {"x": batch["x"] * (torch.rand(batch["x"].shape) < 0.5)}


def test_a_record_that_cannot_be_read_gives_no_two_others_one_random_number():
    seen: SimpleQueue = SimpleQueue()

    def watching(model, batch):
        seen.put(batch["x"].detach())
        return least_squares(model, batch)

    data = Masking({"x": torch.ones(64, 24), "y": torch.ones(64)}, float)
    run = listening(nn.Linear(24, 1), watching, data, collate=Masking.collate, microbatch_size=64)
    run.engine.never_replay("to watch")
    run.take_step()
    while not seen.empty():
        batch = seen.get()  # the last one, which all readable records share
    assert len(batch[:63].unique(dim=0)) == 63


@pytest.mark.parametrize(("size", "count"), [(32, 31), (1, 3)])
def test_a_full_micro_batch_holds_records_alone_and_a_short_one_fillers(size, count, monkeypatch):
    of_batch, seen = forwards.RowSource.of_batch, []

    def watching(self, rows_of, batch, *rest):
        seen.append(batch["x"])
        return of_batch(self, rows_of, batch, *rest)

    monkeypatch.setattr(forwards.RowSource, "of_batch", watching)
    data = {"x": torch.full((count, 3), 7.0), "y": torch.ones(count)}
    run = listening(nn.Linear(3, 1), least_squares, data, microbatch_size=size)
    run.take_step()
    rows, batches = forward_rows(size), math.ceil(count / size)
    assert [len(batch) for batch in seen] == [rows] * batches
    found = torch.cat(seen)
    assert ((found == 7).all(1).sum(), (found == 0).all(1).sum()) == (count, rows * batches - count)


class RaisesAtZero(nn.Linear):
    """As a loss does that divides by how many tokens count, and checks its result."""

    def forward(self, x):
        if bool((x == 0).all(1).any()):
            raise ValueError("a record of nothing")
        return super().forward(x)


class NotANumberAtZero(nn.Linear):
    def forward(self, x):
        return super().forward(x / x.square().sum(1, keepdim=True))


@pytest.mark.parametrize("model", [RaisesAtZero, NotANumberAtZero])
def test_a_model_that_takes_no_zeros_is_filled_with_copies(model):
    """And says so; where it runs on zeros, neither the plan nor what is published follows records."""
    copies = {Assumption.PADDED_WITH_COPIES, Assumption.PLANNED_ON_RECORDS}
    for kind, expected in ((model, copies), (nn.Linear, set())):
        torch.manual_seed(0)
        data = {"x": 1 + torch.rand(40, 3), "y": torch.randn(40)}
        run = listening(kind(3, 1), least_squares, data, microbatch_size=16)
        run.take_step()
        assert bool(run.ledger.heard.isfinite().all())
        assert copies & {*run.statement().assumptions} == expected


def test_where_memory_runs_out_the_error_names_a_size_that_fits():
    limit = [99]

    def greedy(model, batch):
        if len(batch["x"]) > limit[0]:
            raise torch.OutOfMemoryError("4 GiB")
        return least_squares(model, batch)

    run = listening(
        nn.Linear(3, 1), greedy, {"x": torch.randn(40, 3), "y": torch.randn(40)}, microbatch_size=16
    )
    run.engine.never_replay("the loss has to run")
    limit[0] = 4
    with pytest.raises(MemoryError, match="microbatch_size=8"):
        run.take_step()
    assert run.ledger.releases_left["batch"] == 2  # nothing was charged


def test_a_layer_is_dropped_as_often_as_its_coin_says():
    data = {"x": torch.randn(6, 3), "y": torch.randn(6)}
    model, steps = LayerDrop(lambda count: torch.rand(()) < 0.5), 60
    run = listening(model, least_squares, data, sampling=eq.FullBatch(6, steps), reproducible=True)
    ran = 0
    for _ in range(steps):
        run.take_step()
        ran += bool(run.ledger.heard[:12].any())
    assert 18 < ran < 42  # 30 and three deviations


def test_places_follow_one_law_whether_a_record_is_there_or_not():
    """Two records, alone and beside a third, on four places: all arrangements are equally likely."""
    for count in (2, 3):
        found = Counter()
        for index in range(256):
            token = Draw("batch", index, secret=bytes([index, count]))
            parts = _dealt(torch.arange(count), 2, 4, token, Processes())
            at = {
                int(i): (one.number, int(n))
                for one in parts
                for i, n in zip(one.ids, one.places, strict=True)
            }
            found[at[0], at[1]] += 1
        assert len(found) == 12
        assert min(found.values()) > 5


class Hungry(nn.Linear):
    """Holds far more where a record is large."""

    def forward(self, x):
        more = torch.tanh(x.repeat(1, 1000)).sum(1, keepdim=True) if bool((x.abs() > 5).any()) else 0
        return super().forward(x) + 0 * more


def test_what_is_published_is_measured_on_fillers(monkeypatch):
    monkeypatch.setattr(memory_use, "available_bytes", lambda device: 2**22)
    published = []
    for largest in (1.0, 9.0):
        data = {"x": torch.rand(40, 3), "y": torch.zeros(40)}
        data["x"][0] = largest
        run = listening(Hungry(3, 1), least_squares, data)
        published.append((run.config(), run.statement().assumptions))
    assert published[0] == published[1]
    assert Assumption.FOUND in published[0][1]
