"""What reading their operations says of the zoo: honest models, and wrong ones, of which none is proved."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zoo import REFUSED_CASES, RIGHT_CASES, UNPROVED, Net

from benchmarks.proofs import ARCHITECTURES, ELSEWHERE, LISTS, outcome
from equipoise.gradients import CrossRecordError
from equipoise.gradients.capture.random_numbers import GlobalState
from equipoise.gradients.engine import GradientEngine
from equipoise.gradients.engine_inputs import evaluate_loss, record_leaves, replace_leaves
from equipoise.gradients.provenance import Fault, Kind, Public, not_a_sum, not_by_record, read
from equipoise.gradients.trace import line_of, why_untraced

BLOCKS = ["numerics.CHUNK_ELEMENTS", "factors.outer.CHUNK_ELEMENTS", "factors.pair_products.CHUNK_ELEMENTS"]
BLOCKS += [f"factors.convolution.{name}_ELEMENTS" for name in ("ROWS", "UNFOLDED")]


def plainly(model, loss, batch) -> Fault | str | None:
    """Why losses and gradients of plain PyTorch are not proved; it takes models that the engine refuses."""
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    records = {f"record:{number}": leaf for number, leaf in enumerate(record_leaves(batch))}

    def gradients(given):
        own = {n: given[n].detach().requires_grad_(p.requires_grad) for n, p in parameters.items()}
        copies = {name: given[name].clone() for name in buffers}
        leaves = [given[name] for name in records]
        losses = evaluate_loss(model, loss, replace_leaves(batch, leaves), own | copies)
        own = {name: p for name, p in own.items() if p.requires_grad}
        found = torch.autograd.grad(losses.sum(), list(own.values()), materialize_grads=True)
        return {"losses": losses.detach(), **dict(zip(own, found, strict=True))}

    state = GlobalState()
    try:
        held = {name: p.detach() for name, p in parameters.items()} | buffers
        line, _ = line_of(gradients, held | records)
    except Exception as error:
        return why_untraced(error)
    if {"NumPy", "Python"}.intersection(state.moved()):
        return "it asks for random numbers that a trace does not show"
    known: dict[str, Kind] = dict.fromkeys(held, Public())
    kinds = read(line, known, len(next(iter(records.values()))))
    losses = not_by_record(kinds.pop("losses"), "the losses")
    faults = [losses, *(not_a_sum(kind, name) for name, kind in kinds.items())]
    found = [fault for fault in faults if fault is not None]
    return next((fault for fault in found if fault.mixes), next(iter(found), None))


def of_changed(change):
    """Why a layer behind such a change of its inputs is not proved."""
    return plainly(
        nn.Linear(3, 2), lambda model, x: model(change(x)).square().flatten(1).sum(1), torch.randn(3, 3)
    )


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.few(18)
@pytest.mark.parametrize("name", RIGHT_CASES)
def test_honest_models_are_proved(name):
    found = outcome(dict(LISTS["honest"]())[name])
    assert found.proved == UNPROVED.get(name, "proved"), found.reason


@pytest.mark.few(8)
@pytest.mark.parametrize("elements", [1, 200])
@pytest.mark.parametrize("name", RIGHT_CASES)
def test_so_they_are_in_blocks_of_few_records(name, elements, monkeypatch):
    """As for large layers: of one record, or as many as memory holds and a smaller rest."""
    for constant in BLOCKS:
        monkeypatch.setattr(f"equipoise.gradients.{constant}", elements)
    test_honest_models_are_proved(name)


@pytest.mark.few(16)
@pytest.mark.parametrize("name", REFUSED_CASES)
def test_no_wrong_model_is_proved(name):
    make = dict(LISTS["wrong"]())[name]
    found = outcome(make)
    if name == "complex parameters":  # are refused for their type, and mix nothing
        return
    assert found.proved != "proved" or name in ELSEWHERE
    if found.traced == "refused" and "scripted" not in found.reason:  # TorchScript hides parameters
        assert plainly(*make()) is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "graph network"])
def test_models_as_users_bring_them_are_proved(name):
    found = outcome(dict(LISTS["architectures"]())[name])
    assert (found.proved, found.bits) == ("proved", "yes"), found.reason


@pytest.mark.slow
@pytest.mark.parametrize("title", ["ways", "command line"])
def test_ways_to_run_and_models_of_the_command_line_are_proved(title):
    pytest.importorskip("peft", reason="needs the extra hf")
    found = {name: outcome(make) for name, make in LISTS[title]()}
    missing = {name for name, row in found.items() if (row.proved, row.bits) != ("proved", "yes")}
    assert not missing


@pytest.mark.few(4)
@pytest.mark.parametrize("shape", [(1024,), (513,), (8, 700), (520, 3)])
@pytest.mark.parametrize("records_first", [True, False])
def test_so_are_narrow_layers_of_many_records_and_positions(shape, records_first):
    """Their products are added up in pieces of whole records, or of one."""
    model = nn.Linear(8, 4)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = model(x) if records_first else model(x.transpose(0, -2).contiguous()).transpose(0, -2)
        return out.square().flatten(1).sum(1)

    engine = GradientEngine(model, loss, torch.randn(4, *shape[1:], 8), check=False)
    assert str(engine.check(torch.randn(*shape, 8))).startswith("proved")


@pytest.mark.parametrize("shape", [(), (40,), (5, 9)])
def test_so_are_cross_entropies_of_many_logits(shape, monkeypatch):
    """Which are taken in parts, but never of a part of the records."""
    monkeypatch.setattr("equipoise.gradients.capture.compositions.SMALL_LOGITS", 1)
    model = nn.Linear(4, 6)

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        losses = F.cross_entropy(model(batch[0]).movedim(-1, 1), batch[1], reduction="none")
        return losses.reshape(len(losses), -1).sum(1)

    def records(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(count, *shape, 4), torch.randint(6, (count, *shape))

    engine = GradientEngine(model, loss, records(4), check=False)
    assert str(engine.check(records(32))).startswith("proved")


def test_a_density_of_records_is_proved():
    """Rows of its scale are computed record by record; a part of them is the same for all records."""

    def forward(self, x):
        law = torch.distributions.MultivariateNormal
        return law(self.mean, scale_tril=self.scale.tril(), validate_args=False).log_prob(x)

    model = Net(forward, mean=nn.Parameter(torch.zeros(3)), scale=nn.Parameter(torch.eye(3)))
    engine = GradientEngine(model, lambda model, x: -model(x), torch.randn(4, 3), check=False)
    assert str(engine.check(torch.randn(12, 3))).startswith("proved")


@pytest.mark.parametrize(
    "change",
    [
        lambda x, same: torch.stack([same[0].tril(), same[1].tril(), same[2].triu()]),
        lambda x, same: torch.stack([torch.full((3, 3), number) for number in (0.0, 1.0, 1.0)]),
        lambda x, same: torch.stack([row.expand(3, 3) for row in torch.eye(3)]),
    ],
)
def test_public_parts_that_differ_are_not_taken_for_alike(change):
    def beside(change):
        return of_changed(lambda x: x[:, None] + change(x, torch.ones(len(x), 3, 3)))

    assert beside(change) is not None
    assert beside(lambda x, same: torch.stack([same[at].tril() for at in range(3)])) is None


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
        lambda x: torch.cat([x[:1], 2 * x[1:]]),
        lambda x: torch.cat([x.split([1, 2])[0], 2 * x.split([1, 2])[1]]),
        lambda x: x.slice_scatter(x[:1].cos(), 0, 0, 1),
        lambda x: x[:2].sum(0) - x[:2].sum(0) + x,
        lambda x: x.sort(0)[0],
        lambda x: x.new_zeros(x.shape).index_add(0, x[:, 0].long() % len(x), x),
        lambda x: torch.stack([row * number for number, row in enumerate(x)]),
        lambda x: x * x.t().index_put((torch.arange(len(x)),) * 2, x[0] * 0).cos().sum(1, keepdim=True),
        lambda x: x * x.t().index_put((torch.arange(3),) * 2, torch.zeros(3)).cos().sum(1, keepdim=True),
        # How many numbers a record takes follows its values, and shifts those of the next.
        lambda x: torch.stack([torch.poisson(row.abs()) for row in x]),
    ],
)
def test_nor_is_any_of_these(change):
    assert of_changed(change) is not None


MATRIX = 2 * torch.eye(3) + torch.arange(9.0).view(3, 3) / 20


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[torch.arange(len(x))] * 2,
        lambda x: torch.cat([x, -x]).view(2, *x.shape).sum(0),
        lambda x: torch.where(torch.isnan(x), 0 * x, x),
        lambda x: x.T.reshape(-1).view(x.shape[1], -1).T + x,
        lambda x: torch.stack([row * 2 for row in x]),
        lambda x: x + torch.rand(len(x), 1),
        lambda x: x.flatten().view(-1, x.shape[1]),
        lambda x: torch.linalg.solve(MATRIX, x.T).T,
        lambda x: torch.linalg.solve(MATRIX, x, left=False),
        lambda x: torch.linalg.solve_triangular(MATRIX.tril(), x.T, upper=False).T,
        lambda x: torch.linalg.solve_triangular(MATRIX.tril(), x, upper=False, left=False),
        lambda x: torch.linalg.solve_triangular(MATRIX.expand(2, 3, 3).triu(), x.T, upper=True).sum(0).T,
        lambda x: torch.cholesky_solve(x.T, MATRIX.tril()).T,
        lambda x: torch.linalg.lu_solve(*torch.linalg.lu_factor(MATRIX), x.T).T,
    ],
)
def test_these_are(change):
    assert of_changed(change) is None


def graph_offsets(x: torch.Tensor, shift: int = 0) -> torch.Tensor:
    """Edges within a record of three nodes; with a shift, from the record behind it."""
    nodes = x[:, :, None].flatten(0, 1)
    places = 3 * torch.arange(len(x))[:, None]
    source, target = ((torch.tensor(ends) + places).flatten() for ends in ([0, 1, 2], [1, 2, 0]))
    return x + torch.zeros_like(nodes).index_add(0, target, nodes[(source + shift) % len(nodes)]).view_as(x)


def back(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(x) - 1, -1, -1)


ORDERS = {
    "index": (lambda x: x[back(x)].cos()[back(x).argsort()], lambda x: x[back(x)] - x),
    "select": (
        lambda x: x.index_select(0, back(x)).index_select(0, back(x)),
        lambda x: x.index_select(0, (torch.arange(len(x)) + 1).clamp(max=len(x) - 1)) - x,
    ),
    "gather": (
        lambda x: x.gather(0, back(x)[:, None].expand_as(x)).flip(1).gather(0, back(x)[:, None].expand_as(x)),
        lambda x: x.gather(0, back(x)[:, None].expand_as(x)) + x,
    ),
    "look-up": (
        lambda x: F.embedding(back(x), F.embedding(back(x), x)),
        lambda x: F.embedding(back(x), x) * x,
    ),
    "put back": (
        lambda x: torch.zeros_like(x).index_put((back(x),), x[back(x)]),
        lambda x: torch.zeros_like(x).index_put((back(x),), x),
    ),
    "edges": (graph_offsets, lambda x: graph_offsets(x, 3)),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", ORDERS)
def test_orders_are_compared_since_they_may_be_undone(name):
    def losses_of(change):
        return lambda model, x: model(change(x)).square().sum(1)

    honest, wrong = map(losses_of, ORDERS[name])
    x = torch.randn(12, 3)
    engine = GradientEngine(nn.Linear(3, 2), honest, x[:4], check=False)
    assert "compared" in str(engine.check(x))
    assert engine.trials.proof(x[:4]).outcome == "no rule"
    with pytest.raises(CrossRecordError, match=r"one record|next to other records"):  # found by values
        GradientEngine(nn.Linear(3, 2), wrong, x[:4], check=False).check(x)
