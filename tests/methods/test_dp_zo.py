"""Zeroth-order training: its formula, its memory, and what a record can move."""

from __future__ import annotations

import pytest
import torch
from oracle_cases import Filling
from stepping import Follower
from table import loss, network, parameters, records
from table import training as train
from torch import nn

import equipoise as eq
from equipoise.audit.neighbours import audit_neighbours
from equipoise.gradients import GradientEngine
from equipoise.gradients.capture.recorder import PlanMismatch
from equipoise.gradients.checks.errors import CrossRecordError
from equipoise.gradients.forward_only import LossEngine
from equipoise.methods import DPZO
from equipoise.methods.zeroth_order import RandomDirection
from equipoise.privacy.private import unwrap
from equipoise.testing.method_audit import audit_method
from equipoise.training.randomness import generator
from reproduction.planted_steps import Altered

QUIET = {"noise_multiplier": 1e-12}
ALL = eq.FullBatch(60, 6)


def direction(seed: int = 0, like: dict[str, torch.Tensor] | None = None) -> RandomDirection:
    return RandomDirection(like or dict(network().named_parameters()), torch.Generator().manual_seed(seed))


def test_it_is_what_ten_lines_write(monkeypatch):
    """A whole run, bit for bit up to rounding, with the directions that it took."""
    taken = []
    made = RandomDirection.__init__

    def noted(self, *given):
        made(self, *given)
        taken.append({name: u.double() for name, u in self.items()})

    monkeypatch.setattr(RandomDirection, "__init__", noted)
    follower = Follower(DPZO(clip_norm=0.5, **QUIET), network(), loss, records(), ALL)
    follower.run()
    model, data = network(), records()
    for u in taken:
        losses = []
        for sign in (1, -1):
            moved = {name: p + sign * 1e-3 * u[name] for name, p in model.named_parameters()}
            at = lambda x, moved=moved: torch.func.functional_call(model, moved, (x,))  # noqa: E731
            losses.append(loss(at, data))
        slopes = ((losses[0] - losses[1]) / 2e-3).clamp(-0.5, 0.5)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= 0.1 * slopes.sum() / 60 * u[name]
    assert len(taken) == 6
    torch.testing.assert_close(follower.vector, parameters(model), rtol=1e-6, atol=1e-8)


def test_without_clipping_it_is_the_gradient_in_the_mean():
    model = network()
    method, count = DPZO(clip_norm=1e6, **QUIET), 400
    follower = Follower(method, model, loss, records(), eq.FullBatch(60, count), learning_rate=0.0)
    mean = sum(torch.cat([e.flatten() for e in follower.step().values()]) for _ in range(count)) / count
    loss(model, records()).mean().backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    # An entry deviates by about |g| / sqrt(count), the part along the gradient by sqrt(2 / count) |g|.
    assert (mean - gradient).abs().max() < 5 * gradient.norm() / count**0.5
    along = torch.dot(mean, gradient.to(mean)) / gradient.square().sum()
    assert abs(along - 1) < 4 * (2 / count) ** 0.5


def test_directions_lie_on_the_sphere_and_are_white():
    like = {"a": torch.zeros(3, 4), "b": torch.zeros(8)}
    drawn = [torch.cat([u.flatten() for u in direction(seed, like).values()]) for seed in range(2000)]
    flat = torch.stack(drawn).double()
    torch.testing.assert_close(flat.square().sum(1), torch.full((2000,), 20.0).double(), rtol=1e-6, atol=0)
    assert ((flat.T @ flat) / 2000 - torch.eye(20)).abs().max() < 4 * 2**0.5 / 2000**0.5
    assert flat.mean(0).abs().max() < 4 / 2000**0.5


def test_its_noise_is_one_number_per_step():
    """Along the direction, of the scale that is booked."""
    method = DPZO(clip_norm=0.5, noise_multiplier=1e6)
    follower = Follower(method, network(), loss, records(), eq.FullBatch(60, 300), learning_rate=0)
    lengths = []
    for step in range(300):
        estimate = follower.step()
        u = RandomDirection(follower.params, generator(follower.rows.seed, "method", step))
        along = [float(estimate[name].flatten()[0] / u[name].flatten()[0]) for name in u]
        assert max(along) == pytest.approx(min(along), rel=1e-5)
        lengths.append(60 * along[0] / (0.5 * 1e6))
    assert torch.tensor(lengths).std().item() == pytest.approx(1, abs=4 / (2 * 300) ** 0.5)


def squares(model, x):
    return model(x).square().flatten(1).sum(1)


def test_losses_are_those_of_the_gradients_query():
    model = network()
    with_gradients = GradientEngine(model, loss, records()).by_plan(records())
    without = LossEngine(model, loss, records()).by_plan(records())
    assert torch.equal(with_gradients.losses, without.losses)
    assert without.shape == with_gradients.shape
    with pytest.raises(TypeError, match="have losses and no gradients"):
        without.row_norms()


def test_a_record_that_runs_other_operations_runs_by_itself():
    engine = LossEngine(Filling(), squares, torch.randn(5, 3))
    usual = torch.randn(5, 3)
    rare = usual.clone()
    rare[2, 0] = -9
    with pytest.raises(PlanMismatch):
        engine.by_plan(rare)
    for batch in (usual, rare):
        alone = torch.cat([engine.alone(batch, place=place).losses for place in range(5)])
        torch.testing.assert_close(alone, squares(engine.model, batch))
    assert torch.equal(engine.by_plan(usual).losses, squares(engine.model, usual))


def test_dropout_is_alike_at_both_points():
    """Other masks would be a difference of their own, divided by 2 mu."""
    model = nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.5), nn.Linear(40, 3)).double()
    seen = []

    class Watched(DPZO):
        def slopes(self, ahead, behind):
            seen.append(unwrap((ahead.losses - behind.losses) / 2e-3))
            return super().slopes(ahead, behind)

    list(train(Watched(clip_norm=0.5, **QUIET), model=model, budget=None))
    assert torch.cat(seen).abs().max() < 200


def test_one_record_moves_the_sum_by_its_bound_and_nothing_else_moves():
    """The direction, the divisor, the points and the losses of the others stay, bit for bit."""
    torch.manual_seed(0)
    # Eight inputs: a product over five rounds rows by their place on some processors, as statements then say.
    data = {"x": torch.randn(60, 8) + 1, "y": torch.randn(60)}
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def regression(model, batch):
        return 0.5 * (model(batch["x"]).squeeze(1) - batch["y"]).square()

    found = audit_neighbours(
        model, regression, data, method=DPZO(clip_norm=0.5), positions=4, steps=2,
        budget=eq.Budget(4, 1e-3), sampling=eq.Poisson(20, 60, 2),
    )  # fmt: skip
    assert found.holds
    assert max(pair.movement for pair in found.pairs if pair.change == "silent") == 0
    assert max(pair.movement for pair in found.pairs if pair.change != "silent") > 0.3


def test_its_audit_finds_noise_that_is_far_too_small():
    class Silent(Altered):
        noise_by = 0.3

    assert not audit_method("dp-zo", 2.0, one_step=True, canaries=200, make_ledger=Silent).holds


def test_losses_that_mix_at_the_size_of_a_forward_are_refused():
    """With few records nothing mixes; no gradients are compared that would show it."""

    def mixing(model, batch):
        found = loss(model, batch)
        return found + 0.1 * found.mean().detach() if len(found) > 16 else found

    with pytest.raises(CrossRecordError):
        train(DPZO(clip_norm=0.5), loss=mixing, sampling=ALL, microbatch_size=60).take_step()
