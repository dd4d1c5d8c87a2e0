"""The projection family: its limits, its worked numbers, its bounds, its subspaces, its resumes."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from flat_arguments import arranged
from torch import nn
from torch.nn import functional as F

import equipoise as eq
from equipoise.gradients import DenseGradients, GradientEngine
from equipoise.methods import (
    Abadi,
    ClipRule,
    IterationSubspace,
    MomentSubspace,
    PublicRecords,
    PublicSubspace,
    RandomSubspace,
    ReleasedSubspace,
    find,
    published,
)
from equipoise.methods.base import Setting
from equipoise.methods.configuration import field_types
from equipoise.methods.projected import groups_of
from equipoise.methods.subspaces import Subspace, held, principal_subspace
from equipoise.privacy import (
    Bounded,
    Draw,
    Poisson,
    PrivateRows,
    clip_coordinates,
    moment_action,
    second_moment,
)
from equipoise.privacy.private import unwrap
from equipoise.published.pcdp_sgd import check_orthonormal

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


def train(method, data, steps=3, loss=linear, learning_rate=1.0, sampling=None, **options):
    """A reproducible training of a vector from zero: the run, finished."""
    model = Vector(data.shape[1], data.dtype)
    run = eq.PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=learning_rate),
        **arranged(
            loss=loss,
            data=data,
            sampling=sampling or eq.FullBatch(population=len(data), steps=steps),
            method=method,
            **{"reproducible": True, **options},
        ),
    )
    for _ in run:
        pass
    return run


def moved(method, data, **options):
    """Where the vector went."""
    return train(method, data, **options).model.w.detach()


def increments(method, data, steps=400):
    """What each step adds, [steps, P]."""
    model = Vector(data.shape[1], data.dtype)
    run = eq.PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        loss=linear,
        data=data,
        sampling=eq.FullBatch(population=len(data), steps=steps),
        method=method,
        run=eq.Run(reproducible=True),
    )
    places = [torch.zeros(data.shape[1], dtype=data.dtype)]
    for _ in run:
        places.append(model.w.detach().clone())
    return torch.stack(places).diff(dim=0)


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


# ---- limits


@FORMS
def test_the_whole_space_is_dp_sgd(form):
    """V = I: the same noise, the same steps; without noise and with a huge clip norm, SGD."""
    data, everything = rows(), torch.eye(6, dtype=torch.float64)
    # Columns come out as +-e_j in some order, so that noise in coordinates is another draw.
    small = {"clip_norm": 0.5, "noise_multiplier": 1e-12}
    expected = moved(eq.DPSGD(**small), data)
    found = moved(over(eq.PCDPSGD, everything, basis=form, **small), data)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    plain = -3 * data.mean(0)
    free = moved(
        eq.PCDPSGD(
            source=PublicSubspace(PublicRecords(everything), basis=form),
            clip_norm=HUGE,
            noise_multiplier=1e-24,
        ),
        data,
    )
    torch.testing.assert_close(free, plain, rtol=1e-9, atol=1e-9)


def test_the_published_form_in_the_whole_space_is_dp_sgd_with_its_noise():
    data, everything = rows(), torch.eye(6, dtype=torch.float64)
    settings = {"clip_norm": 0.5, "noise_multiplier": 2.0}
    found = moved(over(published.PCDPSGD, everything, **settings), data)
    torch.testing.assert_close(found, moved(eq.DPSGD(**settings), data), rtol=1e-9, atol=1e-9)


@FORMS
@pytest.mark.parametrize("noise", [1e-24, 1e-9])
def test_without_clipping_the_order_does_not_matter(form, noise):
    data, public = rows(), rows(3, seed=1)
    settings = {"clip_norm": HUGE, "noise_multiplier": noise, "basis": form}
    before, after = (moved(over(kind, public, **settings), data) for kind in (eq.PCDPSGD, eq.methods.PDPSGD))
    torch.testing.assert_close(before, after, rtol=1e-12, atol=1e-12)


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
        (over(published.PDPSGD, plane, **settings), pdp),
        (over(published.PCDPSGD, plane, **settings), pcdp),
    ):
        found = -moved(method, data, steps=1)
        torch.testing.assert_close(found, torch.tensor(expected).double(), rtol=0, atol=6e-5)


def test_projecting_first_gains_one_over_the_cosine():
    """All rows clipped at equal cosine: PDP at (C, z) is PCDP at (C cos, z / cos), with the same noise."""
    k, cosine, noise = 3, 0.6, 1.5
    inside = F.normalize(rows(12, k, 5)) * torch.linspace(3, 9, 12).double().unsqueeze(1)
    outside = F.normalize(rows(12, 6 - k, 6)) * inside.norm(dim=1, keepdim=True) * 4 / 3
    data, public = torch.cat([inside, outside], 1), torch.eye(k, 6).double()
    late = moved(
        eq.methods.PDPSGD(
            source=PublicSubspace(PublicRecords(public)),
            clip_norm=0.5,
            noise_multiplier=noise,
        ),
        data,
    )
    early = moved(
        eq.PCDPSGD(
            source=PublicSubspace(PublicRecords(public)),
            clip_norm=0.5 * cosine,
            noise_multiplier=noise / cosine,
        ),
        data,
    )
    torch.testing.assert_close(early, late, rtol=1e-12, atol=1e-14)


def test_gep_without_a_residual_is_pcdp():
    data, public = rows(), rows(3, seed=1)
    settings = {"clip_norm": 0.7, "noise_multiplier": 2.0, "blocks": "per_tensor", "refresh_every": 1}
    found = moved(over(eq.methods.GEP, public, residual_clip_norm=1e-12, **settings), data)
    torch.testing.assert_close(found, moved(over(eq.PCDPSGD, public, **settings), data), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(("kind", "refreshes"), [("GEP", 6), ("BiasedGEP", 6), ("PCDPSGD", 2)])
def test_how_often_a_method_asks_for_a_subspace_by_default(kind, refreshes):
    """GEP and biased GEP at every step, as their paper does; the others once per epoch."""
    data, method = rows(), over(getattr(eq.methods, kind), rows(3, seed=1), noise_multiplier=2.0)
    run = train(method, data, sampling=Poisson(4, 12, 6))
    assert run.method_state["refreshes"] == refreshes


def test_gep_keeps_its_bounds_on_nearly_dependent_public_rows():
    """Rows in weak directions of the public ones, where columns that are not formed are not orthonormal."""
    rng = torch.Generator().manual_seed(9)
    Q = torch.linalg.qr(torch.randn(400, 400, generator=rng, dtype=torch.float64))[0]
    U = torch.linalg.qr(torch.randn(60, 60, generator=rng, dtype=torch.float64))[0]
    strength = torch.full((60,), 10.0**-2.3).double()
    strength[:5] = 1
    public = ((U * strength) @ Q[:, :60].t()).float()
    inside = torch.randn(400, 60, generator=rng, dtype=torch.float64) * (strength < 0.1)
    outside = torch.randn(400, 340, generator=rng, dtype=torch.float64)
    share = 10 ** (torch.rand(400, 1, generator=rng, dtype=torch.float64) * 4 - 5)
    G = F.normalize(inside) @ Q[:, :60].t() + share * F.normalize(outside) @ Q[:, 60:].t()
    method = eq.methods.GEP(
        source=PublicSubspace(PublicRecords(public), dimension=60),
        noise_multiplier=5.0,
        residual_clip_norm=1.0,
    )
    subspace = train(
        method, torch.randn(40, 400, generator=rng), steps=1
    ).method._last_built.subspace.subspace
    bounds = []
    for row in (1000 * G).float():
        one = PrivateRows(DenseGradients({"w": row[None]}), Draw("batch", 0))
        sums = method._sums(one, subspace)
        bounds.append(
            [float(unwrap(b.value[name]).double().norm()) for b in sums.values() for name in b.value]
        )
    assert torch.tensor(bounds).max() <= 1 + 1e-5


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
    method = eq.methods.GEP(
        source=source,
        clip_norm=HUGE,
        noise_multiplier=1e-20,
        residual_noise_multiplier=1e-20,
    )
    run = train(method, data, steps=5, sampling=eq.FullBatch(population=40, steps=5))
    torch.testing.assert_close(run.model.w.detach(), -5 * data.mean(0), rtol=1e-7, atol=1e-7)
    gram = run.method._last_built.subspace.subspace.gram()
    torch.testing.assert_close(gram, torch.eye(len(gram)).double(), rtol=0, atol=1e-12)
    assert run.statement().guarantee == "proven"


def test_both_parts_of_gep_pay_for_a_private_subspace():
    """A share of one half for V leaves both parts sqrt(2) times the noise that they have without it."""
    sampling, budget = Poisson(64, 1200, 300), eq.Budget(1.0, 1e-5)
    free = plan(eq.methods.GEP(source=RandomSubspace()), sampling, budget)
    paid = plan(eq.methods.GEP(source=IterationSubspace(share=0.5)), sampling, budget)
    assert 0.99 <= paid.epsilon(1e-5).value <= 1.0
    for part in ("gradient", "residual"):
        assert paid[part].noise_multiplier == pytest.approx(
            math.sqrt(2) * free[part].noise_multiplier, rel=0.1
        )


def test_biased_gep_and_pcdp_are_one_method():
    data, public = rows(), rows(3, seed=1)
    settings = {"clip_norm": 0.7, "noise_multiplier": 2.0}
    found = moved(over(eq.methods.BiasedGEP, public, **settings), data)
    same = moved(over(eq.PCDPSGD, public, blocks="per_layer", refresh_every=1, **settings), data)
    assert torch.equal(found, same)


def test_sparsification_without_dropping_is_dp_sgd():
    data = rows()
    settings = {"clip_norm": 0.7, "noise_multiplier": 2.0}
    found = moved(eq.methods.RandomSparsification(drop_rate=0.0, **settings), data)
    torch.testing.assert_close(found, moved(eq.DPSGD(**settings), data), rtol=1e-12, atol=1e-14)


def test_sparsification_drops_before_clipping_and_on_the_noise():
    data = rows(5, 1000)
    run = train(
        eq.methods.RandomSparsification(clip_norm=1.0, noise_multiplier=1.0, drop_rate=0.3), data, steps=1
    )
    dropped = run.model.w.detach() == 0
    assert 0.25 < dropped.double().mean() < 0.35
    quiet = -5 * moved(
        eq.methods.RandomSparsification(clip_norm=1.0, noise_multiplier=1e-12, drop_rate=0.3), data, steps=1
    )
    kept = data * ~dropped
    expected = (kept / kept.norm(dim=1, keepdim=True).clamp(min=1)).sum(0)
    torch.testing.assert_close(quiet, expected, rtol=1e-9, atol=1e-9)


# ---- bounds and noise


@pytest.mark.parametrize("rule", ["abadi", "auto_s", "nsgd", "psac"])
@pytest.mark.parametrize("orthonormal", [True, False])
def test_no_record_moves_the_sum_by_more_than_the_clip_norm(rule, orthonormal):
    """Whatever V is: also far from orthonormal, with rows of twenty orders of magnitude."""
    columns = basis(6, 3) if orthonormal else torch.ones(3, 6).double() + 1e-3 * rows(3)
    V = held({"w": columns})
    scales = 10 ** torch.linspace(-10, 10, 40).double().unsqueeze(1)
    for row in rows(40) * scales:
        private = PrivateRows(DenseGradients({"w": row[None]}), Draw("batch", 0))
        y = private.coordinates(V)
        for norms in (None, private.row_norms()):
            bounded = clip_coordinates(y, ClipRule.kinds()[rule](), 0.3, norms=norms)
            assert bounded.add_remove == 0.3
            assert bounded.replace == 0.6
            assert float(unwrap(bounded.value["coordinates"]).norm()) <= 0.3 * (1 + 1e-6)


def test_a_bad_row_counts_nothing_and_touches_no_other():
    good = rows(4)
    bad = torch.cat([good, torch.full((1, 6), math.nan).double(), torch.full((1, 6), math.inf).double()])
    V = held({"w": basis(6, 3)})
    sums = []
    for data in (good, bad):
        private = PrivateRows(DenseGradients({"w": data}), Draw("batch", 0))
        for norms in (None, private.row_norms()):
            bounded = clip_coordinates(private.coordinates(V), Abadi(), 0.3, norms=norms)
            sums.append(unwrap(bounded.value["coordinates"]))
    assert torch.equal(sums[0], sums[2])
    assert torch.equal(sums[1], sums[3])


def test_a_zero_gradient_is_no_nan():
    data = torch.zeros(4, 6).double()
    found = moved(
        eq.PCDPSGD(source=PublicSubspace(PublicRecords(basis(6, 2))), noise_multiplier=1.0),
        data,
    )
    assert bool(torch.isfinite(found).all())
    assert float(found.norm()) > 0


@FORMS
def test_updates_lie_in_the_subspace_with_the_noise_of_k_dimensions(form):
    """Only noise: covariance V V^T (C z / B)^2, so the mean squared norm is K (C z / B)^2."""
    public = basis(20, 4)
    method = eq.PCDPSGD(
        source=PublicSubspace(PublicRecords(public), refresh_every=10**6, basis=form),
        clip_norm=0.5,
        noise_multiplier=3.0,
    )
    steps = increments(method, torch.zeros(5, 20).double())
    torch.testing.assert_close(steps @ public.t() @ public, steps, rtol=1e-9, atol=1e-9)
    mean = float(steps.square().sum(1).mean()) / (4 * (0.5 * 3.0 / 5) ** 2)
    assert 0.85 < mean < 1.15  # 1,600 squared normals: four standard deviations are 0.14


def test_an_empty_draw_takes_its_step_with_noise():
    data = rows(1)
    run = train(
        eq.PCDPSGD(source=PublicSubspace(PublicRecords(basis(6, 2))), noise_multiplier=1.0),
        data,
        sampling=Poisson(expected_batch_size=1e-6, population=1000, steps=3),
    )
    assert run.steps_done == 3
    assert float(run.model.w.detach().norm()) > 0


@pytest.mark.slow
def test_the_published_form_has_the_law_of_the_default():
    """The norms of pure-noise steps, in the subspace: both forms, one spread."""
    public, data = basis(6, 2), torch.zeros(5, 6).double()
    for kind in (eq.PCDPSGD, published.PCDPSGD):
        method = over(kind, public, clip_norm=1.0, noise_multiplier=2.0, refresh_every=10**6)
        steps = increments(method, data, 800)
        torch.testing.assert_close(steps @ public.t() @ public, steps, rtol=1e-6, atol=1e-9)
        inside = steps @ public.t()
        covariance = inside.t() @ inside / len(steps) / (2 / 5) ** 2
        torch.testing.assert_close(covariance, torch.eye(2).double(), rtol=0, atol=0.2)  # four deviations


def test_the_published_form_has_the_clip_norm_of_the_paper():
    public = basis(6, 2)
    assert (
        eq.PCDPSGD(source=PublicSubspace(PublicRecords(public))).clip_norm
        == eq.methods.GEP(source=PublicSubspace(PublicRecords(public))).clip_norm
        == 1.0
    )
    paper = published.PCDPSGD(source=PublicSubspace(PublicRecords(public)))
    assert paper.clip_norm == paper.config()["clip_norm"] == 0.01
    assert published.PCDPSGD(source=PublicSubspace(PublicRecords(public)), clip_norm=0.3).clip_norm == 0.3
    assert published.PDPSGD(source=PublicSubspace(PublicRecords(public))).clip_norm == 1.0


def test_the_published_form_refuses_columns_that_are_not_orthonormal():
    V = held({"w": basis(6, 2)})
    check_orthonormal(V)
    with pytest.raises(ValueError, match=r"differ from orthonormal ones by 0\.19"):
        check_orthonormal(held({"w": 0.9 * basis(6, 2)}))


# ---- the four ways to coordinates


def network(dtype=torch.float64):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 3)
        ).to(dtype)


def images(count, seed, dtype=torch.float64):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 1, 6, 6, generator=rng, dtype=torch.float64).to(dtype)
    return {"x": x, "y": torch.randint(3, (count,), generator=rng)}


def entropy(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


@pytest.mark.parametrize("blocks", ["per_tensor", "per_layer", "whole"])
@pytest.mark.parametrize("normalise", [False, True])
def test_kernel_held_jvp_and_adapter_agree(blocks, normalise):
    """Coordinates by the cross-Gram, by held columns, by forward derivatives, as gradients in s."""
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
        return F.cross_entropy(
            torch.func.functional_call(model, point, (private["x"],)), private["y"], reduction="none"
        )

    eye = torch.eye(V.dimension).double()
    for j in (0, V.dimension // 2, V.dimension - 1):
        _, derivative = torch.func.jvp(losses, (params,), (V.lift(eye[j]),))
        torch.testing.assert_close(derivative, y[:, j], rtol=1e-10, atol=1e-10 * scale)

    def adapted(s):
        step = lift(s)
        return losses({name: value + step[name] for name, value in params.items()})

    columns = [V.lift(e) for e in eye]

    def lift(s):
        return {name: sum(s[j] * c[name] for j, c in enumerate(columns)) for name in params}

    jacobian = torch.func.jacrev(adapted)(torch.zeros(V.dimension).double())
    torch.testing.assert_close(jacobian, y, rtol=1e-10, atol=1e-10 * scale)
    # and the way back
    z = torch.randn(V.dimension, generator=torch.Generator().manual_seed(4)).double()
    expected = lift(z)
    for other in found.values():
        for name, value in other.lift(z).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-10)


def test_a_fixed_subspace_is_dp_sgd_on_a_model_of_k_parameters():
    """beta steps in the subspace equal DP-SGD on s -> L(w + V s), draw by draw, with the same noise."""
    public, data = basis(6, 3), rows(20, 6, 2)
    settings = {"clip_norm": 0.4, "noise_multiplier": 1.5}
    run = train(
        over(eq.PCDPSGD, public, refresh_every=50, **settings),
        data,
        steps=12,
        loss=quadratic,
        learning_rate=0.3,
        sampling=Poisson(5, 20, 12),
    )
    V = run.method._last_built.subspace.subspace
    columns = torch.stack([V.lift(e)["w"] for e in torch.eye(3).double()])  # [K, 6]

    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(3).double())

    model = Adapter()
    adapter = eq.PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=0.3),
        loss=lambda m, x: 0.5 * (m.w @ columns - x).square().sum(1),
        data=data,
        sampling=Poisson(5, 20, 12),
        method=eq.DPSGD(**settings),
        run=eq.Run(reproducible=True),
    )
    for _ in adapter:
        pass
    torch.testing.assert_close(run.model.w.detach(), model.w.detach() @ columns, rtol=1e-9, atol=1e-11)


# ---- the subspace


def projector(V, size):
    columns = torch.stack([V.lift(e)["w"] for e in torch.eye(V.dimension).double()])
    assert columns.shape[1] == size
    return columns.t() @ columns


def test_the_gram_route_is_the_svd():
    G = DenseGradients({"w": rows(10, 30)})
    found = principal_subspace(G, [["w"]], 4).subspace
    _, _, right = torch.linalg.svd(rows(10, 30), full_matrices=False)
    torch.testing.assert_close(projector(found, 30), right[:4].t() @ right[:4], rtol=0, atol=1e-8)


def test_very_many_rows_go_by_subspace_iteration():
    core = rows(3000, 5) * torch.tensor([9.0, 8, 7, 6, 5]).double()
    data = core @ basis(60, 5) + 0.01 * rows(3000, 60, 8)
    found = principal_subspace(DenseGradients({"w": data}), [["w"]], 5)
    _, _, right = torch.linalg.svd(data, full_matrices=False)
    torch.testing.assert_close(projector(found.subspace, 60), right[:5].t() @ right[:5], rtol=0, atol=1e-5)
    assert found.capture is not None
    assert found.capture > 0.9
    fewer = principal_subspace(DenseGradients({"w": data}), [["w"]], 20, energy=0.5)
    assert fewer.subspace.dimension <= 5


def test_more_columns_than_rank_are_truncated_with_a_warning():
    """Softmax gradients of ten biases sum to zero: rank 9."""
    torch.manual_seed(0)
    model = nn.Linear(4, 10).double()
    data = {"x": rows(40, 4), "y": torch.arange(40) % 10}
    public = {"x": rows(20, 4, 1), "y": torch.arange(20) % 10}
    G = GradientEngine(model, entropy, data)(public)
    found = principal_subspace(G, groups_of(G.names, "per_tensor"), 15)
    assert found.subspace.sizes == [15, 9]
    assert found.short == {"bias": 9}
    run = eq.PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss=entropy,
        data=data,
        sampling=eq.FullBatch(40, 1),
        method=eq.PCDPSGD(
            source=PublicSubspace(PublicRecords(public), dimension=150),
            noise_multiplier=1.0,
        ),
        run=eq.Run(reproducible=True),
    )
    with pytest.warns(UserWarning, match="dimension=150 is more than the public gradients span"):
        run.take_step()


class TanhCNN(nn.Module):
    """The tanh network of the paper."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 8, 2, padding=2),
            nn.Tanh(),
            nn.MaxPool2d(2, 1),
            nn.Conv2d(16, 32, 4, 2),
            nn.Tanh(),
            nn.MaxPool2d(2, 1),
            nn.Flatten(),
            nn.Linear(512, 32),
            nn.Tanh(),
            nn.Linear(32, 10),
        )

    def forward(self, x):
        return self.body(x)


