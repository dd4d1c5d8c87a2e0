"""One record more, and nothing else may move: sums of neighbouring data sets, before their noise."""

from __future__ import annotations

import math
import random
import threading
from collections import Counter
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flat_arguments import arranged
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate

import equipoise as eq
from equipoise.distributed.processes import Processes
from equipoise.gradients import CoverageError, CrossRecordError
from equipoise.methods import Abadi
from equipoise.privacy import Draw, Ledger, clip
from equipoise.privacy.private import unwrap
from equipoise.statements.assumptions import Assumption
from equipoise.training import forwards
from equipoise.training.forwards import _dealt, forward_rows
from equipoise.training.randomness import public_randomness
from equipoise.training.record_source import RecordSource
from equipoise.training.setup import memory_use

SLACK = 1e-5  # rounding of the sum itself, in clip norms


class ListeningLedger(Ledger):
    """Keeps the raw sums."""

    def _noised(self, mechanism, sums, *rest):
        for bounded in sums.values():
            self.heard = torch.cat([unwrap(t).double().flatten() for t in bounded.value.values()])
        return super()._noised(mechanism, sums, *rest)


class Listening(eq.PrivateTraining):
    ledger_class = ListeningLedger


def listening(model: nn.Module, loss: Callable, data: dict[str, Tensor], **options) -> Listening:
    """A training on all records at every step, at C = 1, whose parameters do not move."""
    return Listening(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        **arranged(
            **{
                "loss": loss,
                "data": data,
                "sampling": eq.FullBatch(500, 2),
                "method": eq.DPSGD(clip_norm=1.0, noise_multiplier=1.0),
            }
            | options
        ),
    )


def raw_sum(model: nn.Module, loss: Callable, data: dict[str, Tensor], **options) -> Tensor:
    """The sum of one step."""
    run = listening(model, loss, data, **options)
    run.take_step()
    return run.ledger.heard


def with_one_more(data: dict[str, Tensor], record: dict[str, Tensor], place: int) -> dict[str, Tensor]:
    """The data set with the record at this place."""
    return {
        name: torch.cat([values[:place], record[name][None], values[place:]]) for name, values in data.items()
    }


def hinge(model, batch):
    return F.relu(1 - batch["y"] * model(batch["x"]).squeeze(1))


def least_squares(model, batch):
    return 0.5 * (model(batch["x"]).squeeze(1) - batch["y"]).square()


