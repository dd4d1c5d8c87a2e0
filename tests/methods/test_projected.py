"""The projection family: its limits, its worked numbers, its bounds, its subspaces, its costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from flat_arguments import arranged
from torch import nn
from torch.nn import functional as F

import equipoise as eq
from equipoise.gradients import GradientEngine
from equipoise.methods import (
    IterationSubspace,
    MomentSubspace,
    PublicRecords,
    PublicSubspace,
    RandomSubspace,
    ReleasedSubspace,
    published,
)
from equipoise.methods.base import Setting
from equipoise.methods.configuration import field_types
from equipoise.methods.projected import groups_of
from equipoise.methods.subspaces import principal_subspace
from equipoise.privacy import Poisson

pytestmark = pytest.mark.filterwarnings("ignore:the subspace captures")
HUGE = 1e9


class Vector(nn.Module):
    """A model that is its parameter vector."""

    def __init__(self, size: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w


def linear(model, batch):
    """A loss whose gradient is the record itself."""
    return model(batch)


def quadratic(model, batch):
    return 0.5 * (model.w - batch).square().sum(1)


def train(method, data, steps=3, loss=linear, learning_rate=1.0, sampling=None, places=None, **options):
    """A reproducible training of a vector from zero: the run, finished."""
    model = Vector(data.shape[1], data.dtype)
    run = eq.PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=learning_rate),
        **arranged(
            loss=loss,
            data=data,
            method=method,
            sampling=sampling or eq.FullBatch(len(data), steps),
            **{"reproducible": True, **options},
        ),
    )
    for _ in run:
        if places is not None:
            places.append(model.w.detach().clone())
    return run


def moved(method, data, **options):
    """Where the vector went."""
    return train(method, data, **options).model.w.detach()


def rows(count=12, size=6, seed=0):
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def basis(size, k, seed=3):
    """Public records that are orthonormal: under a linear loss their span is the subspace."""
    return torch.linalg.qr(rows(size, k, seed))[0].t().contiguous()


def over(kind, batch, **settings):
    """The method over the span of public rows; the settings are the source's and the method's."""
    source = {name: settings.pop(name) for name in field_types(PublicSubspace) if name in settings}
    return kind(source=PublicSubspace(PublicRecords(batch), **source), **settings)


FORMS = pytest.mark.parametrize("form", ["kernel", "held"])


@FORMS
def test_the_whole_space_is_dp_sgd(form):
    """V = I: the same noise, the same steps; without noise and with a huge clip norm, SGD."""
    data, everything = rows(), torch.eye(6, dtype=torch.float64)
    # Columns come out as +-e_j in some order, so that noise in coordinates is another draw.
    small = {"clip_norm": 0.5, "noise_multiplier": 1e-12}
    expected = moved(eq.DPSGD(**small), data)
    found = moved(over(eq.PCDPSGD, everything, basis=form, **small), data)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    free = moved(over(eq.PCDPSGD, everything, basis=form, clip_norm=HUGE, noise_multiplier=1e-24), data)
    torch.testing.assert_close(free, -3 * data.mean(0), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("clip_norm", "dp", "pdp", "pcdp"),
    [
        (1.0, (0.2308, 0.3077, 0.9231), (0.2308, 0.3077, 0), (0.6, 0.8, 0)),
        (5.0, (1.1538, 1.5385, 4.6154), (1.1538, 1.5385, 0), (3, 4, 0)),
        (20.0, (3, 4, 12), (3, 4, 0), (3, 4, 0)),
    ],
)
def test_worked_numbers(clip_norm, dp, pdp, pcdp):
    data, plane = torch.tensor([[3.0, 4.0, 12.0]]).double(), torch.eye(2, 3).double()
    settings = {"clip_norm": clip_norm, "noise_multiplier": 1e-12}
    for method, expected in (
        (eq.DPSGD(**settings), dp),
        (over(eq.methods.PDPSGD, plane, **settings), pdp),
        (over(eq.PCDPSGD, plane, **settings), pcdp),
    ):
        found = -moved(method, data, steps=1)
        torch.testing.assert_close(found, torch.tensor(expected).double(), rtol=0, atol=6e-5)


@pytest.mark.parametrize(
    "source",
    [
        RandomSubspace(dimension=2),
        ReleasedSubspace(dimension=2, history=2, explore_every=3),
        MomentSubspace(dimension=2, noise_multiplier=1e-3),
        IterationSubspace(dimension=2, noise_multiplier=1e-3),
    ],
    ids=lambda source: source.kind,
)
def test_gep_takes_any_subspace_and_its_columns_are_orthonormal(source):
    """Its two parts are the whole gradient, whatever the subspace: with hardly any noise, SGD."""
    data = rows(40, 6, seed=4)
    noise = {"noise_multiplier": 1e-20, "residual_noise_multiplier": 1e-20}
    run = train(eq.methods.GEP(source=source, clip_norm=HUGE, **noise), data, steps=5)
    torch.testing.assert_close(run.model.w.detach(), -5 * data.mean(0), rtol=1e-7, atol=1e-7)
    gram = run.method._last_built["subspace"].subspace.gram()
    torch.testing.assert_close(gram, torch.eye(len(gram)).double(), rtol=0, atol=1e-12)
    assert run.statement().guarantee == "proven"


def test_sparsification_drops_before_clipping_and_on_the_noise():
    data, noisy = (
        rows(5, 1000),
        eq.methods.RandomSparsification(clip_norm=1.0, noise_multiplier=1.0, drop_rate=0.3),
    )
    dropped = moved(noisy, data, steps=1) == 0
    assert 0.25 < dropped.double().mean() < 0.35
    quiet = -5 * moved(replace(noisy, noise_multiplier=1e-12), data, steps=1)
    kept = data * ~dropped
    expected = (kept / kept.norm(dim=1, keepdim=True).clamp(min=1)).sum(0)
    torch.testing.assert_close(quiet, expected, rtol=1e-9, atol=1e-9)


@FORMS
def test_updates_lie_in_the_subspace_with_the_noise_of_k_dimensions(form):
    """Only noise: covariance V V^T (C z / B)^2, so the mean squared norm is K (C z / B)^2."""
    public = basis(20, 16)
    method = over(eq.PCDPSGD, public, refresh_every=10**6, basis=form, clip_norm=0.5, noise_multiplier=3.0)
    places = [torch.zeros(20).double()]
    train(method, torch.zeros(5, 20).double(), steps=100, places=places)
    steps = torch.stack(places).diff(dim=0)
    torch.testing.assert_close(steps @ public.t() @ public, steps, rtol=1e-9, atol=1e-9)
    mean = float(steps.square().sum(1).mean()) / (16 * (0.5 * 3.0 / 5) ** 2)
    assert 0.85 < mean < 1.15  # 1,600 squared normals: four standard deviations are 0.14


def network(dtype=torch.float64):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        parts = nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 3)
        return nn.Sequential(*parts).to(dtype)


def images(count, seed, dtype=torch.float64):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 1, 6, 6, generator=rng, dtype=torch.float64).to(dtype)
    return {"x": x, "y": torch.randint(3, (count,), generator=rng)}


def entropy(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


@pytest.mark.parametrize(
    ("blocks", "normalise"), [("per_tensor", True), ("per_layer", False), ("whole", True)]
)
def test_kernel_held_and_jvp_agree(blocks, normalise):
    """Coordinates by the cross-Gram, by held columns, and by forward derivatives along them."""
    model, public, private = network(), images(15, 1), images(7, 2)
    engine = GradientEngine(model, entropy, private)
    moved_on = {name: p.detach() + 0.1 for name, p in model.named_parameters()}
    rows_public, G = engine(public, params=moved_on), engine(private)
    groups = groups_of(G.names, blocks)
    found = {
        form: principal_subspace(rows_public, groups, 8, normalise=normalise, basis=form).subspace
        for form in ("kernel", "held", "auto")
    }
    V = found["kernel"]
    y = V.coordinates(G)
    scale = float(y.abs().max())
    for other in (found["held"], found["auto"]):
        torch.testing.assert_close(other.coordinates(G), y, rtol=1e-10, atol=1e-10 * scale)
    torch.testing.assert_close(V.gram(), torch.eye(V.dimension).double(), rtol=0, atol=1e-7)
    params = {name: p.detach() for name, p in model.named_parameters()}

    def losses(point):
        outputs = torch.func.functional_call(model, point, (private["x"],))
        return F.cross_entropy(outputs, private["y"], reduction="none")

    columns = [V.lift(unit) for unit in torch.eye(V.dimension).double()]
    for j in (0, V.dimension // 2, V.dimension - 1):
        _, derivative = torch.func.jvp(losses, (params,), (columns[j],))
        torch.testing.assert_close(derivative, y[:, j], rtol=1e-10, atol=1e-10 * scale)
    # and the way back
    z = torch.randn(V.dimension, generator=torch.Generator().manual_seed(4)).double()
    for other in found.values():
        for name, value in other.lift(z).items():
            expected = sum(z[j] * column[name] for j, column in enumerate(columns))
            torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-10)


def projector(V, size):
    columns = torch.stack([V.lift(e)["w"] for e in torch.eye(V.dimension).double()])
    assert columns.shape[1] == size
    return columns.t() @ columns


def plan(method, sampling, budget=None):
    return method.plan(Setting(sampling=sampling, budget=budget)).releases


@pytest.mark.parametrize(
    "source",
    [
        MomentSubspace(dimension=2, noise_multiplier=1e-6, refresh_every=2),
        IterationSubspace(dimension=2, noise_multiplier=1e-6, refresh_every=2, iterations=4),
    ],
    ids=lambda source: source.kind,
)
def test_a_private_subspace_is_found_and_paid_for(source):
    """Rows along two directions, hardly any noise: they are found, and the journal holds each draw."""
    core = basis(30, 2)
    data = rows(60, 2) @ core * 3
    method = eq.PCDPSGD(source=source, noise_multiplier=1e-6)
    run = train(method, data, steps=4, sampling=Poisson(30, 60, 4))
    found = projector(run.method._last_built["subspace"].subspace, 30)
    torch.testing.assert_close(found, core.t() @ core, rtol=0, atol=1e-4)
    refreshes = 2 * (1 if source.kind == "moment" else 4)
    assert run.plan.count(run.plan["moment"]) == refreshes
    assert run.statement().guarantee == "proven"
    assert run.ledger.releases_left == {"batch": 0, "subspace": 0}


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_private_subspace_and_a_residual_have_their_share_of_the_budget(share):
    """In the Gaussian limit T draws at rate q and multiplier z cost as T (q / z)^2."""
    sampling, budget = Poisson(64, 1200, 300), eq.Budget(1.0, 1e-5)

    def cost(releases, name):
        release, own = releases[name], releases[name].sampling or sampling
        return releases.count(release) * (own.sampling_rate / release.noise_multiplier) ** 2

    source = MomentSubspace(dimension=2, refresh_every=3, share=share)
    found = plan(eq.PCDPSGD(source=source), sampling, budget)
    assert cost(found, "moment") == pytest.approx(share / (1 - share) * cost(found, "gradient"))
    assert 0.99 <= found.epsilon(1e-5).value <= 1.0
    both = plan(over(eq.methods.GEP, basis(8, 2), residual_share=share), sampling, budget)
    assert cost(both, "residual") == pytest.approx(share / (1 - share) * cost(both, "gradient"))


def test_a_released_subspace_follows_full_steps_and_costs_nothing():
    core = basis(30, 2)
    data = core.repeat(20, 1)
    source = ReleasedSubspace(dimension=2, history=4, explore_every=3)
    method = eq.PCDPSGD(source=source, noise_multiplier=1e-09, clip_norm=9.0)
    run = train(method, data, steps=12, loss=quadratic, sampling=Poisson(20, 40, 12), learning_rate=0.5)
    found = projector(run.method._last_built["subspace"].subspace, 30)
    torch.testing.assert_close(found, core.t() @ core, rtol=0, atol=1e-4)
    expected = plan(eq.DPSGD(clip_norm=9.0, noise_multiplier=1e-9), Poisson(20, 40, 12))
    assert run.plan.event() == expected.event()
    assert run.statement().guarantee == "proven"


ITERATED = IterationSubspace(refresh_every=40, noise_multiplier=6.0)
OF_MOMENT = MomentSubspace(refresh_every=4700, noise_multiplier=10.0, batch_size=60_000)


@pytest.mark.parametrize(
    ("method", "sampling", "expected"),
    [
        (over(eq.methods.GEP, rows(4), noise_multiplier=6.0), Poisson(250, 10_000, 3200), 1.301),
        (eq.PCDPSGD(source=ITERATED, noise_multiplier=6.0), Poisson(250, 10_000, 3200), 0.915),
        (eq.PCDPSGD(source=OF_MOMENT, noise_multiplier=1.0), Poisson(256, 60_000, 4700), 1.621),
    ],
)
def test_worked_epsilons(method, sampling, expected):
    assert plan(method, sampling).epsilon(1e-5).value == pytest.approx(expected, rel=0.005)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: eq.PCDPSGD.from_config({"name": "pcdp-sgd"}), "takes public records"),
        (lambda: published.PCDPSGD(source=RandomSubspace()), "give a PublicSubspace"),
        (lambda: over(published.PDPSGD, rows(4), energy=0.9), "fixed number of directions of public"),
        (lambda: over(eq.PCDPSGD, {"x": rows(3), "y": rows(4)}), "same number"),
        (lambda: plan(over(eq.PCDPSGD, rows(4)), Poisson(2, 4, 2)), "budget is missing"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_public_records_are_given_again_and_must_be_the_same():
    ours, others = (PublicRecords(images(9, seed, torch.float32)) for seed in (5, 6))
    config = eq.PCDPSGD(source=PublicSubspace(ours), clip_norm=0.5).config()
    assert set(config["source"]["records"]) == {"records", "digest"}
    assert eq.PCDPSGD.from_config(config, ours).config() == config
    for given, message in ((), "public records"), ((others,), "differs from the records"):
        with pytest.raises(ValueError, match=message):
            eq.PCDPSGD.from_config(config, *given)


def test_public_gradients_that_span_nothing_or_little_are_told():
    def step(public, data, **options):
        train(over(eq.PCDPSGD, public, noise_multiplier=1.0, **options), data, steps=1)

    with pytest.raises(ValueError, match="all zero"):
        step(torch.zeros(3, 6).double(), rows())
    with pytest.warns(UserWarning, match="dimension=9"):
        step(rows(4, seed=1), rows(), dimension=9)
    with pytest.warns(UserWarning, match="DP-SGD is the better method"):
        step(rows(100, 400), rows(20, 400, 2), dimension=10)
    # Records that are a basis capture nothing of each other, and all of private gradients in their span.
    with pytest.warns(UserWarning, match="which the subspace in use holds too"):
        step(basis(40, 10), rows(50, 10, 4) @ basis(40, 10))