def test_the_papers_network_has_490_coordinates():
    """The output bias has ten parameters and rank nine: 490 columns are asked for, 489 there."""
    torch.manual_seed(0)
    model = TanhCNN().double()
    assert sum(p.numel() for p in model.parameters()) == 26_010
    sizes = [p.numel() for p in model.parameters()]
    assert sum(min(100, p) for p in sizes) == 490
    assert sum(p * min(100, p) for p in sizes) == 2_594_404
    rng = torch.Generator().manual_seed(0)
    public = {
        "x": torch.randn(120, 1, 28, 28, generator=rng).double(),
        "y": torch.randint(10, (120,), generator=rng),
    }
    G = GradientEngine(model, entropy, public)(public)
    found = principal_subspace(G, groups_of(G.names, "per_tensor"), 100)
    assert found.subspace.dimension == 489
    assert found.short == {"body.9.bias": 9}


def test_no_public_gradient_is_an_error():
    with pytest.raises(ValueError, match="public gradients are all zero"):
        moved(
            eq.PCDPSGD(
                source=PublicSubspace(PublicRecords(torch.zeros(3, 6).double())),
                noise_multiplier=1.0,
            ),
            rows(),
        )
    with pytest.raises(ValueError, match="no columns"):
        Subspace({"w": (3,)}, [])


