"""What a run saves and no step moves is what it was at the start, and no noise outlives the key."""

from functools import partial

import pytest
import torch
from small_problems import CLASSES, FEATURES, parameters, records, resumed, saved, training
from torch import nn

import equipoise as eq
from equipoise.statements.assumptions import HOOKED
from equipoise.statements.verify import verify_run


class Scaled(nn.Module):
    """A frozen batch norm, a frozen layer, buffers that are saved and one that is not, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES).eval().requires_grad_(False)
        self.frozen = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.head = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("scale", torch.ones(FEATURES))
        self.register_buffer("cache", torch.ones(FEATURES), persistent=False)
        self.seen = 0.0

    def forward(self, x):
        return self.head(self.frozen(self.norm(x)) * self.scale * self.cache)

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def update_bn(model):
    loader = torch.utils.data.DataLoader(records()["input"], batch_size=20)
    torch.optim.swa_utils.update_bn(loader, model)


def evaluated(run):
    run.evaluate(len)


def in_training_mode(run):
    run.evaluate(lambda model: model.train()(records()["input"]).sum())
    run.save_checkpoint()


#: What is changed after a step, how, and what comes then; a step sees what left a mark.
CHANGES = [
    ("norm.running_mean", update_bn, eq.PrivateTraining.take_step),
    ("norm.running_mean", lambda model: None, in_training_mode),
    ("frozen.weight", lambda model: model.frozen.weight.data.add_(1), eq.PrivateTraining.save_checkpoint),
    ("scale", lambda model: setattr(model, "scale", model.scale * 1.5), evaluated),
    ("extra_state", lambda model: setattr(model, "seen", 41.5), eq.PrivateTraining.finish),
]


@pytest.mark.parametrize(("what", "change", "then"), CHANGES)
def test_what_no_step_moves_is_saved_as_it_was(tmp_path, what, change, then):
    run = training(Scaled(), folder=tmp_path / "run")
    run.take_step()
    change(run.model)
    spent = run.ledger.releases_left
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"{what}.*PrivateTraining\.resume"):
            then(run)
    assert run.ledger.releases_left == spent
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_what_changes_nothing_that_is_saved_is_allowed(tmp_path):
    whole, model = Scaled(), Scaled()
    model.load_state_dict(whole.state_dict())
    training(whole, steps=4).run(progress=False)
    run = training(model, steps=4, folder=tmp_path / "run")
    for _ in run:
        model.scale.copy_(torch.ones(FEATURES))  # written, and what it was
        model.scale = model.scale.clone()
        model.eval()
        model.double().float()
        run.evaluate(lambda model: float(model(records()["input"]).sum()))
    run.finish()
    assert torch.equal(model.head.weight, whole.head.weight)


def test_a_resume_watches_what_it_loaded(tmp_path):
    model = Scaled()
    model.scale.fill_(3)
    run = training(model, steps=4, folder=tmp_path / "run")
    saved(run)
    model = Scaled()  # its buffer has another value until the checkpoint is loaded
    again = resumed(tmp_path / "run", model)
    again.take_step()
    again.save_checkpoint()
    model.scale.mul_(2)
    with pytest.raises(RuntimeError, match=r"scale"):
        again.take_step()


class WithTeacher(nn.Module):
    """A momentum encoder: frozen, and moved after every step by its trained twin."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = (nn.Linear(FEATURES, CLASSES) for _ in range(2))
        self.teacher.requires_grad_(False)

    def forward(self, x):
        return self.student(x) + 0.1 * self.teacher(x)

    def follow(self, *_, by_data=False):
        for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            (own.data if by_data else own).lerp_(other.detach(), 0.5)


