"""Stages: which parameters a step trains, clips and noises; the others do not move."""

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.methods import ReleasedQuantile

TWO = [eq.Stage(0, "head.*"), eq.Stage(2, "head.weight", "body.*")]
DATA = {
    "x": torch.randn(40, 3, generator=torch.Generator().manual_seed(1)),
    "y": torch.randn(40, generator=torch.Generator().manual_seed(2)),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.body(x).tanh()).squeeze(1)


def loss(model, batch):
    return (model(batch["x"]) - batch["y"]).square()


def arguments():
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return (model, optimizer), {"loss": loss, "data": DATA}


def training(stages=TWO, method=None, folder=None, **options):
    given, named = arguments()
    method = method or eq.DPSGD(clip_norm=0.7, noise_multiplier=1e-7)
    options = {"sampling": eq.FullBatch(40, 4), "run": eq.Run(folder, seed=3, reproducible=True)} | options
    return eq.PrivateTraining(*given, **named, method=method, stages=stages, **options)


def test_each_stage_clips_and_moves_its_parameters_alone():
    run = training()
    model, optimizer = arguments()[0]
    for step in range(4):
        names = ["head.weight", "head.bias"] if step < 2 else ["body.weight", "body.bias", "head.weight"]
        rows = []
        for i in range(40):
            gradients = torch.autograd.grad(
                loss(model, {key: value[i : i + 1] for key, value in DATA.items()}).sum(),
                [model.get_parameter(name) for name in names],
            )
            norm = torch.stack([g.norm() for g in gradients]).norm()
            rows.append([g * min(1.0, 0.7 / float(norm)) for g in gradients])
        for name, parts in zip(names, zip(*rows, strict=True), strict=True):
            model.get_parameter(name).grad = torch.stack(parts).sum(0) / 40
        optimizer.step()
        optimizer.zero_grad()
        run.take_step()
        for (name, here), there in zip(run.model.named_parameters(), model.parameters(), strict=True):
            assert torch.allclose(here, there, atol=1e-5), (step, name)
    assert run.epsilon_so_far() == training([]).statement().epsilon


@pytest.mark.parametrize("kill", [1, 3])
@pytest.mark.parametrize(
    "method",
    [
        eq.DPSGD(clip_norm=ReleasedQuantile(initial=0.1), noise_multiplier=1.0),
        eq.methods.Doppler(clip_norm=1.0, noise_multiplier=1.0),
    ],
)
def test_resumed_is_uninterrupted(tmp_path, kill, method):
    whole = training(method=method, folder=tmp_path / "whole", sampling=eq.Poisson(10, 40, 4))
    whole.run(progress=False)
    cut = training(method=method, folder=tmp_path / "cut", sampling=eq.Poisson(10, 40, 4))
    for _ in range(kill):
        cut.take_step()
    cut.save_checkpoint()
    if kill < 3:
        cut.take_step()  # lost, and repeated with its noise
    cut.close()
    given, named = arguments()
    again = eq.PrivateTraining.resume(tmp_path / "cut", *given, **named)
    again.run(progress=False)
    for one, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert eq.verify_run(tmp_path / "cut").consistent


REFUSED = [
    ([eq.Stage(1, "*")], {}, "the first begins after 0"),
    ([eq.Stage(0, "hed.*")], {}, "matches no trainable parameter"),
    ([eq.Stage(0, "head.*")], {}, "no stage trains body"),
    ([eq.Stage(0, "*"), eq.Stage(4, "head.*")], {}, "4 are planned"),
    (TWO, {"method": eq.DPMF(clip_norm=1.0, noise_multiplier=1.0, bands=2)}, "from step to step"),
    (TWO, {"method": eq.DiceSGD(noise_multiplier=1.0)}, "remembers"),
]


@pytest.mark.parametrize(("stages", "options", "why"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_staged_is_refused(stages, options, why):
    with pytest.raises((ValueError, TypeError), match=why):
        training(stages, **options)