def test_bad_public_rows_are_left_out():
    good = rows(4)
    bad = torch.cat([good, torch.full((1, 6), math.nan).double()])
    first = principal_subspace(DenseGradients({"w": good}), [["w"]], 3).subspace
    second = principal_subspace(DenseGradients({"w": bad}), [["w"]], 3).subspace
    assert torch.equal(projector(first, 6), projector(second, 6))


def test_normalising_keeps_large_rows_from_choosing_the_directions():
    """Nine records along e_1, one a hundred times larger along e_2: one column."""
    data = torch.eye(3).double()[[0] * 9 + [1]] * torch.tensor([1.0] * 9 + [100.0]).double().unsqueeze(1)
    G = DenseGradients({"w": data})
    plain = principal_subspace(G, [["w"]], 1).subspace
    even = principal_subspace(G, [["w"]], 1, normalise=True).subspace
    assert projector(plain, 3)[1, 1] == pytest.approx(1)
    assert projector(even, 3)[0, 0] == pytest.approx(1)


def test_the_capture_is_that_of_a_held_out_mean():
    data = rows(20, 30) + 2
    found = principal_subspace(DenseGradients({"w": data}), [["w"]], 3)
    _, _, right = torch.linalg.svd(data[:16], full_matrices=False)
    mean = data[16:].mean(0)
    expected = float((right[:3] @ mean).square().sum() / mean.square().sum())
    assert found.capture == pytest.approx(expected, rel=1e-9)
    scaled = principal_subspace(DenseGradients({"w": data}), [["w"]], 3, normalise=True)
    _, _, right = torch.linalg.svd(F.normalize(data[:16]), full_matrices=False)
    expected = float((right[:3] @ mean).square().sum() / mean.square().sum())
    assert scaled.capture == pytest.approx(expected, rel=1e-9)


