"""Bad input gives an error that teaches, before anything is spent."""

import warnings

import pytest
import torch
from small_problems import (
    CLASSES,
    FEATURES,
    RECORDS,
    OnDemand,
    lines,
    loss,
    network,
    parameters,
    records,
    resumed,
    saved,
    training,
    weighted_loss,
    with_overflow,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import equipoise as eq
from equipoise.data import Records
from equipoise.gradients import CrossRecordError, ForwardWritesError
from equipoise.methods.adaptive_rms import Round
from equipoise.methods.clip_rules import Abadi, ClipRule
from equipoise.privacy import ChangedQueryError, clip
from equipoise.privacy.private import unwrap
from equipoise.training import DataError, forwards


def with_value(field, value):
    data = records()
    data[field][17, ...] = value
    return data


DATA = {
    "no records": (lambda: {"input": torch.zeros(0, 12), "label": torch.zeros(0).long()}, "holds no records"),
    "a label above the range": (lambda: with_value("label", 3), "fails on .*labels' range"),
    "a label below the range": (lambda: with_value("label", -1), "fails on .*labels' range"),
    "infinity": (lambda: with_value("input", float("inf")), "1 record holds NaN or infinity"),
    "NaN that was let pass": (
        lambda: Records(with_value("input", float("nan")), check_finite=False), "the first is number 17"
    ),
    "unequal lengths": (lambda: records() | {"label": records(59)["label"]}, "same record axis"),
    "a loader": (lambda: DataLoader(TensorDataset(torch.zeros(3, 12))), "DataLoader.*loader.dataset"),
    "wrong type": (lambda: records() | {"input": torch.zeros(RECORDS, 12).long()}, "fails on"),
    "NumPy arrays": (lambda: {n: v.numpy() for n, v in records().items()}, r"torch.from_numpy\(array\)"),
}  # fmt: skip


class Halved(TensorDataset):
    """It makes its own items: its tensors had been taken as they are."""

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x / 2, y


@pytest.mark.parametrize(
    "data",
    [
        Records(records()), OnDemand(records()), list(records().values()), TensorDataset(*records().values()),
        Halved(2 * records()["input"], records()["label"]),
    ],
    ids=type,
)  # fmt: skip
def test_every_kind_of_data_gives_the_same_training(data):
    def either(model, batch):
        x, y = batch.values() if isinstance(batch, dict) else batch
        return F.cross_entropy(model(x), y, reduction="none")

    expect, got = network(), network()
    list(training(expect, steps=3))
    list(training(got, data=data, loss=either, steps=3))
    torch.testing.assert_close(parameters(got), parameters(expect))


other = network(seed=3)
LOSSES = {
    "detached": (lambda m, b: loss(m, b).detach(), DataError, r"no gradient.*Nothing was spent"),
    "of another model": (lambda m, b: loss(other, b), DataError, r"no gradient.*Nothing was spent"),
    "a mean": (lambda m, b: loss(m, b).mean(), DataError, 'use reduction="none"'),
    "every record with every other": (
        lambda m, b: m(b["input"])[:, :1] - b["label"], DataError, r"an output \[B, 1\] met a target \[B\]"
    ),
    "a mean of every record with every other": (
        lambda m, b: (m(b["input"])[:, :1] - b["label"]).square().mean(1),
        CrossRecordError, r"test_bad_input.py.*aten.sub.*an output \[B, 1\] minus a target \[B\]",
    ),
    "a function of outputs and labels": (F.cross_entropy, DataError, "It gets model and batch"),
    "not a number": (lambda m, b: loss(m, b) / 0, DataError, "NaN or infinite"),
}  # fmt: skip


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def with_rate(rate, optimizer):
    optimizer.param_groups[0]["lr"] = rate
    return optimizer


schedulers = torch.optim.lr_scheduler


#: Arguments, of which `optimizer` makes one for the model, an error and words of it.
def with_norm(trained=False):
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model[1].requires_grad_(trained)
    return model


def by_person(model, batch):
    return loss(model, batch) + 0 * batch["person"]


class Sharp(torch.optim.SGD):
    """It looks for a worse point nearby first."""

    def step(self, closure):
        closure()
        super().step()


USERS = {"records_per_user": 2, "population": RECORDS // 2, "loss": by_person}
PERSONS = records() | {"person": torch.arange(RECORDS) // 2}
GIVEN = {"loss": loss, "data": records(), "sampling": eq.Poisson(12, RECORDS, 3)}
#: Arguments, of which `optimizer` makes one for the parameters, an error and words of it.
ARGUMENTS = {
    "a misspelt keyword": ({"mirco_batch_size": 3}, TypeError, "mirco_batch_size"),
    "a sampling rate": ({"sampling": 0.01}, TypeError, "population"),
    "no budget and no noise": ({"method": eq.DPSGD()}, ValueError, "budget is missing"),
    "nothing to train": ({"model": network().requires_grad_(False)}, ValueError, "no trainable parameter"),
    "a lazy model": ({"model": nn.Sequential(nn.LazyLinear(3))}, ValueError, "no shape yet"),
    "several evaluations a step":
        ({"optimizer": lambda own, lr: torch.optim.LBFGS(own)}, TypeError, "optimizer is a"),
    "a step that takes a closure": ({"optimizer": Sharp}, TypeError, "step needs closure"),
    "a differentiable step":
        ({"optimizer": lambda own, lr: torch.optim.SGD(own, lr, differentiable=True)}, ValueError, "=True"),
    "an optimiser of another model":
        ({"optimizer": lambda own, lr: sgd(network())}, ValueError, "does not hold"),
    "an optimiser that finds its rate":
        ({"optimizer": lambda own, lr: with_rate(None, torch.optim.SGD(own, lr))}, ValueError, "has lr=None"),
    "an optimiser of the loss, too":
        ({"optimizer": lambda own, lr: torch.optim.SGD([*own, *nn.Linear(3, 3).parameters()], lr)},
        ValueError, "ModuleDict"),
    "a scaler": ({"optimizer": lambda *_, **__: torch.amp.GradScaler("cpu")}, TypeError, "bfloat16"),
    "a scheduler that follows a metric":
        ({"scheduler": schedulers.ReduceLROnPlateau(sgd(network()))}, TypeError, "ReduceLROnPlateau"),
    "a foreign scheduler":
        ({"scheduler": schedulers.StepLR(sgd(network()), 1)}, ValueError, "another optimiser"),
    "batch norm": ({"model": with_norm(trained=True)}, RuntimeError, "replace_batch_norm"),
    "a column that the loss reads":
        ({"data": PERSONS, "owner": "person", **USERS}, ValueError, "owner=its values"),
    "another unit": ({"unit": "user"}, TypeError, r"unit='user'.*Users\(owner"),
}  # fmt: skip
#: Fields of arguments.
WRONG = {
    "workers": (lambda: eq.Data([0], workers=-1), ValueError, "workers=-1"),
    "augmentation": (lambda: eq.Data([0], augmentation="flip"), TypeError, "augmentation='flip'.*give"),
    "views": (lambda: eq.Data([0], views=0), ValueError, "views=0"),
    "ids": (lambda: eq.Data({"x": torch.zeros(2)}, ids="name"), DataError, "ids='name'"),
    "weights": (lambda: eq.Data({"x": torch.zeros(2)}, weights="w"), DataError, "weights='w'"),
    "microbatch_size": (lambda: eq.Data([0], microbatch_size=0), ValueError, "microbatch_size=0"),
    "diagnostics": (lambda: eq.Run(diagnostics=print), ValueError, "reproducible=True"),
    "secret_seed": (lambda: eq.Run(secret_seed=__file__, reproducible=True), ValueError, "public seed"),
    "starts_from": (lambda: eq.Run(starts_from="imagenet"), ValueError, "starts_from='imagenet'.*'public'"),
    "ema_decay": (lambda: eq.Run(ema_decay=1.0), ValueError, r"ema_decay=1\.0"),
    "trust": (lambda: eq.Run(trust="router"), TypeError, r"trust='router'.*\('router',\)"),
    "records_per_user": (lambda: eq.Users([0], records_per_user=0), ValueError, "records_per_user=0"),
    "rows": (lambda: eq.Users([0], records_per_user=2, rows="max"), ValueError, "rows='max'.*'mean'"),
    "relation": (lambda: eq.Record(relation="swap"), ValueError, "relation='swap'.*give"),
    "an old keyword": (lambda: eq.PrivateTraining(*[None] * 2, seed=3, **GIVEN), TypeError, "^seed= is now"),
}
REFUSED = {
    **{name: (lambda run, make=make: training(data=make(), folder=run), DataError, words)
       for name, (make, words) in DATA.items()},
    **{name: (lambda run, bad=bad: training(loss=bad, folder=run), *error)
       for name, (bad, *error) in LOSSES.items()},
    **{name: (lambda run, given=given: training(folder=run, **given), *error)
       for name, (given, *error) in ARGUMENTS.items()},
    **{f"{name}=": (lambda run, make=make: make(), *error) for name, (make, *error) in WRONG.items()},
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_mistake_is_named_with_its_remedy_before_anything_is_written(name, tmp_path):
    make, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        make(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_records_in_place_of_an_argument_are_not_printed():
    for name in ("method", "augmentation"):
        with pytest.raises(TypeError, match=f"^{name} is "):
            training(**{name: records()["input"]})
    with pytest.raises(TypeError, match=r"^population must be an integer, not Tensor: it is"):
        eq.Poisson(12, records()["label"], 3)


def test_a_population_far_above_the_data_is_warned_of():
    for population, side in ((1000, "above"), (RECORDS * 4 // 5, "below")):
        with pytest.warns(UserWarning, match=rf"stated as {population:,}, more than a tenth {side}") as told:
            training(population=population)
        assert str(RECORDS) not in str(told[0].message)  # how many there are is private
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training(population=RECORDS)


@pytest.mark.parametrize(("rule", "value"), [("abadi", float("nan")), ("nsgd", 1e30)])
def test_a_bad_record_met_in_training_gets_weight_zero(rule, value, tmp_path):
    """A record that is fine in the data and blows up on the way: everything else stays as without it."""

    def cursed(model, batch):
        # the last record's loss is multiplied by something that is not finite, but only in training
        scale = torch.where(batch["input"][:, 0] == 123.0, factor[0], 1.0)
        return loss(model, batch | {"input": batch["input"].clamp(max=5)}) * scale

    data = records()
    data["input"][-1, 0] = 123.0
    factor = [1.0]
    method = eq.DPSGD(clip_norm=0.5, noise_multiplier=1.0, clip_rule=ClipRule.kinds()[rule]())
    sampling = eq.FullBatch(RECORDS, 2)
    without = network()
    clean = {name: rows[:-1] for name, rows in data.items()}
    list(training(without, data=clean, loss=cursed, method=method, sampling=sampling))
    model = network()
    run = training(model, data=data, loss=cursed, method=method, sampling=sampling, folder=tmp_path / "run")
    factor[0] = value
    list(run)
    torch.testing.assert_close(parameters(model), parameters(without), rtol=1e-5, atol=1e-6)
    rows = lines(tmp_path / "run/private/diagnostics.jsonl")
    assert [row["batch.gradient.records_not_finite"] for row in rows] == [1, 1]


NO_CLASS = 987_654_321_012_345_678  # longer than any time or figure: no other number holds its digits


class Curse(OnDemand):
    """Records made on demand, one of which goes wrong from the start on."""

    def __init__(self, position: int, how: str) -> None:
        super().__init__(records())
        self.position, self.how = position, how

    def __getitem__(self, index: int):
        item = super().__getitem__(index)
        if index != self.position:
            return item
        if self.how == "unreadable":
            raise OSError("secret-value in record")
        if self.how == "label":
            return item | {"label": torch.tensor(NO_CLASS)}
        if self.how == "shape":
            return item | {"input": torch.zeros(7)}
        if self.how == "fields":
            return {"input": item["input"]}
        return item | {"input": item["input"] * float(self.how)}


@pytest.mark.parametrize(
    ("how", "position"), [("unreadable", 0), ("label", 41), ("shape", 0), ("fields", 41), ("nan", 0)]
)
def test_a_bad_record_made_on_demand_gets_weight_zero(how, position, tmp_path, capfd):
    sampling = eq.FullBatch(RECORDS, 2)
    method = eq.DPSGD(clip_norm=0.5, noise_multiplier=1.0)
    without, model = network(), network()
    keep = torch.arange(RECORDS) != position
    clean = {name: rows[keep] for name, rows in records().items()}
    list(training(without, data=clean, method=method, sampling=sampling))
    options = {"method": method, "sampling": sampling, "folder": tmp_path / "run", "microbatch_size": 16}
    run = training(model, data=Curse(position, how), **options)
    run.describe()
    run.run(progress=False)
    torch.testing.assert_close(parameters(model), parameters(without), rtol=1e-5, atol=1e-6)
    rows = lines(tmp_path / "run/private/diagnostics.jsonl")
    counted = "batch.gradient.records_not_finite" if how == "nan" else "batch.records_failed"
    assert [row[counted] for row in rows] == [1, 1]
    files = [path for path in (tmp_path / "run").rglob("*.*") if path.suffix in (".json", ".jsonl")]
    shown = "".join(capfd.readouterr()) + "".join(path.read_text() for path in files)
    assert "secret-value" not in shown
    assert str(NO_CLASS) not in shown


class Keeping(nn.Module):
    """Writes its input into a tensor of its own, and then fails, once its switch is on.

    Entries of lists are not compared before a step, which meets what the switch opens.
    """

    def __init__(self, where, how="in place", error=None):
        super().__init__()
        self.linear, self.where, self.how, self.error, self.switch = (
            nn.Linear(4, 3),
            where,
            how,
            error,
            [False],
        )
        self.register_buffer("buffer", torch.zeros(4))
        self.frozen = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.kept = [getattr(self, where) if where != "trainable" else self.linear.weight]

    def forward(self, x):
        if self.switch[0]:
            known_as = self.linear.weight if self.where == "trainable" else getattr(self, self.where)
            tensor = self.kept[0] if self.how == "by another name" else known_as
            with torch.no_grad():
                (tensor.data if self.how == "data" else tensor).copy_(x[0])
            if self.error is not None:
                raise self.error
        return self.linear(x)


KEEPING = [
    ("buffer", "by another name", None, ForwardWritesError, "kept"),
    ("frozen", "in place", ValueError(), ForwardWritesError, "frozen"),
    ("trainable", "data", None, RuntimeError, r"linear\.weight|writes to itself"),
    # What is written through `.data` before an error is seen when something would be saved.
    ("trainable", "data", KeyboardInterrupt(), KeyboardInterrupt, ""),
]


@pytest.mark.parametrize(("where", "how", "error", "refused", "words"), KEEPING)
def test_after_a_write_to_the_model_nothing_is_saved_or_published(
    tmp_path, where, how, error, refused, words
):
    data = {"input": torch.randn(60, 4), "label": torch.arange(60) % 3}
    model, moved = Keeping(where, how, error), []
    run = training(model, data=data, batch=6, steps=4, folder=tmp_path / "run")
    run.engine.never_replay("what it writes is no trace's")
    run.take_step()
    run.optimizer.register_step_post_hook(lambda *_: moved.append(1))
    model.switch[0] = True
    with pytest.raises(refused, match=words):
        run.take_step()
    model.switch[0] = False
    assert (run.steps_done, moved) == (1, [])
    for publish in (run.take_step, run.run, run.finish, run.save_checkpoint, lambda: run.evaluate(len)):
        with pytest.raises(RuntimeError, match=r"(wrote|writes) to its.* last checkpoint"):
            publish()
    assert not (tmp_path / "run/model.safetensors").exists()


def test_what_a_buffer_is_given_through_data_is_seen_in_a_trace():
    """No count of changes shows it; an eager step goes on, on copies."""
    data = {"input": torch.randn(60, 4), "label": torch.arange(60) % 3}
    model = Keeping("buffer", "data")
    run = training(model, data=data, batch=6, steps=2)
    model.switch[0] = True
    with pytest.raises(ForwardWritesError, match="buffer"):
        run.run(progress=False)
    assert not model.buffer.any()


def on_a_device(monkeypatch):
    monkeypatch.setattr("equipoise.training.step.host_waits", lambda device: True)


def test_on_a_device_a_draw_with_a_bad_record_is_asked_again(tmp_path, monkeypatch):
    """Once; from then on each micro-batch is looked at. Files and parameters are those of a processor."""
    found = {}
    for where in ("processor", "device"):
        model = network()
        options = {"data": with_overflow(), "loss": weighted_loss, "microbatch_size": 5, "steps": 12}
        run = training(model, folder=tmp_path / where, **options)
        looked = []
        for _ in run:
            looked.append(run._steps.looks_at_once)
        assert set(run.ledger.releases_left.values()) == {0}
        rows = lines(tmp_path / where / "private" / "diagnostics.jsonl")
        bad = [row["batch.gradient.records_not_finite"] for row in rows]
        found[where] = parameters(model), bad, looked
        on_a_device(monkeypatch)
    torch.testing.assert_close(found["device"][0], found["processor"][0], rtol=1e-6, atol=1e-8)
    bad = found["device"][1]
    assert bad == found["processor"][1]
    assert bad[0] == 0 < sum(bad)
    assert found["processor"][2] == [True] * 12
    assert found["device"][2] == [sum(bad[: step + 1]) > 0 for step in range(12)]


@pytest.mark.parametrize(("weight", "is_asked_again"), [(1e25, True), (1e-25, False), (0.0, False)])
def test_on_a_device_a_draw_whose_norms_lost_digits_is_asked_again(monkeypatch, weight, is_asked_again):
    """Squares of 1e25 are infinite. Those of 1e-25 vanish, but such a row is as good as zero."""
    data = records() | {"weight": torch.ones(RECORDS)}
    data["input"], data["weight"][30] = data["input"][:, None].repeat(1, 4, 1), weight
    found = []
    for _ in ("processor", "device"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Flatten(), nn.Linear(160, 3))
        # So few records that Gram matrices are taken without a measurement.
        options = {"sampling": eq.FullBatch(RECORDS, 2), "microbatch_size": 10}
        run = training(model, data=data, loss=weighted_loss, **options)
        list(run)
        found.append(parameters(model))
        on_a_device(monkeypatch)
    assert run._steps.looks_at_once == is_asked_again
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("first", ["changed", "not finite"])
def test_a_step_is_taken_again_for_both_reasons_in_any_order(monkeypatch, first):
    """A repeated draw that came out differently, and a record that is not finite."""
    asked = []

    class Changing(eq.DPSGD):
        def step(self, context, state):
            asked.append(run._steps.looks_at_once)
            if len(asked) == (1 if first == "changed" else 2):
                raise ChangedQueryError("the draw is void")
            return super().step(context, state)

    on_a_device(monkeypatch)
    options = {"data": with_overflow(), "loss": weighted_loss, "microbatch_size": 10}
    method, sampling = Changing(clip_norm=0.5, noise_multiplier=1.0), eq.FullBatch(RECORDS, 2)
    run = training(method=method, sampling=sampling, **options)
    list(run)
    assert asked == ([False, False, True, True] if first == "changed" else [False, True, True, True])
    assert run.ledger.releases_left == {"batch": 0}


def test_a_step_that_released_something_is_not_taken_again(monkeypatch):
    """Its first sums may round otherwise then, and that draw would be charged a second time."""
    looked = []

    class Noted(forwards.Forwards):
        def __init__(self, *arguments):
            looked.append((run.steps_done, arguments[-1] is None))
            super().__init__(*arguments)

    on_a_device(monkeypatch)
    monkeypatch.setattr("equipoise.training.context.Forwards", Noted)
    noise = {"noise_multiplier": 1.0, "radius_noise_multiplier": 5.0}
    method = eq.AdaptiveRMS(clip_norm=0.5, variant=Round(length=2), **noise)
    run = training(method=method, steps=4, microbatch_size=10)
    list(run)
    # Steps 0 and 2 release a radius first.
    assert looked == [(0, False), (0, True), (1, False), (2, False), (2, True), (3, False)]


def test_a_draw_that_is_asked_again_keeps_its_places(monkeypatch):
    """A record that fails for the first time before another is not finite."""
    monkeypatch.setenv("EQUIPOISE_EAGER", "1")
    fails, seen = [], []

    def failing(model, batch):
        if fails and bool((batch["number"] == 3).any()):
            raise ValueError("record 3")
        return weighted_loss(model, batch)

    class Numbered(eq.DPSGD):
        def step(self, context, state):
            draw = context.draw("batch")
            numbers = draw.rows(lambda rows, ids: ids)
            fails.append(1)

            def sums(rows, ids, part):
                seen.append((unwrap(ids).tolist(), unwrap(part).tolist()))
                return {"gradient": clip(rows, Abadi(), 0.5)}

            return context.ledger.release(draw, draw.query(sums, along=numbers))["gradient"], state

    on_a_device(monkeypatch)
    data, method = (
        with_overflow() | {"number": torch.arange(RECORDS)},
        Numbered(clip_norm=0.5, noise_multiplier=1.0),
    )
    run = training(
        method=method, data=data, loss=failing, sampling=eq.FullBatch(RECORDS, 1), microbatch_size=10
    )
    run.take_step()
    assert run._steps.looks_at_once
    assert sum(len(ids) for ids, _ in seen) == 2 * (RECORDS - 1)
    assert all(ids == part for ids, part in seen)


SAMPLING = eq.FixedEpochs(12, RECORDS, 5)


def wrong(model, batch):
    """Whole numbers: 1 where the class is wrong."""
    return (model(batch["input"]).argmax(1) != batch["label"]).float()


def test_a_method_that_takes_losses_alone_needs_no_gradient():
    run = training(loss=wrong, sampling=SAMPLING, method=eq.methods.DPZO(clip_norm=0.5, noise_multiplier=1.0))
    assert len(list(run)) == 5


def asleep():
    """All ReLUs are off at the start."""
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES).requires_grad_(False))
    nn.init.constant_(model[0].bias, -1000.0)
    return model


def hooked():
    """A hook divides by the standard deviation over the batch, which a single record does not have."""
    model = network()
    model[1].register_forward_hook(
        lambda module, args, out: out.register_hook(lambda g: g / (g.std(0) + 1e-3)) and None
    )
    return model


ZERO = {
    "rounding": (network, lambda model, batch: model(batch["input"]).round().sum(1)),
    "dead units": (asleep, loss),
    "NaN for a record by itself": (hooked, loss),
}


@pytest.mark.parametrize("name", ZERO)
def test_gradients_that_are_all_zero_or_not_finite_are_named(name):
    make, own_loss = ZERO[name]
    with pytest.warns(UserWarning, match="noise alone"):
        training(make(), loss=own_loss, sampling=SAMPLING)


def test_a_model_whose_head_begins_at_zero_is_not():
    model = network()
    nn.init.zeros_(model[2].weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        training(model, sampling=SAMPLING)


def test_a_delta_that_lets_a_record_leak_is_warned_of():
    with pytest.warns(UserWarning, match=r"delta=0\.1 is not below 1/population"):
        training(budget=eq.Budget(3.0, 0.1))


def with_public_negatives(model, batch):
    out, others = model(batch["input"]), model(torch.ones(5, FEATURES))
    near = (out * model(0.9 * batch["input"])).sum(1, keepdim=True)
    return -torch.cat([near, out @ others.T], 1).log_softmax(1)[:, 0]


def in_model(model, batch):
    return loss(model["own"], batch) + model["loss"](model["own"](batch["input"])).square().mean(1)


WAYS = {
    "eval": lambda: training(with_norm().train(False)),
    "public negatives": lambda: training(loss=with_public_negatives),
    "loss in the model": lambda: training(
        nn.ModuleDict({"own": network(), "loss": nn.Linear(3, 3)}), loss=in_model
    ),
    "owner's values": lambda: training(data=PERSONS, owner=PERSONS["person"], **USERS),
}


@pytest.mark.parametrize("start", WAYS.values(), ids=WAYS)
def test_the_way_works(start):
    run = start()
    before = [p.detach().clone() for p in run.parameters.values()]
    run.take_step()
    assert not any(torch.equal(a, b) for a, b in zip(before, run.parameters.values(), strict=True))


def begun(folder, **options):
    saved(training(steps=4, run=eq.Run(folder, reproducible=True, seed=3), **options))


def test_a_run_that_goes_on_has_the_settings_of_its_folder(tmp_path):
    begun(tmp_path / "run", data=eq.Data(records(), views=2))
    run = resumed(tmp_path / "run")
    settings = run.config()["settings"]
    assert (settings["seed"], settings["reproducible"], settings["views"]) == (3, True, 2)
    run.close()
    resumed(tmp_path / "run", data=eq.Data(records(), views=2), run=eq.Run(tmp_path / "run", seed=3)).close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"run": eq.Run(seed=4)}, "seed=4 differs from the seed=3"),
        ({"run": eq.Run("elsewhere")}, "folder="),
        ({"data": eq.Data(records(), views=3)}, "views=3"),
        ({"unit": eq.Users(range(RECORDS), records_per_user=1)}, "unit='user'"),
    ],
)
def test_a_setting_that_the_run_has_not_is_refused_by_name(tmp_path, options, words):
    begun(tmp_path / "run")
    with pytest.raises(ValueError, match=words):
        resumed(tmp_path / "run", **options)
