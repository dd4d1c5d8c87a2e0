"""What reading their operations says of the zoo: honest models, and wrong ones, of which none is proved."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zoo import REFUSED_CASES, RIGHT_CASES

from benchmarks.proofs import ARCHITECTURES, ELSEWHERE, LISTS, outcome, proved_plainly
from equipoise.gradients.engine import GradientEngine
from equipoise.gradients.provenance import prove

#: Honest, and not proved: why.
UNPROVED = {
    "branches per record": "not traced",
    "packed GRU": "not traced",
    "experts": "not traced",
    "experts with a gate that is cast": "not traced",
    "experts with sorted tokens": "no rule",
    "records sorted by sign": "no rule",
    "compiled": "not traced",
    "compiled by default": "not traced",
    "compiled part": "not traced",
    "compiled in place": "not traced",
    "compiled loss": "not traced",
    "temporal classification": "not traced",
    "a parameter that has to be a probability": "not traced",
    "an error of its own where a result is not finite": "not traced",
    "labels looked up in a table": "not traced",
    "a queue in the loss": "no rule",
    "embedding scaled by frequency": "no rule",
    "embedding bag": "no rule",
    "embedding bag with offsets": "no rule",
    "sparse embedding bag": "no rule",
    "sparse embedding bag with offsets": "no rule",
    "complex numbers": "no rule",
    "bilinear": "no rule",
    "hook of a module": "mixes",  # as plain PyTorch, whose hook meets the whole batch's gradient
}


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.few(24)
@pytest.mark.parametrize("name", RIGHT_CASES)
def test_honest_models_are_proved(name):
    how, proof, why = outcome(dict(LISTS["honest"]())[name])
    assert (proof or how) == UNPROVED.get(name, "proved"), why


@pytest.mark.few(24)
@pytest.mark.parametrize("name", REFUSED_CASES)
def test_no_wrong_model_is_proved(name):
    _, proof, _ = outcome(dict(LISTS["wrong"]())[name])
    assert proof != "proved" or name in ELSEWHERE


def test_nor_is_one_whose_result_follows_the_record_s_place():
    def by_place(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().sum(1) * torch.arange(len(x))

    proof = proved_plainly(nn.Linear(3, 2), by_place, torch.randn(4, 3))
    assert proof.outcome == "no rule"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "graph network"])
def test_models_as_users_bring_them_are_proved(name):
    _, proof, why = outcome(dict(LISTS["architectures"]())[name])
    assert proof == "proved", why


def test_norms_in_chunks_are_proved(monkeypatch):
    monkeypatch.setattr("equipoise.gradients.numerics.CHUNK_ELEMENTS", 50)
    test_honest_models_are_proved("encoder layer")
    test_honest_models_are_proved("tied embedding")


def test_the_operation_that_mixes_is_named():
    def centred(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x - x.mean(0)).square().sum(1)

    fault = proved_plainly(nn.Linear(3, 2), centred, torch.randn(4, 3)).fault
    assert fault.mixes
    assert "aten.sub" in str(fault)


def test_a_sequence_as_long_as_the_batch_is_no_matter():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        out = model(batch["x"])
        positions = torch.linspace(0, 1, out.shape[1])[:, None]
        return F.cross_entropy((out + positions).transpose(1, 2), batch["y"], reduction="none").mean(1)

    batch = {"x": torch.randn(4, 4, 4), "y": torch.randint(2, (4, 4))}
    assert prove(GradientEngine(model, loss, batch, check=False).traced(batch)).outcome == "proved"


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[torch.arange(len(x)).bool().long()],  # numbers that became marks are no places
        lambda x: x[torch.arange(len(x) - 1, -1, -1)],
        lambda x: x.roll(1, 0),
        lambda x: x * (torch.eye(len(x)) @ x),  # zero times the others' values
        lambda x: x + 0 * x.sum(0),
        lambda x: x.sum(0).long() + x,
        lambda x: x[:1] + x,
        lambda x: torch.cat([x[1:], x[:1]]) + x,
        lambda x: x.T.reshape(x.shape) + x,
        lambda x: x + torch.arange(len(x))[:, None],
        lambda x: torch.where(torch.isnan(x).any(), 0 * x, x),
        lambda x: x.new_zeros(x.shape).index_add(0, x[:, 0].long() % len(x), x),
        lambda x: torch.stack([row * number for number, row in enumerate(x)]),
    ],
)
def test_nor_is_any_of_these(change):
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(change(x)).square().sum(1)

    assert proved_plainly(nn.Linear(3, 2), loss, torch.randn(3, 3)).outcome != "proved"


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[torch.arange(len(x))] * 2,
        lambda x: torch.cat([x, -x]).view(2, *x.shape).sum(0),
        lambda x: torch.where(torch.isnan(x), 0 * x, x),
        lambda x: torch.cat([x[:2], x[2:]]) + x,
        lambda x: x.T.reshape(-1).view(x.shape[1], -1).T + x,
        lambda x: torch.stack([row * 2 for row in x]),
        lambda x: x + torch.rand(len(x), 1),
        lambda x: x.flatten().view(-1, x.shape[1]),
    ],
)
def test_these_are(change):
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(change(x)).square().sum(1)

    assert proved_plainly(nn.Linear(3, 2), loss, torch.randn(3, 3)).outcome == "proved"
