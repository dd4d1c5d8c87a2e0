"""What a run saves and no step moves is what it was at the start, and no noise outlives the key."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from small_problems import CLASSES, FEATURES, records, resumed, saved, training
from torch import nn

import equipoise as eq
from equipoise.statements.assumptions import HOOKED

# ---- buffers and frozen parameters


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
    ("norm.running_var", lambda model: model.norm.running_var.data.mul_(2), eq.PrivateTraining.finish),
    ("frozen.weight", lambda model: model.frozen.weight.data.add_(1), eq.PrivateTraining.save_checkpoint),
    ("frozen.bias", lambda model: nn.init.ones_(model.frozen.bias), eq.PrivateTraining.take_step),
    ("scale", lambda model: setattr(model, "scale", model.scale * 1.5), evaluated),
    ("extra_state", lambda model: setattr(model, "seen", 41.5), eq.PrivateTraining.finish),
]


@pytest.mark.parametrize(("what", "change", "then"), CHANGES)
def test_what_no_step_moves_is_saved_as_it_was(tmp_path, what, change, then):
    """The mean of the training records left in `model.safetensors` under "proven"."""
    run = training(Scaled(), folder=tmp_path / "run")
    run.take_step()
    change(run.model)
    spent = run.ledger.releases_left
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"{what}.*PrivateTraining\.resume"):
            then(run)
    assert run.ledger.releases_left == spent
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_a_stale_gradient_of_a_frozen_parameter_goes_nowhere(tmp_path):
    """An optimiser that holds the parameter adds the gradient that a loss left on it before it was frozen."""
    model = Scaled()
    model.frozen.weight.grad = torch.ones(FEATURES, FEATURES)
    run = training(model, folder=tmp_path / "run")
    run.take_step()
    with pytest.raises(RuntimeError, match=r"frozen\.weight"):
        run.save_checkpoint()


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

    def follow(self, *_):
        with torch.no_grad():
            for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                own.lerp_(other, 0.5)

    def follow_by_data(self, *_):
        for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            own.data.mul_(0.5).add_(other.data, alpha=0.5)


@pytest.mark.parametrize(
    ("all_given", "follow"),
    [(False, WithTeacher.follow), (True, WithTeacher.follow), (False, WithTeacher.follow_by_data)],
)
def test_a_hook_of_the_step_moves_frozen_parameters_and_is_named(tmp_path, all_given, follow):
    """Given to the optimizer or not: it moves none that has no gradient. Writes to `.data` leave no mark."""
    model = WithTeacher()
    optimizer = torch.optim.SGD((model if all_given else model.student).parameters(), lr=0.3)
    optimizer.register_step_post_hook(partial(follow, model))
    run = training(model, optimizer=lambda *_, lr: optimizer, steps=4, folder=tmp_path / "run")
    run.take_step()
    named = HOOKED + "teacher.bias, teacher.weight"
    assert named in run.statement().assumptions
    run.save_checkpoint()
    run.take_step()
    follow(model)  # not by a step
    with pytest.raises(RuntimeError, match=r"teacher.*register_step_post_hook"):
        run.take_step()
    run.close()
    model = WithTeacher()
    optimizer = torch.optim.SGD((model if all_given else model.student).parameters(), lr=0.3)
    optimizer.register_step_post_hook(partial(follow, model))
    again = resumed(tmp_path / "run", model, lambda *_, lr: optimizer)
    assert named in again.run(progress=False).statement.assumptions
    assert eq.verify_run(tmp_path / "run").consistent


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_buffer_trains_if_it_need_not_be_saved(tmp_path):
    class Graph(nn.Module):
        def __init__(self, persistent) -> None:
            super().__init__()
            self.head = nn.Linear(FEATURES, CLASSES)
            self.register_buffer("graph", torch.eye(FEATURES).to_sparse(), persistent=persistent)

        def forward(self, x):
            return self.head(torch.sparse.mm(self.graph, x.T).T)

    with pytest.raises(ValueError, match=r"graph.*persistent=False"):
        training(Graph(persistent=True))
    run = training(Graph(persistent=False), steps=2, folder=tmp_path / "run")
    run.take_step()
    run.save_checkpoint()
    run.take_step()
    run.finish()