def test_the_warning_does_not_judge_a_basis_by_what_it_leaves_out():
    """V = U: records that are a basis capture nothing of each other, and all of the private gradients."""
    directions = basis(40, 10)
    inside = rows(50, 10, 4) @ directions
    found = principal_subspace(DenseGradients({"w": directions}), [["w"]])
    assert found.capture == pytest.approx(0, abs=1e-12)
    assert found.understated
    coordinates = found.subspace.coordinates(DenseGradients({"w": inside}))
    torch.testing.assert_close(coordinates.norm(dim=1), inside.norm(dim=1))  # nothing is missed
    with pytest.warns(UserWarning, match=r"captures 0.0% .*may capture more of the private gradients"):
        train(over(eq.PCDPSGD, directions, noise_multiplier=1.0), inside, steps=1)
    few = principal_subspace(DenseGradients({"w": rows(100, 400)}), [["w"]], 10)
    assert not few.understated
    with pytest.warns(UserWarning, match="DP-SGD is likely the better method"):
        train(over(eq.PCDPSGD, rows(100, 400), dimension=10, noise_multiplier=1.0), rows(20, 400, 2), steps=1)


def test_energy_takes_the_fewest_columns_that_capture_it():
    data = rows(40, 30) * torch.linspace(3, 0.01, 30).double() + 1
    shares = [principal_subspace(DenseGradients({"w": data}), [["w"]], k).capture for k in range(1, 31)]
    wanted = next(k for k, share in enumerate(shares, 1) if share >= 0.95)
    found = principal_subspace(DenseGradients({"w": data}), [["w"]], energy=0.95)
    assert found.subspace.dimension == wanted
    assert found.capture == pytest.approx(shares[wanted - 1])


