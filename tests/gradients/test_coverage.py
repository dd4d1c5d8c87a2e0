"""Every trainable parameter is served, computed densely, or refused by name."""

from __future__ import annotations

import copy

import pytest
import torch
from oracle_cases import compare
from torch import nn

from equipoise.gradients import (
    CoverageError,
    CrossRecordError,
    ForwardWritesError,
    GradientEngine,
    dense_gradients,
    per_sample_gradients,
    replace_batch_norm,
)
from equipoise.gradients.factors.outer import OuterFactor
from equipoise.gradients.provenance import Proof
from equipoise.gradients.trials import Trials


def squared(model, batch):
    return torch.sin(model(batch).flatten(1) + 0.3).sum(1)


def floats(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


@pytest.fixture
def second_way(monkeypatch):
    """No model has a trace: rows are compared."""
    monkeypatch.setattr(Trials, "proof", lambda trials, batch: Proof(untraced="so said"))


def how(engine):
    return {c.name: c.how for c in engine.coverage()}


def test_a_model_that_needs_two_records_never_meets_one(second_way):
    class NeedsTwo(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(5, 3)

        def forward(self, x):
            if x.shape[0] < 2:
                raise RuntimeError("at least two records")
            return self.body(x)

    model, x = NeedsTwo().double(), floats(6, 5)
    engine = GradientEngine(model, squared, x)
    expected = per_sample_gradients(model.body, squared, x).row_norms()
    torch.testing.assert_close(engine(x).row_norms(), expected)


def batch_norm_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(36, 3)
    ).double()


def test_batch_norm_is_refused_by_path_then_fixed(capsys):
    model, x = batch_norm_model(), floats(5, 2, 5, 5)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        CrossRecordError, match=r"module '1' \(BatchNorm2d\).*equipoise\.replace_batch_norm"
    ) as caught:
        GradientEngine(model, squared, x)
    assert caught.value.module_path == "1"
    with pytest.raises(CrossRecordError):
        per_sample_gradients(model, squared, x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    fixed = replace_batch_norm(model)
    assert capsys.readouterr().out == "in the copy:\n- 1: BatchNorm2d(4)\n+ 1: GroupNorm(2, 4)\n"
    assert isinstance(model[1], nn.BatchNorm2d)
    assert isinstance(fixed[1], nn.GroupNorm)
    assert isinstance(fixed[2], nn.ReLU)
    assert fixed[2].inplace
    assert torch.equal(fixed[1].weight, model[1].weight)
    assert fixed[1].weight is not model[1].weight
    compare(fixed, squared, x, how="rule")
    compare(model.eval(), squared, x, how="rule")  # constant statistics do not mix records


class Centred(nn.Module):
    """A layer that mixes records: it subtracts their mean."""

    def forward(self, x):
        return x - 0.5 * x.mean(0, keepdim=True)


@pytest.mark.parametrize("place", [0, 1])
def test_a_custom_layer_that_mixes_records_is_refused_by_path(place):
    layers = [nn.Linear(5, 5), nn.Linear(5, 3)]
    layers.insert(place, nn.Sequential(nn.Tanh(), Centred()))
    with pytest.raises(CrossRecordError, match=rf"'{place}\.1' \(Centred\)"):
        GradientEngine(nn.Sequential(*layers).double(), squared, floats(6, 5))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("attach", [GradientEngine, per_sample_gradients])
def test_an_embedding_that_renormalises_its_table_is_refused(attach, frozen):
    model = nn.Sequential(nn.Embedding(7, 3, max_norm=0.1), nn.Linear(3, 2))
    model[0].weight.requires_grad_(not frozen)
    before = model[0].weight.clone()
    with pytest.raises(ForwardWritesError, match=r"'0.weight'.*max_norm"):
        attach(model, squared, torch.tensor([[1, 2], [3, 4]]))
    assert torch.equal(model[0].weight, before)


class FollowsRecords(nn.Module):
    """A frozen parameter as a running mean, and a table that a function renormalises."""

    def __init__(self, how):
        super().__init__()
        self.how, self.on = how, True
        self.linear = nn.Linear(3, 2)
        self.mean = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x):
        if self.on:
            with torch.no_grad():
                if self.how == "in place":
                    self.mean.lerp_(x.mean(0), 0.5)
                elif self.how == "data":
                    self.mean.data.lerp_(x.mean(0), 0.5)
                elif self.how == "new data":
                    self.mean.data = x.mean(0)
                elif self.how == "trainable":
                    self.linear.weight.mul_(0.5)
                else:
                    self.mean = nn.Parameter(x.mean(0), requires_grad=False)
        return self.linear(x)


WRITES = ["in place", "data", "new data", "assigned", "trainable"]


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("check", [False, True])
def test_a_forward_that_writes_parameters_is_refused_and_undone(how, check):
    model = FollowsRecords(how)
    before, held = {name: p.clone() for name, p in model.named_parameters()}, model.mean
    with pytest.raises(ForwardWritesError, match="mean" if how != "trainable" else r"linear\.weight"):
        GradientEngine(model, squared, torch.ones(4, 3), check=check)
    assert model.mean is held
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


