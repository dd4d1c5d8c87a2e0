"""Updates of users as gradient rows: user-level federated learning is a private training like any other."""

import copy

import pytest
import torch
import torch.nn.functional as F
from flat_arguments import arranged
from torch import nn

import equipoise as eq
from equipoise.audit.neighbours import CHANGES, audit_neighbours
from equipoise.federated import LocalUpdates
from equipoise.gradients import GradientEngine
from equipoise.gradients.checks.errors import CrossRecordError
from equipoise.training.record_source import DataError

PLACES = 6


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def network(dropout=0.0):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))


def users(count, places=PLACES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, places, 4, generator=generator)
    return {"x": x, "y": (x[..., :3]).argmax(-1)}


def with_some_absent(count):
    data = users(count)
    there = torch.arange(count) % (PLACES + 1)
    data["there"] = torch.arange(PLACES)[None] < there[:, None]
    return data


def update_by_an_optimizer(model, data, user, steps, batch_size, rate):
    """What torch's own SGD does to a copy of the model on the records of one user."""
    local = copy.deepcopy(model)
    optimizer = torch.optim.SGD(local.parameters(), lr=rate)
    there = data.get("there", torch.ones(len(data["x"]), PLACES, dtype=torch.bool))[user]
    cuts = [slice(i, i + batch_size) for i in range(0, PLACES, batch_size)]
    for step in range(steps):
        cut = cuts[step % len(cuts)]
        batch = {name: data[name][user][cut][there[cut]] for name in ("x", "y")}
        optimizer.zero_grad()
        if len(batch["y"]):
            cross_entropy(local, batch).mean().backward()
        optimizer.step()
    return torch.cat(
        [(p - q).detach().flatten() for p, q in zip(model.parameters(), local.parameters(), strict=True)]
    )


@pytest.mark.parametrize(
    ("steps", "batch_size", "present"),
    [(1, 2, None), (2, PLACES, None), (5, 4, None), (1, PLACES, "there"), (2, 4, "there"), (5, 2, "there")],
)
def test_rows_are_the_updates_of_local_training(steps, batch_size, present):
    model = network().double()
    data = with_some_absent(7) if present else users(7)
    data["x"] = data["x"].double()
    loss = LocalUpdates(cross_entropy, steps, batch_size, learning_rate=0.3, present=present)
    rows = GradientEngine(model, loss, data)(data).materialise().matrix()
    expected = [update_by_an_optimizer(model, data, user, steps, batch_size, 0.3) for user in range(7)]
    torch.testing.assert_close(rows, torch.stack(expected), rtol=1e-9, atol=1e-12)


SERVERS = {
    "usual": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1.0, momentum=0.5),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.05),
}


def trained(loss, data, server=SERVERS["usual"], **options):
    model = network()
    usual = {
        "sampling": eq.Poisson(expected_batch_size=20, population=120, steps=6),
        "method": eq.DPSGD(clip_norm=0.5, noise_multiplier=1.0), "reproducible": True, "microbatch_size": 16,
    }  # fmt: skip
    options = arranged(loss=loss, data=data, **(usual | options))
    eq.PrivateTraining(model, server(model.parameters()), **options).run(progress=False)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_one_step_on_one_record_at_rate_one_is_dp_sgd_bit_for_bit():
    data = users(120, places=1)
    alone = {name: values[:, 0] for name, values in data.items()}
    assert torch.equal(trained(LocalUpdates(cross_entropy), data), trained(cross_entropy, alone))


@pytest.mark.parametrize("filler", [7.0, float("nan")])
def test_absent_records_count_nothing(filler):
    data = with_some_absent(120)
    if filler != filler:
        loss = LocalUpdates(cross_entropy, present="there")
        holed = data | {"x": data["x"].where(data["there"][..., None], filler)}
        assert torch.equal(loss(network(), holed), loss(network(), data))
        return
    others = {name: values.clone() for name, values in data.items()}
    others["x"][~others["there"]] = filler
    loss = LocalUpdates(cross_entropy, steps=4, batch_size=2, learning_rate=0.3, present="there")
    assert torch.equal(trained(loss, data), trained(loss, others))
    assert not torch.equal(trained(loss, data), trained(loss, data | {"x": data["x"] + 1}))


def test_arguments_out_of_range():
    for wrong in ({"steps": 0}, {"batch_size": 0}, {"learning_rate": 0.0}):
        ((name, value),) = wrong.items()
        with pytest.raises(ValueError, match=f"{name}={value}"):
            LocalUpdates(cross_entropy, **wrong)


def test_what_a_batch_lacks_is_said_when_a_training_begins():
    with pytest.raises(DataError, match=r"^present='ther' is no key of the batch; name the tensor"):
        over_users(loss=LocalUpdates(cross_entropy, present="ther"))
    data = users(20)
    with pytest.raises(DataError, match=r"^the batch needs tensors"):
        over_users(
            data=data | {"y": data["y"][:, 0]}, loss=LocalUpdates(lambda model, batch: batch["x"][:, 0])
        )