def test_a_poor_subspace_warns():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moved(
            eq.PCDPSGD(
                source=PublicSubspace(PublicRecords(torch.ones(10, 6).double() + 0.01 * rows(10))),
                noise_multiplier=1.0,
            ),
            rows(),
        )
        with pytest.raises(UserWarning, match="DP-SGD is likely the better method"):
            moved(
                eq.PCDPSGD(
                    source=PublicSubspace(PublicRecords(rows(10, 200, seed=1)), dimension=5),
                    noise_multiplier=1.0,
                ),
                rows(12, 200),
            )


def test_disjoint_parts_and_fresh_subsets():
    public = torch.eye(6).double()
    method = eq.PCDPSGD(
        source=PublicSubspace(PublicRecords(public), refresh_every=1, batch_size="disjoint"),
        noise_multiplier=1e-24,
        clip_norm=HUGE,
    )
    data = torch.ones(4, 6).double()
    run = train(method, data, steps=3)
    torch.testing.assert_close(run.model.w.detach(), -torch.ones(6).double())  # two coordinates a step
    with pytest.raises(ValueError, match="a public record for each of the 7 refreshes"):
        train(
            eq.PCDPSGD(
                source=PublicSubspace(PublicRecords(public), refresh_every=1, batch_size="disjoint"),
                noise_multiplier=1.0,
            ),
            data,
            steps=7,
        )
    drawn = eq.PCDPSGD(
        source=PublicSubspace(PublicRecords(public), batch_size=2, refresh_every=1),
        noise_multiplier=1e-24,
        clip_norm=HUGE,
    )
    w = moved(drawn, data, steps=1)
    assert sorted(w.tolist()) == pytest.approx([-1, -1, 0, 0, 0, 0])