FACTORS = {
    "place": lambda x: 1 + 0.02 * torch.arange(len(x)),
    "parity of the place": lambda x: 1 + 0.02 * (torch.arange(len(x)) % 2),
    "number of records": lambda x: torch.full((len(x),), 1 + 0.02 * (len(x) - 1)),
    "largest record": lambda x: (1 + 0.02 * x.norm(dim=1).max()).expand(len(x)),
    "later records": lambda x: 1 + 0.02 * x.norm(dim=1).flip(0).cumsum(0).flip(0),
}


@pytest.mark.parametrize("followed", FACTORS)
def test_a_row_that_follows_its_company_by_a_hundredth_is_refused(second_way, followed):
    def loss(model, x):
        losses = squared(model, x)
        return losses.detach() + FACTORS[followed](x) * (losses - losses.detach())

    torch.manual_seed(0)
    with pytest.raises((CoverageError, CrossRecordError)):
        GradientEngine(nn.Linear(5, 3), loss, floats(6, 5).float())


def test_a_rule_that_is_wrong_by_a_hundredth_is_seen(monkeypatch):
    torch.manual_seed(0)
    right = OuterFactor.weighted_sum
    monkeypatch.setattr(OuterFactor, "weighted_sum", lambda factor, weights: 1.01 * right(factor, weights))
    engine = GradientEngine(nn.Linear(5, 3), squared, floats(6, 5).float())
    assert how(engine)["weight"] == "dense"


class SometimesHooked(nn.Module):
    """Registers a hook on a gradient when it is told to."""

    def __init__(self):
        super().__init__()
        self.body, self.hooked = nn.Linear(5, 3), False

    def forward(self, x):
        out = self.body(x)
        if self.hooked:
            out.register_hook(lambda g: g / g.norm())
        return out


def test_a_hook_that_comes_later_meets_single_records():
    """It divides by the norm of the whole batch's gradient, or by that of one record's."""
    model, x = SometimesHooked().double(), floats(6, 5)
    engine = GradientEngine(model, squared, x)
    model.hooked = True
    torch.testing.assert_close(engine(x).row_norms(), dense_gradients(model, squared, x).row_norms())
    assert set(how(engine).values()) == {"dense"}


@pytest.mark.parametrize("is_late", [False, True])
def test_a_hook_that_changes_the_whole_gradient_of_a_parameter_is_told_of(is_late):
    """The optimizer would meet another gradient than the one that is released."""
    model, x = nn.Linear(5, 3), floats(6, 5).float()
    engine = GradientEngine(model, squared, x, check=False) if is_late else None
    model.weight.register_hook(lambda g: 2 * g)
    told = pytest.raises(CoverageError, match="register_step_pre_hook")
    with told if is_late else pytest.warns(UserWarning, match="register_step_pre_hook"):
        GradientEngine(model, squared, x) if engine is None else engine.check(x)


@pytest.fixture
def one_process():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_sharded_and_wrapped_models_are_refused_by_name(one_process):
    """Rows of sharded parameters had norms of zero, and nobody noticed."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(5, 3))
    with pytest.raises(TypeError, match=r"DistributedDataParallel.*Give the module inside"):
        GradientEngine(wrapped, squared, floats(6, 5).float())
    mesh = init_device_mesh("cpu", (1,))
    batch = floats(6, 5).float()
    sharded = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    expected = GradientEngine(sharded, squared, batch)(batch).row_norms()
    fully_shard(sharded, mesh=mesh)
    assert torch.equal(GradientEngine(sharded, squared, batch)(batch).row_norms(), expected)
    parallel = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    whole = GradientEngine(parallel, squared, batch)(batch).row_norms()
    parallelize_module(parallel, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    assert torch.allclose(GradientEngine(parallel, squared, batch)(batch).row_norms(), whole)
    both = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    axes = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
    parallelize_module(both, axes["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(both, mesh=axes["data"])
    with pytest.raises(TypeError, match=r"\['0\.weight', .*parallelize_module and fully_shard both.*alone"):
        GradientEngine(both, squared, batch)


@pytest.mark.parametrize(
    ("equation", "shape"),
    [("btd,de->bte", (20, 30)), ("btd,dhk->bthk", (20, 2, 15)), ("hkd,btd->bhtk", (2, 15, 20))],
)
def test_a_projection_written_as_an_einsum_makes_no_rows(equation, shape):
    model = nn.Linear(20, 20).double()
    model.projection = nn.Parameter(floats(*shape))

    def loss(model, x):
        pair = (model.projection, model(x)) if equation.startswith("h") else (model(x), model.projection)
        return torch.sin(torch.einsum(equation, *pair).flatten(1)).sum(1)

    compare(model, loss, floats(6, 2, 20))
    (factor,) = per_sample_gradients(model, loss, floats(6, 2, 20)).factors["projection"]
    assert isinstance(factor, OuterFactor)


def test_autocast_is_served_by_rules():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))

    def loss(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return squared(model, x).float()

    x = floats(6, 5).float()
    engine = GradientEngine(body, loss, x)
    assert set(how(engine).values()) == {"rule"}
    torch.testing.assert_close(
        engine(x).row_norms(), per_sample_gradients(body, squared, x).row_norms(), rtol=0.05, atol=0
    )
