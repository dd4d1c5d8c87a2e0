"""Every trainable parameter is served, computed densely, or refused by name."""

import copy

import pytest
import torch
from oracle_cases import compare
from torch import nn
from zoo import Net

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


def floats(*shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(dtype)


X = floats(6, 5, dtype=torch.float32)


@pytest.fixture
def second_way(monkeypatch):
    """No model has a trace: rows are compared."""
    monkeypatch.setattr(Trials, "proof", lambda trials, batch: Proof(untraced="so said"))


def how(engine):
    return {c.name: c.how for c in engine.coverage()}


def test_a_model_that_needs_two_records_never_meets_one(second_way):
    def forward(self, x):
        if x.shape[0] < 2:
            raise RuntimeError("at least two records")
        return self.body(x)

    model = Net(forward, body=nn.Linear(5, 3))
    expected = per_sample_gradients(model.body, squared, X).row_norms()
    torch.testing.assert_close(GradientEngine(model, squared, X)(X).row_norms(), expected)


def test_batch_norm_is_refused_by_path_then_fixed(capsys):
    head = [nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(36, 3)]
    model, x = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), *head).double(), floats(5, 2, 5, 5)
    before = copy.deepcopy(model.state_dict())
    for attach in (GradientEngine, per_sample_gradients):
        with pytest.raises(CrossRecordError, match=r"'1' \(BatchNorm2d\).*replace_batch_norm") as caught:
            attach(model, squared, x)
        assert caught.value.module_path == "1"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    fixed = replace_batch_norm(model)
    assert capsys.readouterr().out == "in the copy:\n- 1: BatchNorm2d(4)\n+ 1: GroupNorm(2, 4)\n"
    assert isinstance(model[1], nn.BatchNorm2d)
    assert isinstance(fixed[1], nn.GroupNorm)
    assert fixed[2].inplace
    assert torch.equal(fixed[1].weight, model[1].weight)
    assert fixed[1].weight is not model[1].weight
    compare(model.eval(), squared, x, how="rule")  # constant statistics do not mix records


class Centred(nn.Module):
    def forward(self, x):
        return x - 0.5 * x.mean(0, keepdim=True)


@pytest.mark.parametrize("place", [0, 1])
def test_a_custom_layer_that_mixes_records_is_refused_by_path(place):
    layers = [nn.Linear(5, 5), nn.Linear(5, 3)]
    layers.insert(place, nn.Sequential(nn.Tanh(), Centred()))
    with pytest.raises(CrossRecordError, match=rf"'{place}\.1' \(Centred\)"):
        GradientEngine(nn.Sequential(*layers), squared, X)


def new_data(self, x):
    self.mean.data = x.mean(0)


def assigned(self, x):
    self.mean = nn.Parameter(x.mean(0), requires_grad=False)


#: A frozen parameter as a running mean, and a trainable one.
WRITES = {
    "in place": lambda self, x: self.mean.lerp_(x.mean(0), 0.5),
    "data": lambda self, x: self.mean.data.lerp_(x.mean(0), 0.5),
    "new data": new_data,
    "assigned": assigned,
    "trainable": lambda self, x: self.linear.weight.mul_(0.5),
}


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("check", [False, True])
def test_a_forward_that_writes_parameters_is_refused_and_undone(how, check):
    @torch.no_grad()
    def write(self, x):
        WRITES[how](self, x)

    def forward(self, x):
        write(self, x)
        return self.linear(x)

    model = Net(forward, linear=nn.Linear(3, 2), mean=nn.Parameter(torch.zeros(3), requires_grad=False))
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

    with pytest.raises((CoverageError, CrossRecordError)):
        GradientEngine(nn.Linear(5, 3), loss, X)


def test_a_rule_that_is_wrong_by_a_hundredth_is_seen(monkeypatch):
    right = OuterFactor.weighted_sum
    monkeypatch.setattr(OuterFactor, "weighted_sum", lambda factor, weights: 1.01 * right(factor, weights))
    assert how(GradientEngine(nn.Linear(5, 3), squared, X))["weight"] == "dense"


def test_a_hook_that_comes_later_meets_single_records():
    """It divides by the norm of the whole batch's gradient, or by that of one record's."""

    def forward(self, x):
        out = self.body(x)
        if self.hooked:
            out.register_hook(lambda g: g / g.norm())
        return out

    model = Net(forward, body=nn.Linear(5, 3), hooked=False)
    engine = GradientEngine(model, squared, X)
    model.hooked = True
    torch.testing.assert_close(engine(X).row_norms(), dense_gradients(model, squared, X).row_norms())
    assert set(how(engine).values()) == {"dense"}


def test_a_hook_that_changes_the_whole_gradient_of_a_parameter_is_told_of():
    """The optimizer would meet another gradient than the one that is released."""
    model = nn.Linear(5, 3)
    engine = GradientEngine(model, squared, X, check=False)
    model.weight.register_hook(lambda g: 2 * g)
    with pytest.raises(CoverageError, match="register_step_pre_hook"):
        engine.check(X)
    with pytest.warns(UserWarning, match="register_step_pre_hook"):
        GradientEngine(model, squared, X)


@pytest.fixture
def one_process():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_sharded_and_wrapped_models_are_served_or_refused_by_name(one_process):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    with pytest.raises(TypeError, match=r"DistributedDataParallel.*Give the module inside"):
        GradientEngine(nn.parallel.DistributedDataParallel(nn.Linear(5, 3)), squared, X)
    styles, model = {"0": ColwiseParallel(), "1": RowwiseParallel()}, [nn.Linear(5, 4), nn.Linear(4, 3)]
    sharded, parallel, both = (nn.Sequential(*copy.deepcopy(model)) for _ in range(3))
    expected = GradientEngine(sharded, squared, X)(X).row_norms()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    assert torch.equal(GradientEngine(sharded, squared, X)(X).row_norms(), expected)
    parallelize_module(parallel, init_device_mesh("cpu", (1,)), styles)
    torch.testing.assert_close(GradientEngine(parallel, squared, X)(X).row_norms(), expected)
    axes = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
    parallelize_module(both, axes["tensor"], styles)
    fully_shard(both, mesh=axes["data"])
    with pytest.raises(TypeError, match=r"\['0\.weight', .*parallelize_module and fully_shard both.*alone"):
        GradientEngine(both, squared, X)


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
    body = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))

    def loss(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return squared(model, x).float()

    engine = GradientEngine(body, loss, X)
    assert set(how(engine).values()) == {"rule"}
    expected = per_sample_gradients(body, squared, X).row_norms()
    torch.testing.assert_close(engine(X).row_norms(), expected, rtol=0.05, atol=0)