METHODS = {
    "fixed": eq.DPSGD(clip_norm=0.5, noise_multiplier=0.5),
    "learnt": eq.DPSGD(clip_norm=eq.methods.ReleasedQuantile(0.5), noise_multiplier=0.5),
    "correlated": eq.DPMF(clip_norm=0.5, noise_multiplier=0.5, bands=2),
    "error feedback": eq.DiceSGD(clip_norm=0.5, noise_multiplier=0.5),
}


@pytest.mark.parametrize(("method", "server"), [("correlated", "momentum"), ("error feedback", "adam")])
def test_methods_and_servers_learn(method, server):
    data, loss = with_some_absent(120), LocalUpdates(cross_entropy, 3, 2, learning_rate=0.5, present="there")
    options = {"sampling": eq.Poisson(60, 120, 12), "method": METHODS[method], "server": SERVERS[server]}
    model = network()
    torch.nn.utils.vector_to_parameters(trained(loss, data, **options), model.parameters())
    right = (model(data["x"]).argmax(-1) == data["y"])[data["there"]].float().mean()
    assert right > 0.6  # a third by chance


@pytest.mark.parametrize(
    ("method", "steps", "dropout"),
    [
        ("fixed", 3, 0.0),
        ("correlated", 3, 0.5),
        pytest.param("fixed", 1, 0.5, marks=pytest.mark.slow),
        pytest.param("learnt", 3, 0.0, marks=pytest.mark.slow),
    ],
)
def test_one_user_moves_the_sum_by_the_bound_and_nobody_else_moves(method, steps, dropout):
    """A user enters, leaves or is replaced, with all records; those at most places are ten times as large."""
    found = audit_neighbours(
        network(dropout),
        LocalUpdates(cross_entropy, steps, 2, learning_rate=0.5, present="there"),
        eq.Data(with_some_absent(24), microbatch_size=16),
        sampling=eq.Poisson(12, 24, 2),
        method=METHODS[method],
        positions=2,
        steps=2 if method == "correlated" else 1,
    )
    assert found.holds
    assert sorted({pair.change for pair in found.pairs}) == sorted(CHANGES)
    assert found.worst_of("silent").movement < 1e-5
    assert 0.9 < found.worst_of("add").movement < 1 + 1e-5


def test_users_who_are_mixed_are_refused():
    """It had ended with an error of vmap, since the modules see one user at a time."""

    def mixing(model, batch):
        return LocalUpdates(cross_entropy, 2, 2, 0.5)(model, batch | {"x": batch["x"] - batch["x"].mean(0)})

    with pytest.raises(CrossRecordError, match=r"test_local_updates\.py, line"):
        trained(mixing, users(120))


def test_dropout_has_masks_of_each_user_and_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.Linear(32, 3))
    same = users(1)
    data = {name: values.expand(60, *values.shape[1:]).clone() for name, values in same.items()}
    rows = GradientEngine(model, LocalUpdates(cross_entropy, 2, 3, 0.5), data)(data).materialise().matrix()
    assert len(rows.norm(dim=1).unique()) > 50


def over_users(count=20, owner=None, **options):
    model = network()
    usual = {
        "method": eq.DPSGD(clip_norm=0.5, noise_multiplier=2.0), "budget": eq.Budget(50.0, 1e-3),
        "data": users(count), "loss": LocalUpdates(cross_entropy, 2, 3, learning_rate=0.1),
        "sampling": eq.Poisson(10, count, 3), "unit": "user", "rows": "update", "records_per_user": 1,
        "owner": torch.arange(count) if owner is None else owner,
    }  # fmt: skip
    return eq.PrivateTraining(model, SERVERS["momentum"](model.parameters()), **arranged(**(usual | options)))


def test_the_statement_says_that_a_row_is_a_users_update(tmp_path):
    """All records of a user are used, as one update: none is chosen, none is clipped by itself."""
    run = over_users(folder=tmp_path / "run")
    described = str(run.describe())
    statement = run.run(progress=False).statement
    text = " ".join(str(statement).split())
    assert "Each item of the data is all of one user, and its row is clipped as a whole." in text
    assert "chosen by secret randomness" not in text
    assert "adding or removing one user" in text
    assert statement.users == {"records": 1, "rows": "update"}
    assert "10 users expected per step" in described
    assert "(add-or-remove-one of users)" in described
    assert eq.verify_run(tmp_path / "run").consistent


def test_an_item_is_all_of_a_user():
    with pytest.raises(DataError, match=r"names some users twice.*put all records of a user"):
        over_users(owner=torch.arange(20) // 2)
    with pytest.raises(ValueError, match="records_per_user=6 with rows='update'"):
        over_users(records_per_user=6)