def test_changing_a_private_record_leaves_the_subspace_alone():
    """Given the same releases before: the first refresh sees no private record at all."""
    kept = []
    for seed in (0, 1):
        run = train(
            eq.PCDPSGD(
                source=PublicSubspace(PublicRecords(rows(4, seed=7))),
                noise_multiplier=1.0,
            ),
            rows(seed=seed),
            steps=1,
            loss=quadratic,
        )
        kept.append(projector(run.method._last_built.subspace.subspace, 6))
    assert torch.equal(*kept)


# ---- private and released subspaces, and what they cost


def plan(method, sampling, budget=None):
    return method.plan(Setting(sampling=sampling, budget=budget)).releases


def bounded_vector(bounded):
    return torch.cat([unwrap(v).flatten() for v in bounded.value.values()])


@pytest.mark.parametrize("form", ["moment", "action"])
def test_second_moments_keep_their_bounds(form):
    """Rows of twenty orders of magnitude, over two blocks; also the action on columns far too large."""
    rng = torch.Generator().manual_seed(0)
    groups = [["a"], ["b", "c"]]
    shapes = {"a": (3,), "b": (2, 2), "c": (4,)}
    for size in (1.0, 50.0):
        columns = [
            {name: size * torch.randn(3, *shapes[name], generator=rng).double() for name in group}
            for group in groups
        ]
        for scale in 10 ** torch.linspace(-10, 10, 30):
            pair = []
            for _ in range(2):
                row = {n: scale * torch.randn(1, *s, generator=rng).double() for n, s in shapes.items()}
                private = PrivateRows(DenseGradients(row), Draw("batch", 0))
                if form == "moment":
                    bounded = second_moment(private, Abadi(), 0.7, groups)
                else:
                    bounded = moment_action(private, Abadi(), 0.7, columns)
                pair.append(bounded_vector(bounded))
                assert isinstance(bounded, Bounded)
                assert bounded.add_remove == pytest.approx(0.49)
                assert float(pair[-1].norm()) <= 0.49 * (1 + 1e-5)
            assert float((pair[0] - pair[1]).norm()) <= bounded.replace * (1 + 1e-5)
    if form == "moment":
        assert bounded.replace == pytest.approx(math.sqrt(2) * 0.49)


def test_a_bad_row_leaves_the_second_moments():
    good, columns = rows(4), [{"w": basis(6, 2)}]
    bad = torch.cat([good, torch.full((1, 6), math.nan).double()])
    found = []
    for data in (good, bad):
        private = PrivateRows(DenseGradients({"w": data}), Draw("batch", 0))
        found.append(bounded_vector(second_moment(private, Abadi(), 0.7, [["w"]])))
        found.append(bounded_vector(moment_action(private, Abadi(), 0.7, columns)))
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


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
    found = projector(run.method._last_built.subspace.subspace, 30)
    torch.testing.assert_close(found, core.t() @ core, rtol=0, atol=1e-4)
    refreshes = 2 * (1 if source.kind == "moment" else 4)
    assert run.plan.count(run.plan["moment"]) == refreshes
    assert run.statement().guarantee == "proven"
    assert run.ledger.releases_left == {"batch": 0, "subspace": 0}


def test_a_private_subspace_leaves_less_for_the_steps():
    sampling, budget = Poisson(64, 1200, 300), eq.Budget(1.0, 1e-5)
    free = plan(eq.PCDPSGD(source=PublicSubspace(PublicRecords(rows(4)))), sampling, budget)
    paid = plan(eq.PCDPSGD(source=IterationSubspace(share=0.5)), sampling, budget)
    assert 0.99 <= paid.epsilon(1e-5).value <= 1.0
    assert paid["gradient"].noise_multiplier == pytest.approx(
        math.sqrt(2) * free["gradient"].noise_multiplier, rel=0.1
    )


def test_a_released_subspace_follows_full_steps_and_costs_nothing():
    core = basis(30, 2)
    data = core.repeat(20, 1)
    method = eq.PCDPSGD(
        source=ReleasedSubspace(dimension=2, history=4, explore_every=3),
        noise_multiplier=1e-09,
        clip_norm=9.0,
    )
    run = train(method, data, steps=12, loss=quadratic, sampling=Poisson(20, 40, 12), learning_rate=0.5)
    found = projector(run.method._last_built.subspace.subspace, 30)
    torch.testing.assert_close(found, core.t() @ core, rtol=0, atol=1e-4)
    expected = plan(eq.DPSGD(clip_norm=9.0, noise_multiplier=1e-9), Poisson(20, 40, 12))
    assert run.plan.event() == expected.event()
    assert run.statement().guarantee == "proven"


