"""Methods that scale rows before clipping, and methods that filter over steps, against their formulas."""

from __future__ import annotations

import pytest
import torch
from stepping import Follower
from table import loss, network, records
from torch import nn

import equipoise as eq
from equipoise.gradients import dense_gradients
from equipoise.methods import AdaClip, DiSK, Doppler, DPAdamBC, LowPass, ScaleThenPrivatise, SecondMoment

QUIET = {"noise_multiplier": 1e-9}
ALL = eq.FullBatch(60, 6)


def follow(method: eq.Method, sampling: eq.privacy.Sampling = ALL, rate: float = 0.1) -> Follower:
    return Follower(method, network(), loss, records(), sampling, learning_rate=rate)


def rows_at(params: dict[str, torch.Tensor]) -> torch.Tensor:
    return dense_gradients(network(), loss, records(), params=params).matrix()


def clipped_mean(rows: torch.Tensor, clip_norm: float) -> torch.Tensor:
    return (rows * (clip_norm / rows.norm(dim=1)).clamp(max=1).unsqueeze(1)).sum(0) / len(rows)


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.detach().flatten() for value in tensors.values()])


def named(vector: torch.Tensor, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    parts = vector.split([value.numel() for value in like.values()])
    return {name: part.view(like[name].shape) for name, part in zip(like, parts, strict=True)}


@pytest.mark.parametrize(("kappa", "gamma"), [(0.3, 0.2), (0.5, 1.0)])
def test_disk_by_its_formula(kappa, gamma):
    share = (1 - kappa) / (kappa * gamma)
    follower = follow(DiSK(clip_norm=0.5, kappa=kappa, gamma=gamma, **QUIET))
    x = {name: value.detach().clone() for name, value in follower.params.items()}
    previous, estimate = x, None
    for _ in range(4):
        ahead = {name: value + gamma * (value - previous[name]) for name, value in x.items()}
        fresh = clipped_mean(share * rows_at(ahead) + (1 - share) * rows_at(x), 0.5)
        estimate = fresh if estimate is None else (1 - kappa) * estimate + kappa * fresh
        torch.testing.assert_close(flat(follower.step()), estimate, rtol=1e-6, atol=1e-7)
        previous = x
        x = {name: x[name] - 0.1 * part for name, part in named(estimate, x).items()}
    assert follower.method.passes_over("batch") == (1 if kappa == 0.5 else 2)


def test_the_filter_by_its_definition():
    given = LowPass(forward=(0.2, 0.1, 0.1), feedback=(-0.5, -0.1))
    sampling = eq.FullBatch(60, 6)
    raw = follow(eq.DPSGD(clip_norm=0.5, **QUIET), sampling, rate=0.0)
    filtered = follow(Doppler(clip_norm=0.5, filter=given, **QUIET), sampling, rate=0.0)
    u, m, c = [], [], []
    for t in range(6):
        # parameters that move alike in both
        for follower in (raw, filtered):
            with torch.no_grad():
                for value in follower.params.values():
                    value += 0.3
        u.append(flat(raw.step()))
        m.append(sum(b * u[t - k] for k, b in enumerate(given.forward) if k <= t))
        m[t] = m[t] - sum(a * m[t - k] for k, a in enumerate(given.feedback, 1) if k <= t)
        c.append(given.response([1.0] * (t + 1))[-1])
        torch.testing.assert_close(flat(filtered.step()), m[t] / c[t], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("by_sides", [False, True])
def test_scaling_by_second_moments_by_its_formula(by_sides):
    decay, floor = 0.6, 0.2
    method = ScaleThenPrivatise(clip_norm=0.5, scale=SecondMoment(decay, floor, by_sides), **QUIET)
    follower = follow(method)
    x = {name: value.detach().clone() for name, value in follower.params.items()}
    square, scale = torch.zeros(flat(x).numel(), dtype=torch.float64), None
    for t in range(1, 5):
        scale = torch.ones_like(square) if scale is None else scale
        estimate = clipped_mean(rows_at(x) * scale, 0.5) / scale
        torch.testing.assert_close(flat(follower.step()), estimate, rtol=1e-6, atol=1e-7)
        square = decay * square + (1 - decay) * estimate**2
        corrected = square / (1 - decay**t)
        size = corrected.mean().sqrt()
        parts = []
        for value in named(corrected, x).values():
            if by_sides and value.ndim == 2:
                rows, columns = value.mean(1, keepdim=True), value.mean(0, keepdim=True)
                own = value.mean().sqrt()
                by_row = (1 + floor) * size / (rows.sqrt() + floor * size)
                parts.append((by_row * (1 + floor) * own / (columns.sqrt() + floor * own)).flatten())
            else:
                parts.append(((1 + floor) * size / (value.sqrt() + floor * size)).flatten())
        scale = torch.cat(parts)
        x = {name: x[name] - 0.1 * part for name, part in named(estimate, x).items()}


@pytest.mark.parametrize("centred", [True, False])
def test_adaclip_by_its_formula(centred):
    decay, floor = 0.5, 0.2
    method = AdaClip(clip_norm=0.5, decay=decay, floor=floor, centred=centred, **QUIET)
    follower = follow(method)
    x = {name: value.detach().clone() for name, value in follower.params.items()}
    mean = torch.zeros(flat(x).numel(), dtype=torch.float64)
    spread, a, b = torch.zeros_like(mean), torch.zeros_like(mean), torch.ones_like(mean)
    for t in range(1, 5):
        centre = a if centred else torch.zeros_like(a)
        estimate = centre + b * clipped_mean((rows_at(x) - centre) / b, 0.5)
        torch.testing.assert_close(flat(follower.step()), estimate, rtol=1e-6, atol=1e-7)
        mean = decay * mean + (1 - decay) * estimate
        spread = decay * spread + (1 - decay) * (estimate - a) ** 2
        a, squares = mean / (1 - decay**t), spread / (1 - decay**t)
        s = squares.clamp(min=floor**2 * squares.clamp(min=0).mean()).sqrt()
        b = (s * s.sum() / s.square().sum()).sqrt()
        assert float((s / b).square().sum()) == pytest.approx(float(s.square().sum()))
        x = {name: x[name] - 0.1 * part for name, part in named(estimate, x).items()}


def test_without_noise_adambc_is_adam_bit_for_bit():
    rng = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        model = nn.Linear(7, 5).to(dtype)
        mine = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        method = DPAdamBC()
        moments = method.start(mine)
        adam = torch.optim.Adam(model.parameters(), lr=2**-7)
        sgd = torch.optim.SGD(mine.values(), lr=2**-7)
        for _ in range(50):
            gradient = {name: torch.randn(p.shape, generator=rng, dtype=dtype) for name, p in mine.items()}
            estimate, moments = method.direction(gradient, moments, std=0.0)
            for name, p in model.named_parameters():
                p.grad, mine[name].grad = gradient[name], estimate[name]
            adam.step()
            sgd.step()
            for name, p in model.named_parameters():
                assert torch.equal(p, mine[name])


def test_adambc_by_its_formula():
    method = DPAdamBC(beta1=0.5, beta2=0.8, eps=1e-3, floor=0.1)
    first, second = torch.zeros(100).double(), torch.zeros(100).double()
    moments = method.start({"w": first})
    rng = torch.Generator().manual_seed(0)
    for t in range(1, 6):
        u = torch.randn(100, generator=rng, dtype=torch.float64)
        first, second = 0.5 * first + 0.5 * u, 0.8 * second + 0.2 * u * u
        root = (second / (1 - 0.8**t) - 0.49).clamp(min=0.049).sqrt() + 1e-3
        estimate, moments = method.direction({"w": u}, moments, std=0.7)
        torch.testing.assert_close(estimate["w"], first / (1 - 0.5**t) / root)


def after_noise_alone(method, steps):
    """The state after steps on records without gradients."""
    data = records()
    data["weight"].zero_()
    follower = Follower(method, network(), loss, data, eq.FullBatch(60, steps), learning_rate=0.0)
    return follower.run(steps).state


def test_the_noise_of_the_releases_is_taken_out_of_their_squares():
    """Without gradients, what is subtracted is the mean square of the estimates, and little is left."""
    state = after_noise_alone(DPAdamBC(clip_norm=0.5, noise_multiplier=3.0, beta2=0.99), 300)
    assert float(flat(state["second"]).mean()) == pytest.approx(state["noise"], rel=0.05)
    assert state["noise"] / (1 - 0.99**300) == pytest.approx((3.0 * 0.5 / 60) ** 2)
    spread = flat(after_noise_alone(AdaClip(clip_norm=1.0, decay=0.98, noise_multiplier=1.0), 200)["spread"])
    assert abs(float(spread.mean())) < 0.1 / 60**2  # the noise's own is 1 / 60^2