@pytest.mark.parametrize("is_quiet", [False, True])
def test_a_hook_of_the_step_moves_frozen_parameters_and_is_named(tmp_path, is_quiet):
    """Given to the optimizer or not: it moves none that has no gradient. Writes to `.data` leave no mark."""

    def pieces():
        model = WithTeacher()
        optimizer = torch.optim.SGD((model.student if is_quiet else model).parameters(), lr=0.3)
        optimizer.register_step_post_hook(partial(model.follow, by_data=is_quiet))
        return model, lambda *_, lr: optimizer

    (model, optimizer), named = pieces(), HOOKED + "teacher.bias, teacher.weight"
    run = training(model, optimizer=optimizer, steps=4, folder=tmp_path / "run")
    run.take_step()
    assert named in run.statement().assumptions
    run.save_checkpoint()
    run.take_step()
    model.follow(by_data=is_quiet)  # not by a step
    with pytest.raises(RuntimeError, match=r"teacher.*register_step_post_hook"):
        run.take_step()
    run.close()
    again = resumed(tmp_path / "run", *pieces())
    assert named in again.run(progress=False).statement.assumptions
    assert eq.verify_run(tmp_path / "run").consistent


def pieces():
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def lower_by_plateau(optimizer, losses):
    torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0).step(losses.mean())
    optimizer.param_groups[0]["weight_decay"] = float(losses.detach().max())


def test_a_loss_that_sets_a_rate_by_its_records_is_refused():
    model, optimizer = pieces()

    def loss(model, x):
        losses = model(x).square().mean(1)
        lower_by_plateau(optimizer, losses)
        return losses

    given = {"loss": loss, "data": torch.randn(20, 2), "sampling": eq.Poisson(8, 20, 2)}
    with pytest.raises(ValueError, match="of optimizer or scheduler"):
        training(model, optimizer=lambda *_, lr: optimizer, **given)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.param_groups[0]["weight_decay"] == 0


class Counting(torch.optim.SGD):
    """Keeps a number of all parameters beside the state of each, as MADGRAD does."""

    def step(self, closure=None):
        self.state.setdefault("k", torch.tensor([0])).add_(1)
        return super().step(closure)


def test_an_optimizer_with_a_state_of_all_parameters_trains():
    run = training(optimizer=Counting, steps=3)
    assert run.run(progress=False).steps == 3


BOUND = 1 / 16


def clip_weights(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-BOUND, BOUND)


def largest(model):
    return float(parameters(model).abs().max())


def named(run, name):
    return [text for text in run.statement().assumptions if name in text]


def test_weights_are_clipped_between_steps_and_the_statement_says_so(tmp_path):
    run = training(folder=tmp_path / "run", steps=3, ema_decay=0.5)

    def clip():
        clip_weights(run.model)
        return largest(run.model)

    run.take_step()
    spent = run.ledger.releases_left
    assert run.public_step(clip) <= BOUND
    assert run.ledger.releases_left == spent
    saved(run, steps=0)
    run = resumed(tmp_path / "run")
    assert largest(run.model) <= BOUND
    for _ in run:
        run.public_step(clip)
    (words,) = named(run, "clip")
    assert "moved the parameters 3 times" in words
    run.finish()
    assert all(finding.ok is not False for finding in verify_run(tmp_path / "run").findings)
    with pytest.raises(RuntimeError, match="has ended"):
        run.public_step(clip)


def test_buffers_and_frozen_parameters_may_change_in_a_public_step_only():
    def change():
        model.scale.mul_(2)
        nn.init.eye_(model.frozen.weight)

    model = Scaled()
    run = training(model)
    run.public_step(change)
    run.take_step()
    run.public_step(change)
    run.evaluate(lambda model: 0.0)
    clip_weights(model)
    with pytest.raises(RuntimeError, match="public_step"):
        run.public_step(change)  # something else had moved the parameters before
    assert model.scale.tolist() == [4.0] * FEATURES


def test_what_a_failed_public_step_changed_is_refused():
    def half():
        clip_weights(run.model)
        raise ValueError("half way")

    run = training()
    run.take_step()
    with pytest.raises(ValueError, match="half way"):
        run.public_step(half)
    assert not named(run, "half")
    with pytest.raises(RuntimeError, match="register_step_post_hook"):
        run.take_step()