# ---- what it costs


@pytest.mark.parametrize("make", [eq.PCDPSGD, eq.methods.PDPSGD, eq.methods.BiasedGEP])
def test_the_event_is_that_of_dp_sgd_whatever_the_dimension(make):
    sampling = Poisson(250, 10_000, 3200)
    for k in (1, 50):
        found = plan(over(make, rows(60), dimension=k, noise_multiplier=6.0), sampling)
        assert found.event() == plan(eq.DPSGD(noise_multiplier=6.0), sampling).event()


@pytest.mark.parametrize(
    ("sigma", "expected"),
    [(2, 3.22), (4, 1.39), (6, 0.880), (10, 0.500), (14, 0.346), (18, 0.263), (22, 0.211), (26, 0.176)],
)
def test_worked_epsilons(sigma, expected):
    """The paper's central setting: q = .025, 3,200 steps, delta 1e-5."""
    found = plan(
        eq.PCDPSGD(source=PublicSubspace(PublicRecords(rows(4))), noise_multiplier=sigma),
        Poisson(250, 10_000, 3200),
    )
    assert found.epsilon(1e-5).value == pytest.approx(expected, rel=0.005)


@pytest.mark.slow
def test_further_worked_epsilons():
    paper = Poisson(250, 10_000, 3200)
    large = Poisson(256, 60_000, 4700)

    def epsilon(method, sampling):
        return plan(method, sampling).epsilon(1e-5).value

    assert epsilon(
        eq.PCDPSGD(source=PublicSubspace(PublicRecords(rows(4))), noise_multiplier=1.0),
        large,
    ) == pytest.approx(1.571, rel=0.005)
    assert epsilon(
        eq.methods.GEP(source=PublicSubspace(PublicRecords(rows(4))), noise_multiplier=6.0),
        paper,
    ) == pytest.approx(1.301, rel=0.005)
    # per-tensor clipping at C each, eight tensors: what the leftover code does is sigma 6 / sqrt(8)
    eight = eq.PCDPSGD(source=PublicSubspace(PublicRecords(rows(4))), noise_multiplier=6 / math.sqrt(8))
    assert epsilon(eight, paper) == pytest.approx(2.983, rel=0.005)
    replaced = (
        eq.PCDPSGD(source=PublicSubspace(PublicRecords(rows(4))), noise_multiplier=6.0)
        .plan(Setting(sampling=paper, relation="replace_one"))
        .releases
    )
    assert replaced.epsilon(1e-5).value == pytest.approx(1.866, rel=0.005)
    iterated = eq.PCDPSGD(
        source=IterationSubspace(refresh_every=40, noise_multiplier=6.0, iterations=3),
        noise_multiplier=6.0,
    )
    assert epsilon(iterated, paper) == pytest.approx(0.915, rel=0.005)
    moment = eq.PCDPSGD(
        source=MomentSubspace(refresh_every=4700, noise_multiplier=10.0, batch_size=60000),
        noise_multiplier=1.0,
    )
    assert epsilon(moment, large) == pytest.approx(1.621, rel=0.005)


@pytest.mark.parametrize(
    "method",
    [
        eq.PCDPSGD(source=PublicSubspace(PublicRecords(rows(4)))),
        eq.methods.PDPSGD(source=PublicSubspace(PublicRecords(rows(4)))),
        eq.methods.GEP(source=PublicSubspace(PublicRecords(rows(4)))),
        eq.methods.GEP(source=PublicSubspace(PublicRecords(rows(4))), residual_share=0.2),
        eq.methods.RandomProjection(),
        eq.methods.RandomSparsification(),
        eq.PCDPSGD(source=MomentSubspace()),
        eq.PCDPSGD(source=ReleasedSubspace()),
        eq.methods.GEP(source=MomentSubspace(), residual_share=0.2),
        eq.methods.GEP(source=ReleasedSubspace()),
    ],
    ids=lambda m: f"{m.name}-{getattr(m, 'subspace', '')}",
)
def test_plans_meet_the_budget_from_below(method):
    found = plan(method, Poisson(64, 1200, 300), eq.Budget(2.0, 1e-5))
    assert 0.99 * 2 <= found.epsilon(1e-5).value <= 2


def test_both_parts_of_gep_have_the_same_noise_by_default():
    found = plan(
        eq.methods.GEP(source=PublicSubspace(PublicRecords(rows(4)))),
        Poisson(64, 1200, 300),
        eq.Budget(2.0, 1e-5),
    )
    alone = plan(
        eq.PCDPSGD(source=PublicSubspace(PublicRecords(rows(4)))),
        Poisson(64, 1200, 300),
        eq.Budget(2.0, 1e-5),
    )
    assert found["gradient"].noise_multiplier == found["residual"].noise_multiplier
    assert found["gradient"].noise_multiplier == pytest.approx(
        math.sqrt(2) * alone["gradient"].noise_multiplier, rel=0.02
    )


# ---- resumes, settings, errors