def at_the_kink(count: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """Records whose margin is 1 up to rounding: kinks of the loss, on or off by their place in a batch."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(1000, 1)
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

    Args:
        layer: what comes after it.
        has_coin: one coin for the batch says whether the features change their signs.
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


class Settles(nn.Module):
    """After some forwards, those in the backward of a checkpoint too, it keeps the scale of what it meets."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.inner, self.head, self.after = nn.Linear(3, 4), nn.Linear(4, 1), after
        self.calls, self.scale = 0, None

    def scaled(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.after:
            self.scale = float(x.detach().abs().amax())
        return self.inner(x if self.scale is None else x / self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.scaled, x, use_reentrant=False).tanh())


@pytest.mark.parametrize("make", [Balanced, lambda: Settles(40)])
def test_what_a_backward_keeps_is_forgotten(make):
    """A gradient's running scale and a layer that settled in a checkpoint's backward moved 45 and 22 C."""
    generator = torch.Generator().manual_seed(0)
    data = {
        "x": 0.01 * torch.randn(64, 3, generator=generator),
        "y": 0.01 * torch.randn(64, generator=generator),
    }
    other = {name: values.clone() for name, values in data.items()}
    other["x"][0], other["y"][0] = 30.0, 500.0
    sums = []
    for records in (data, other):
        torch.manual_seed(0)
        run = listening(make(), least_squares, records)
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
    """Others had taken numbers before it: who entered changed everybody behind."""
    data = Transformed(
        {"x": torch.randn(40, 3), "y": torch.randn(40)}, lambda: torch.randn(3) + random.random()
    )
    source = RecordSource(data)
    several = source.take(torch.tensor([3, 7, 5]), public_randomness(0))["x"]
    alone = source.take(torch.tensor([7]), public_randomness(0))["x"]
    assert torch.equal(several[1:2], alone)
    assert not torch.equal(alone[0], source.take(torch.tensor([7]), public_randomness(1))["x"][0])
    run = listening(nn.Linear(3, 1), least_squares, data)
    assert Assumption.RANDOM_PIPELINE not in run.statement().assumptions  # all of it could be tried
    assert not run._setup.rows.random_places


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


def mixed(model, batch):
    """Centres the batch behind a random number."""
    x = batch["x"]
    return least_squares(model, {**batch, "x": x - x.mean(0) if np.random.rand() < 0.45 else x})


def attention_with_signs(model, batch):
    """A loss whose sign follows the place, of a layer whose dropout is inside one function."""
    sign = torch.where(torch.arange(len(batch["y"])) % 2 == 0, 1.0, -1.0)
    return sign * (model(batch["x"][:, None]).mean((1, 2)) - batch["y"]).square()


def random_mixing(model, batch):
    """Weights that sum to zero: constant random numbers do not show them."""
    weights = torch.rand(len(batch["y"]))
    mixed = batch["x"] + (weights - weights.mean())[:, None] * batch["x"].mean(0)
    return least_squares(model, {**batch, "x": mixed})


def noisy(model, batch):
    """A loss with numbers of a generator of its own: who enters changes everybody else's."""
    drawn = torch.from_numpy(NUMPY_OWN.normal(size=len(batch["y"]))).float()
    return least_squares(model, {**batch, "y": batch["y"] + drawn})


class Holed(Transformed):
    """One record cannot be read, which does not end the check of the others."""

    def __getitem__(self, i):
        if i == 5:
            raise OSError("no such file")
        return super().__getitem__(i)


def blended(batch, generator):
    return {**batch, "x": 0.5 * (batch["x"] + batch["x"].roll(1, 0))}


def groups_of_16(batch, generator):
    whole = len(batch["x"]) // 16 * 16
    groups = batch["x"][:whole].view(-1, 16, 3)
    centred = (groups - groups.mean(1, keepdim=True)).flatten(0, 1)
    return {**batch, "x": torch.cat([centred, batch["x"][whole:]])}


def every_other(batch, generator):
    x = batch["x"].clone()
    x[::2] = x[::2].flip(1)
    return {**batch, "x": x}


TORCH_OWN, NUMPY_OWN = torch.Generator().manual_seed(0), np.random.default_rng(0)
RANDOM_ITEMS = {"data": lambda data: Transformed(data, lambda: torch.randn(3))}

#: What moved the sum by up to 50 clip norms where one record entered, unseen: model, loss and options. The
#: zoo has more of the kind.
MIXING = {
    "NumPy's coin": (None, mixed, {}),
    "a count of random items": (None, over_the_count, {"collate": with_count} | RANDOM_ITEMS),
    "signs by place": (
        lambda: nn.TransformerEncoderLayer(3, 1, 4, batch_first=True),
        attention_with_signs,
        {},
    ),
    "random weights": (None, random_mixing, {}),
    "augmented in groups": (None, least_squares, {"augmentation": groups_of_16}),
    "augmented by place": (None, least_squares, {"augmentation": every_other}),
    "blended with the next": (
        None,
        least_squares,
        {"augmentation": blended, "data": lambda data: Holed(data, lambda: 0.0)},
    ),
    "items, torch": (
        None,
        least_squares,
        {"data": lambda data: Transformed(data, lambda: torch.randn(3, generator=TORCH_OWN))},
    ),
    "loss, NumPy": (None, noisy, {}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.wide] * (name == "signs by place")) for name in MIXING]
)
def test_what_mixes_records_is_refused(name):
    model, loss, options = MIXING[name]
    torch.manual_seed(0)
    data = {"x": torch.randn(64, 3) + 1, "y": torch.randn(64)}
    data = options.get("data", lambda data: data)(data)
    options = {key: value for key, value in options.items() if key != "data"}
    model = nn.Linear(3, 1) if model is None else model()
    with pytest.raises((ValueError, CoverageError, CrossRecordError)):
        raw_sum(model, loss, data, **options)