def small(**options):
    plain = {"noise_multiplier": 1.0, "clip_norm": 0.5}
    settings = plain | {"refresh_every": 3}
    public = images(9, 5, torch.float32)
    return {
        "public": lambda: over(eq.PCDPSGD, public, **settings, **options),
        "subsets": lambda: over(eq.PCDPSGD, public, batch_size=6, basis="kernel", **settings),
        "published": lambda: over(published.PCDPSGD, public, **settings),
        "pdp": lambda: over(eq.methods.PDPSGD, public, **settings),
        "gep": lambda: over(eq.methods.GEP, public, **settings),
        "gep released": lambda: eq.methods.GEP(source=ReleasedSubspace(history=2, explore_every=2), **plain),
        "gep iteration": lambda: eq.methods.GEP(
            source=IterationSubspace(refresh_every=3, dimension=4), **plain
        ),
        "random": lambda: eq.methods.RandomProjection(
            source=RandomSubspace(refresh_every=3, dimension=5), **plain
        ),
        "sparse": lambda: eq.methods.RandomSparsification(clip_norm=0.5, noise_multiplier=1.0),
        "released": lambda: eq.PCDPSGD(source=ReleasedSubspace(history=2, explore_every=2), **plain),
        "moment": lambda: eq.PCDPSGD(source=MomentSubspace(refresh_every=3, dimension=4), **plain),
        "iteration": lambda: eq.PCDPSGD(source=IterationSubspace(refresh_every=3, dimension=4), **plain),
    }


@pytest.mark.parametrize("which", list(small()))
@pytest.mark.slow
def test_kill_and_resume_repeats_the_trajectory(which, tmp_path):
    """Also with dropout: public gradients of the anchor come out the same again."""

    def model():
        body = network(torch.float32)
        return nn.Sequential(*body[:4], nn.Dropout(0.2), *body[4:])

    def start(folder):
        net = model()
        return eq.PrivateTraining(
            net,
            torch.optim.SGD(net.parameters(), lr=0.1),
            loss=entropy,
            data=images(30, 6, torch.float32),
            sampling=Poisson(10, 30, 7),
            method=small()[which](),
            run=eq.Run(folder, reproducible=True),
        )

    whole = start(tmp_path / "whole")
    whole.run(progress=False, checkpoint_every=100)
    cut = start(tmp_path / "cut")
    for step in cut:
        if step.step == 4:
            cut.save_checkpoint()
        if step.step == 5:
            break
    charged = cut.ledger.releases_left
    del cut
    net = model()
    again = eq.PrivateTraining.resume(
        tmp_path / "cut",
        net,
        torch.optim.SGD(net.parameters(), lr=0.1),
        loss=entropy,
        data=images(30, 6, torch.float32),
        method=small()[which](),
    )
    assert again.steps_done == 4
    again.take_step()
    assert again.ledger.releases_left == charged  # the fifth step was paid for already
    again.run(progress=False)
    for name, value in net.state_dict().items():
        assert torch.equal(value, whole.model.state_dict()[name]), name


@pytest.mark.parametrize("which", list(small()))
def test_settings_come_back_from_a_file(which):
    method = small()[which]()
    kind, config = find(method.name, method.recipe), method.config()
    if "records" not in config.get("source", {}):
        assert kind.from_config(config).config() == config
        return
    assert set(config["source"]["records"]) == {"records", "digest"}
    again = kind.from_config(config, PublicRecords(images(9, 5, torch.float32)))
    assert again.config() == config
    with pytest.raises(ValueError, match="again with 9 public records"):
        kind.from_config(config)
    with pytest.raises(ValueError, match="differs from the records"):
        kind.from_config(config, PublicRecords(images(9, 6, torch.float32)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: eq.PCDPSGD.from_config({"name": "pcdp-sgd"}), "takes public records"),
        (
            lambda: eq.PCDPSGD(source=PublicSubspace(PublicRecords(rows(4)), dimension=0)),
            "dimension=0",
        ),
        (
            lambda: eq.PCDPSGD(source=PublicSubspace(PublicRecords(rows(4)), energy=1.5)),
            "energy=1.5 is a share",
        ),
        (
            lambda: eq.PCDPSGD(source=PublicSubspace(PublicRecords(rows(4)), blocks="layer")),
            "blocks='layer' is unknown",
        ),
        (
            lambda: eq.PCDPSGD(source=PublicSubspace(PublicRecords(rows(4))), noise_multiplier=0),
            "noise_multiplier=0",
        ),
        (
            lambda: published.PCDPSGD(source=RandomSubspace()),
            "fixed number of directions of public",
        ),
        (
            lambda: over(published.PDPSGD, rows(4), energy=0.9),
            "fixed number of directions of public",
        ),
        (
            lambda: eq.PCDPSGD(source=PublicSubspace(PublicRecords({"x": rows(3), "y": rows(4)}))),
            "same number",
        ),
        (lambda: eq.methods.GEP.from_config({"name": "gep"}), "takes public records"),
        (
            lambda: eq.methods.GEP(source=PublicSubspace(PublicRecords(rows(4))), residual_share=1.0),
            "residual_share=1.0",
        ),
        (lambda: eq.methods.RandomSparsification(drop_rate=1.0), "drop_rate=1.0"),
        (
            lambda: plan(
                eq.PCDPSGD(source=PublicSubspace(PublicRecords(rows(4)))),
                Poisson(2, 4, 2),
            ),
            "budget is missing",
        ),
    ],
)
def test_bad_settings_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "make", [eq.PCDPSGD, eq.methods.GEP, eq.methods.RandomProjection, eq.methods.RandomSparsification]
)
def test_an_unknown_keyword_is_a_type_error(make):
    with pytest.raises(TypeError, match="max_grad_norm"):
        make(max_grad_norm=1.0)