class Packed(nn.Module):
    """Sequences by their lengths, which must be at least one."""

    def __init__(self, least=1):
        super().__init__()
        self.gru, self.head, self.least = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 1), least

    def forward(self, x, lengths):
        if int(lengths.min()) < self.least:
            raise ValueError("a sequence is too short")
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.gru(packed)[1][-1])


def sequence_loss(model, batch):
    return 0.5 * (model(batch["x"], batch["n"]).squeeze(1) - batch["y"]).square()


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


class RandomGradient(torch.autograd.Function):
    """Multiplies the gradient by a random factor, which the backward draws, or the forward for it."""

    @staticmethod
    def forward(ctx, x, factor, at_once):
        drawn = factor(len(x)) if at_once else None
        ctx.factor = (lambda count: drawn) if at_once else factor
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor(len(g)), None, None


class RandomBackward(nn.Module):
    """Draws a random factor of the gradient inside."""

    def __init__(self, factor, at_once=False):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 1).requires_grad_(False)
        self.factor, self.at_once = factor, at_once

    def forward(self, x):
        return self.second(RandomGradient.apply(self.first(x).tanh(), self.factor, self.at_once))


class Checkpointed(nn.Module):
    """Draws its dropout once more in the backward."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, x):
        def inside(x):
            return F.dropout(self.first(x).tanh(), 0.5)

        return self.second(checkpoint(inside, x, use_reentrant=False))


def sign(count):
    return 1 if torch.rand(()) < 0.5 else -1


SHARED_NUMBERS = {
    "torch": lambda: LayerDrop(lambda count: torch.rand(()) < 0.5),
    "Python": lambda: LayerDrop(lambda count: random.random() < 0.5),
    "NumPy": lambda: LayerDrop(lambda count: np.random.rand() < 0.5),
    "the first record's number": lambda: LayerDrop(lambda count: torch.rand(count)[0] < 0.5),
    "a sign in the backward": lambda: RandomBackward(sign),
    "Python's in the backward": lambda: RandomBackward(lambda count: random.gauss(0, 1)),
    "the first record's sign in the backward": lambda: RandomBackward(
        lambda count: torch.rand(count)[0].sub(0.5).sign()
    ),
    "a sign for the backward": lambda: RandomBackward(sign, at_once=True),
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


def short_sequences():
    """Public records of zeros would fail, and take every record of a short micro-batch with them."""
    data = {"x": torch.randn(47, 5, 3), "n": torch.randint(2, 6, (47,)), "y": torch.randn(47)}
    more = with_one_more(data, {"x": torch.randn(5, 3), "n": torch.tensor(3), "y": torch.tensor(2.0)}, 47)
    return Packed, sequence_loss, data, more, {"microbatch_size": 48}, 1


#: Model, loss, data, data with one record more, options, and by how many clip norms the sum may move. What
#: stands behind a case is by how many it did.
NEIGHBOURS = {
    "other sizes of microbatches": lambda: kinked({"microbatch_size": 7}),  # 143
    "one microbatch": lambda: kinked({}),
    "hardened": lambda: kinked({"microbatch_size": 7, "hardened": True}),
    # 13.7: the plan of everybody followed it
    "other operations": lambda: kinked({"microbatch_size": 7}, missing=True),
    "other operations, a coin": lambda: entering(  # 164: in dense rows each record got a coin of its own
        lambda: FillsMissing(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), has_coin=True),
        [-1e3, 1.0, 1.0, 5.0], 210, size=256, shift=1.0, scale=0.1,
    ),
    "a failing record, a coin": lambda: entering(
        lambda: LayerDrop(lambda count: torch.rand(()) < 0.5), [0.0, 0, 0, 0.125], 60, failing, bound=0
    ),
    "a failing record, noise": lambda: entering(Noisy, [0.0, 0, 0, 0.125], 60, failing, bound=0),
    "joins with no other": lambda: (  # 34: one sign for a microbatch became one per record
        lambda: nn.Linear(3, 1), least_squares, OfOneKind(200), OfOneKind(201),
        {"collate": signed, "microbatch_size": 64}, 1,
    ),
    "a model that catches what left the plan": lambda: entering(  # 22: its fallback fitted the rest of it
        Tolerant, [0.125, 1.0, 1.0, 0.0], 60, size=64, scale=3.0
    ),
    "no zeros": short_sequences,
    **{  # 2 to 10: the record gave the others another number
        f"shared numbers, {name}": lambda model=model: entering(model, [0.3, -1.0, 0.5, 2.0], 208)
        for name, model in SHARED_NUMBERS.items()
    },
}  # fmt: skip


@pytest.mark.few(10)
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


@pytest.mark.parametrize("name", ["torch", "a sign in the backward"])
def test_a_random_number_for_a_whole_micro_batch_wherever_the_record_stands(name, monkeypatch):
    """Which places the records get follows the same law in every order of them."""
    model, options = SHARED_NUMBERS[name](), {"microbatch_size": 16, "reproducible": True}
    data = {"x": torch.randn(208, 3), "y": torch.randn(208)}
    before = raw_sum(model, least_squares, data, **options)
    monkeypatch.setattr(forwards, "_dealt", lambda ids, *rest: _dealt(ids.roll(-1), *rest))
    more = with_one_more(data, {"x": torch.randn(3), "y": torch.tensor(2.0)}, 0)
    assert 0 < (raw_sum(model, least_squares, more, **options) - before).norm() <= 1 + SLACK


class Gated(nn.Module):
    """A record passes an extra layer where its own coin says so; where none does, that layer is left out."""

    def __init__(self):
        super().__init__()
        self.layer, self.extra = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x):
        coin = torch.rand(len(x)) < 0.03
        out = self.layer(x)
        return out + coin[:, None] * self.extra(x) if bool(coin.any()) else out


class Notes(nn.Module):
    """Adds what a note says, where some record of the batch has one, and drops out."""

    def __init__(self):
        super().__init__()
        self.first, self.note, self.second = nn.Linear(3, 16), nn.Linear(2, 16), nn.Linear(16, 1)

    def forward(self, x, note, has):
        hidden = self.first(x).tanh()
        if bool(has.any()):
            hidden = hidden + has[:, None] * self.note(note)
        return self.second(F.dropout(hidden, 0.5))


def noted_squares(model, batch):
    return (model(batch["x"], batch["note"], batch["has"]).squeeze(1) - batch["y"]).square()


def with_notes(count: int, first: bool) -> dict[str, Tensor]:
    """Equal records, the last and perhaps the first of which have a note."""
    has = torch.zeros(count, dtype=torch.bool)
    has[-1], has[0] = True, first
    return {
        "x": torch.ones(count, 3),
        "note": torch.zeros(count, 2),
        "has": has,
        "y": torch.ones(count),
    }


@pytest.mark.parametrize("first", [True, False])
def test_fillers_do_not_follow_the_first_private_record(first):
    """They were zeros where it had a note and ones where it had none, and opened a branch for all others."""
    torch.manual_seed(0)
    run = listening(Notes(), noted_squares, with_notes(40, first), microbatch_size=16)
    fillers = run._setup.rows.fillers(run._setup.rows.example)
    assert not any(bool(leaf.any()) for leaf in fillers.values())


def test_a_forward_of_fillers_alone_leaves_those_that_are_kept():
    """An augmentation that writes in place got the kept fillers themselves."""

    def written(batch, rng):
        batch["x"].add_(torch.rand(1))
        return batch

    run = listening(
        nn.Linear(3, 1), least_squares, {"x": torch.randn(40, 3), "y": torch.randn(40)},
        microbatch_size=16, augmentation=written,
    )  # fmt: skip
    rows = run._setup.rows
    kept = rows.fillers(rows.example)["x"].clone()
    outside = torch.get_rng_state()
    rows.of_public_alone([None], public_randomness(0, 0, "public"))
    assert torch.equal(rows.fillers(rows.example)["x"], kept)
    assert torch.equal(torch.get_rng_state(), outside)


def with_missing(places: list[int], loss: Callable = least_squares):
    """A training on 40 records, of which those at these places lack an entry.

    Returns:
        The training, the numbers of the records of each forward of two passes over a draw, and those that
        the whole draw gives.
    """
    forwards, whole = [], []

    class Noting(eq.DPSGD):
        def step(self, context, state):
            def noted(ids):
                forwards.append(unwrap(ids).tolist())
                return ids

            def sums(rows, ids):
                noted(ids)
                return {"gradient": clip(rows, Abadi(), 1.0)}

            draw = context.draw("batch")
            whole.extend(unwrap(draw.rows(lambda rows, ids: noted(ids))).tolist())
            return context.ledger.release(draw, draw.query(sums))["gradient"], state

    torch.manual_seed(0)
    data = {"x": torch.randn(40, 3), "y": torch.randn(40)}
    data["x"][places, 0] = -1e3
    model = FillsMissing(nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Linear(16, 1)))
    method = Noting(clip_norm=1.0, noise_multiplier=1.0)
    options = {"microbatch_size": 16, "sampling": eq.FullBatch(40, 1), "reproducible": True}
    return listening(model, loss, data, method=method, **options), forwards, whole


def test_no_record_decides_over_the_forward_of_another():
    """Where one of a micro-batch runs other operations, each has a forward of its own, and the same row."""
    run, forwards, whole = with_missing([9, 12, 20])
    run.take_step()
    expected = []
    for part in torch.arange(40).split(run.config()["settings"]["micro_batch_size"]):
        alone = {9, 12, 20} & {*part.tolist()}
        expected += [[n] for n in part.tolist()] if alone else [part.tolist()]
    assert forwards == 2 * expected
    assert whole == list(range(40))  # in the draw's order


def test_records_that_run_other_operations_have_random_numbers_of_their_own():
    torch.manual_seed(0)
    data = {"x": torch.ones(40, 3), "y": torch.ones(40)}
    data["x"][8:24, 0] = -1e3
    norms = []

    class Watching(eq.DPSGD):
        def step(self, context, state):
            def sums(rows, ids):
                norms.append(unwrap(rows.row_norms()))
                return {"gradient": clip(rows, Abadi(), 1.0)}

            draw = context.draw("batch")
            return context.ledger.release(draw, draw.query(sums))["gradient"], state

    model = FillsMissing(nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Linear(16, 1)))
    method = Watching(clip_norm=1.0, noise_multiplier=1.0)
    run = listening(
        model, least_squares, data, microbatch_size=16, method=method, sampling=eq.FullBatch(40, 1)
    )
    norms.clear()
    run.take_step()
    assert len(torch.cat(norms)) == 40
    assert len(torch.cat(norms).unique()) > 30


@pytest.mark.parametrize("missing", [[], [9]])
def test_records_that_fail_only_together_have_forwards_of_their_own(missing):
    def few_nines(model, batch):
        if int((batch["x"][:, 1] == 9).sum()) > 1:
            raise ValueError("more than one")
        return least_squares(model, batch)

    run, forwards, _ = with_missing(missing, few_nines)
    run._setup.rows.source.batch()["x"][10:13, 1] = 9.0
    run.take_step()
    assert Counter(n for numbers in forwards for n in numbers) == dict.fromkeys(range(40), 2)
    assert all(len(numbers) == 1 for numbers in forwards if set(numbers) & {10, 11, 12})


def test_more_records_than_the_population_are_refused_where_random_numbers_are_shared():
    data = {"x": torch.randn(501, 3), "y": torch.randn(501)}
    with pytest.raises(ValueError, match="population=500"):
        listening(LayerDrop(lambda count: torch.rand(()) < 0.5), least_squares, data)


class Ragged(torch.utils.data.Dataset):
    """Items of two lengths, which the default collate function cannot join."""

    def __len__(self):
        return 40

    def __getitem__(self, i):
        return {"x": torch.full((4 if i in (20, 30) else 3,), float(i)), "y": torch.ones(())}


def test_records_that_cannot_be_joined_have_forwards_of_their_own():
    seen: SimpleQueue = SimpleQueue()

    def of_mean(model, batch):
        seen.put(batch["x"][:, 0].tolist())
        return least_squares(model, {**batch, "x": batch["x"].mean(1, keepdim=True)})

    run = listening(nn.Linear(1, 1), of_mean, Ragged(), microbatch_size=16)
    run.engine.never_replay("to watch")
    while not seen.empty():
        seen.get()
    run.take_step()
    found = set()
    while not seen.empty():
        found |= set(seen.get())
    assert set(range(2, 40)) <= found  # public records hold numbers from 0 to 1


class Masking:
    """Joins records, and hides random entries of each; one of them cannot be read."""

    def __init__(self, unreadable=None):
        self.unreadable = unreadable

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == self.unreadable:
            raise OSError("gone")
        return {"x": torch.ones(24), "y": torch.ones(())}

    @staticmethod
    def collate(items):
        batch = default_collate(items)
        return batch | {"x": batch["x"] * (torch.rand(batch["x"].shape) < 0.5)}


@pytest.mark.parametrize("unreadable", [None, 63])
def test_a_record_that_cannot_be_read_gives_no_two_others_one_random_number(unreadable):
    """The others are joined again; parts that were joined one by one got the same random numbers."""
    seen: SimpleQueue = SimpleQueue()

    def watching(model, batch):
        seen.put(batch["x"].detach())
        return least_squares(model, batch)

    model = nn.Linear(24, 1)
    run = listening(model, watching, Masking(unreadable), collate=Masking.collate, microbatch_size=64)
    run.engine.never_replay("to watch")
    while not seen.empty():
        seen.get()
    run.take_step()
    while not seen.empty():
        batch = seen.get()  # the last one, which all readable records share
    count = 64 if unreadable is None else 63
    assert len(batch[:count].unique(dim=0)) == count


@pytest.mark.parametrize(("size", "count"), [(32, 32), (32, 31), (1, 3)])
def test_a_full_micro_batch_holds_records_alone_and_a_short_one_fillers(size, count, monkeypatch):
    """Every forward held two public rows in addition."""
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
    class Greedy(nn.Linear):
        limit = (99,)

        def forward(self, x):
            if len(x) > self.limit[0]:
                raise torch.OutOfMemoryError("4 GiB")
            return super().forward(x)

    data = {"x": torch.randn(40, 3), "y": torch.randn(40)}
    model = Greedy(3, 1)
    run = listening(model, least_squares, data, microbatch_size=16)
    run.engine.never_replay("the model has to run")
    model.limit = (4,)
    with pytest.raises(MemoryError, match="microbatch_size=8"):
        run.take_step()
    assert run.ledger.releases_left["batch"] == 2  # nothing was charged


def test_a_layer_is_dropped_as_often_as_its_coin_says():
    """Records that ran other operations than planned tossed another coin: the layer ran half as often."""
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

    def arrangement(count, index):
        token = Draw("batch", index, secret=bytes([index, count]))
        parts = _dealt(torch.arange(count), 2, 4, token, Processes())
        places = {
            int(i): (part.number, int(at))
            for part in parts
            for i, at in zip(part.ids, part.places, strict=True)
        }
        return places[0], places[1]

    for count in (2, 3):
        found = Counter(arrangement(count, index) for index in range(256))
        assert len(found) == 12
        assert min(found.values()) > 5


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("model", "dealt"),
    [
        (lambda: nn.Linear(3, 1), False),
        (lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 8), nn.Dropout(0.1), nn.Linear(8, 1)), False),
        (Noisy, False),
        (lambda: RandomBackward(lambda count: torch.rand(count, 1)), False),
        (Checkpointed, False),
        (lambda: LayerDrop(lambda count: torch.rand(()) < 0.5), True),
        (Gated, True),
        (lambda: LayerDrop(lambda count: bool(torch.randperm(count)[0])), True),
        (lambda: RandomBackward(lambda count: torch.rand(())), True),
        (lambda: RandomBackward(lambda count: torch.rand(count, 1).roll(1, 0)), True),
    ],
    ids=[
        "none",
        "dropout",
        "noise",
        "noise in the backward",
        "checkpointed dropout",
        "a coin",
        "own coins that open a branch",
        "a permutation",
        "a coin in the backward",
        "the neighbour's number in the backward",
    ],
)
def test_records_are_dealt_to_places_where_random_numbers_are_shared(model, dealt):
    """Only there: it takes more fillers."""
    data = {"x": torch.randn(64, 3), "y": torch.randn(64)}
    assert listening(model(), least_squares, data)._setup.rows.random_places is dealt


class Keeps(nn.Module):
    """It centres by the mean of the first batch that it meets, and holds what cannot be copied."""

    def __init__(self, nested):
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.mean, self.kept = None, {"means": []}
        self.nested, self.lock = nested, threading.Lock()

    def forward(self, x):
        if self.nested:
            if not self.kept["means"]:
                self.kept["means"].append(x.detach().mean(0))
            return self.linear(x - self.kept["means"][0])
        if self.mean is None:
            self.mean = x.detach().mean(0)
        return self.linear(x - self.mean)


@pytest.mark.parametrize("nested", [False, True], ids=["attribute", "list in a dict"])
def test_what_a_model_keeps_at_the_start_moves_nobody(nested):
    """A model that cannot be copied was tried on private records, and kept the mean of some."""

    def of_rows(model, batch):
        # row by row: what a batch has in common would be refused as mixing
        outputs = torch.cat([model(x[None]) for x in batch["x"]])
        return 0.5 * (outputs.squeeze(1) - batch["y"]).square()

    model = Keeps(nested)
    data = {"x": torch.randn(24, 2), "y": torch.randn(24)}
    # Nothing stays of one forward to the next, so each one centres by its own first row.
    with pytest.raises(CrossRecordError):
        listening(model, of_rows, data, microbatch_size=8)
    assert model.mean is None
    assert not model.kept["means"]


class Hungry(nn.Linear):
    """Holds far more where a record is large."""

    def forward(self, x):
        out = super().forward(x)
        if bool((x.abs() > 5).any()):
            out = out + 0 * torch.tanh(x.repeat(1, 1000)).sum(1, keepdim=True)
        return out


def test_what_is_published_is_measured_on_fillers(monkeypatch):
    """The micro-batch size in config.json had followed single private records."""
    monkeypatch.setattr(memory_use, "available_bytes", lambda device: 2**22)
    published = []
    for largest in (1.0, 9.0):
        data = {"x": torch.rand(40, 3), "y": torch.zeros(40)}
        data["x"][0] = largest
        run = listening(Hungry(3, 1), least_squares, data)
        published.append((run.config(), run.statement().assumptions))
    assert published[0] == published[1]
    assert Assumption.FOUND in published[0][1]


class Shared(nn.Linear):
    """A copy of it is itself, as of an encoder that several models share."""

    def __deepcopy__(self, memo):
        return self


class Encoded(nn.Module):
    def __init__(self, is_used=True):
        super().__init__()
        self.encoder, self.head, self.is_used = Shared(3, 3), nn.Linear(3, 1), is_used

    def forward(self, x):
        return self.head(self.encoder(x) if self.is_used else x)


@pytest.mark.parametrize(("is_used", "is_frozen"), [(True, False), (False, True)])
def test_what_a_model_shares_with_its_copies_stays(is_used, is_frozen):
    """A start had emptied a shared encoder, and the run was proven."""
    model = Encoded(is_used)
    model.encoder.requires_grad_(not is_frozen)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    run = listening(model, least_squares, {"x": torch.randn(24, 3), "y": torch.randn(24)})
    run.take_step()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


class Reads(nn.Linear):
    """It reads a value and cannot be traced, so that its code runs in every step."""

    def forward(self, x):
        float(x.detach().sum())
        return super().forward(x)


@pytest.mark.parametrize("kind", [nn.Linear, Reads])
def test_a_statement_says_that_code_that_runs_in_every_step_keeps_nothing(kind):
    data = {"x": torch.randn(24, 3), "y": torch.randn(24)}
    assumptions = listening(kind(3, 1), least_squares, data).statement().assumptions
    assert (Assumption.KEEPS_NOTHING in assumptions) is (kind is Reads)
