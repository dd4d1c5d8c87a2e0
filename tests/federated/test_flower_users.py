"""Users whose records stay at Flower's nodes: as in one process, and no row follows another user."""

import itertools
import json

import pytest
import torch
import torch.nn.functional as F
from flat_arguments import arranged
from torch import nn

import equipoise as eq
from equipoise.federated import LocalUpdates
from equipoise.methods.zeroth_order import DPZO
from equipoise.statements.assumptions import Assumption
from equipoise.training.record_source import DataError, NoAnswerError

pytest.importorskip("flwr", reason="needs the extra federated")

from flower_grid import LocalGrid
from flwr.app import ConfigRecord, MetricRecord

from equipoise.federated.flower import FlowerUpdates, NodeUsers, user_app
from equipoise.federated.flower.wire import read_params, to_record, write_request
from equipoise.federated.messages import Request

COUNTS = (10, 8, 6)
USERS, PLACES = sum(COUNTS), 6


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


LOSS = LocalUpdates(cross_entropy, 3, 2, learning_rate=0.5, present="there")


def network(dropout=0.0):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        layers = nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)
        return nn.Sequential(*layers).double()


def network_with_dropout():
    return network(0.5)


def all_users(places=PLACES):
    x = torch.randn(USERS, places, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    there = torch.arange(places)[None] <= (torch.arange(USERS) % places)[:, None]
    return {"x": x, "y": x[..., :3].argmax(-1), "there": there}


class Node:
    """Picklable: the users of a node; `change(items)` may spoil them."""

    def __init__(self, loss=LOSS, counts=COUNTS, data=None, make=network, change=lambda number, items: items):
        self.loss, self.counts, self.data, self.make, self.change = loss, counts, data, make, change

    def __call__(self, context):
        number = context.node_config["partition-id"]
        data = all_users() if self.data is None else self.data
        first = sum(self.counts[:number])
        own = range(first, first + self.counts[number])
        items = [{name: leaf[n] for name, leaf in data.items()} for n in own]
        return NodeUsers(self.make(), self.loss, self.change(number, items))


def over_flower(node=None, counts=COUNTS, **options):
    grid = LocalGrid(user_app(node or Node(counts=counts)), len(counts))
    return grid, FlowerUpdates(grid, counts, **({"wait": 0.0} | options))


PRIVATELY = {"clip_norm": 0.5, "noise_multiplier": 0.5}
METHODS = {
    "fixed": eq.DPSGD(**PRIVATELY),
    "learnt": eq.DPSGD(clip_norm=eq.methods.ReleasedQuantile(0.5), noise_multiplier=0.5),
    "correlated": eq.DPMF(**PRIVATELY, bands=2),
    "two points": eq.DPC4(**PRIVATELY, anchor_noise_multiplier=0.5),
}
SERVERS = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1.0, momentum=0.5),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.05),
}


def begun(loss, data, method="fixed", server="momentum", model=None, **options):
    model = model or network()
    usual = {
        "sampling": eq.Poisson(12, USERS, 4), "method": METHODS.get(method, method), "reproducible": True,
        "microbatch_size": 6, "rows": "update", "owner": torch.arange(USERS),
        "records_per_user": 1,
    }  # fmt: skip
    optimizer = SERVERS[server](model.parameters())
    return eq.PrivateTraining(model, optimizer, **arranged(loss=loss, data=data, **(usual | options)))


def trained(loss, data, *settings, **options):
    training = begun(loss, data, *settings, **options)
    training.run(progress=False)
    return flat(training)


def flat(training):
    return torch.cat([p.detach().flatten() for p in training.model.parameters()])


def close(one, other):
    """Equal but for the rounding of vmap over many users in place of one, in float64."""
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    assert not torch.equal(one, torch.cat([p.detach().flatten() for p in network().parameters()]))


@pytest.mark.parametrize(
    ("method", "server"),
    [("learnt", "adam"), ("correlated", "momentum"), ("two points", "momentum")],
)
def test_the_grid_gives_what_one_process_gives(method, server):
    grid, updates = over_flower()
    found = trained(updates, updates.users, method, server)
    close(found, trained(LOSS, all_users(), method, server))
    assert not any("refusal" in content for _, content in grid.replies)


def test_no_message_to_a_node_follows_users_of_others():
    def sent_to_last(drawn):
        grid, updates = over_flower()
        updates.users.announce(torch.tensor(drawn), 1)
        updates(network(), places_of(updates, drawn[:2]))
        return [content for kind, node, content in grid.sent if (kind, node) == ("train", 102)]

    one, more = sent_to_last([1, 20, 22]), sent_to_last([0, 1, 3, 7, 12, 20, 22])
    assert len(one) == len(more) == 1
    assert one[0]["extras"] == more[0]["extras"]
    assert one[0]["model"] == more[0]["model"]


def places_of(updates, numbers):
    return updates.users._places[numbers]


def rows(updates, numbers, model=None):
    found = eq.per_sample_gradients(model or network(), updates, places_of(updates, numbers))
    return found.materialise().matrix()


class Centred(nn.Module):
    """Of one's own: takes off a mean that it gathers, in a buffer that counts for the result."""

    def __init__(self):
        super().__init__()
        self.inner = network()
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))

    def forward(self, x):
        self.mean = (self.mean + x.detach().mean(0)) / 2
        return self.inner(x - self.mean)


@pytest.mark.parametrize("make", [Centred, network_with_dropout])
def test_a_users_row_follows_no_other_user(make):
    """Who else is asked for, and who else is at the node: added, removed or with other records."""

    def row_of_two(change, asked):
        _, updates = over_flower(Node(make=make, change=change))
        return rows(updates, asked, make())[asked.index(2)]

    def same(number, items):
        return items

    def others(number, items):
        return [*({**one, "x": 3 - one["x"]} for one in items[:2]), items[2]]

    alone = row_of_two(same, [2])
    assert float(alone.norm()) > 0
    for change, asked in itertools.product([same, others], [[0, 1, 2], [2, 0, 12], [23, 2]]):
        assert torch.equal(row_of_two(change, asked), alone)


def test_dropout_has_masks_of_each_user_and_draw():
    """They are those of another message about the same draw, at other parameters too."""
    data = all_users()
    alike = {name: leaf[5:6].expand(leaf.shape) for name, leaf in data.items()}
    everyone, moved = torch.arange(USERS), network()
    with torch.no_grad():
        moved[0].bias.add_(1e-12)

    def found(draw, model=None):
        _, updates = over_flower(Node(data=alike, make=network_with_dropout))
        updates.users.announce(everyone, draw)
        return rows(updates, everyone, model)

    one = found(1)
    assert len(one.norm(dim=1).unique()) == USERS
    assert torch.equal(found(1), one)
    torch.testing.assert_close(found(1, moved), one, rtol=0, atol=1e-9)
    assert float((found(2) - one).norm(dim=1).min()) > 1e-3


def sent_to(grid):
    """(node, user, seed, parameters) of every user asked for."""
    return [
        (node, user, seed, read_params(content["model"])["0.bias"].numpy().tobytes())
        for kind, node, content in grid.sent
        if kind == "train"
        for user, seed in zip(content["extras"]["users"], content["extras"]["seeds"], strict=True)
    ]


def test_both_points_of_a_step_have_the_same_random_numbers():
    grid, updates = over_flower(Node(make=network_with_dropout))
    training = begun(updates, updates.users, DPZO(**PRIVATELY))
    training.take_step()
    points = {}
    for node, user, seed, point in sent_to(grid):
        points.setdefault((node, user, seed), set()).add(point)
    assert {len(found) for found in points.values()} == {2}
    grid.sent.clear()
    training.take_step()
    assert {seed for *_, seed in points}.isdisjoint(seed for _, _, seed, _ in sent_to(grid))


def last_of_second(change):
    """Changes the last user of the second node."""
    return lambda number, items: [*items[:-1], *change(items[-1])] if number == 1 else items


UNUSABLE = {
    "fails": lambda one: [{**one, "y": one["y"] + 100}],
    "not finite": lambda one: [{**one, "x": one["x"] * torch.nan}],
    "missing": lambda one: [],
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_a_user_whose_update_fails_is_left_out_alone(kind, caplog):
    """As one without records, whose update is zero. The reason stays in the node's own log."""

    def ended(change):
        grid, updates = over_flower(Node(change=last_of_second(change)))
        found = trained(updates, updates.users, sampling=eq.FullBatch(USERS, 3))
        assert not any("refusal" in content or "IndexError" in str(content) for _, content in grid.replies)
        return found

    found = ended(UNUSABLE[kind])
    assert torch.equal(found, ended(lambda one: [{**one, "there": torch.zeros(PLACES, dtype=torch.bool)}]))
    assert not torch.equal(found, ended(lambda one: [one]))
    assert "user 7 of this node has no update" in caplog.text or kind == "not finite"


def test_a_node_that_is_lost_in_a_step_books_nothing(tmp_path):
    """The step is taken again when it is there, under another name, and ends where it had ended."""
    node = Node(make=network_with_dropout)
    _, undisturbed = over_flower(node)
    expected = trained(undisturbed, undisturbed.users)
    grid, updates = over_flower(node)
    training = begun(updates, updates.users, folder=tmp_path / "run")
    training.take_step()
    before, spent = flat(training), training.epsilon_so_far()
    grid.away.add(("train", 101))
    with pytest.raises(NoAnswerError, match="no answer of node 1") as error:
        training.take_step()
    assert "costs nothing more" in str(error.value)
    assert (training.steps_done, training.epsilon_so_far()) == (1, spent)
    assert torch.equal(flat(training), before)
    grid.away.clear()
    del grid.contexts[101]
    grid.contexts[207] = grid.context(207, 1)
    training.run(progress=False)
    assert torch.equal(flat(training), expected)
    assert eq.verify_run(tmp_path / "run").consistent


def test_what_a_module_writes_into_a_buffer_ends_with_the_users_update():
    """In the update it counts, from the server's value on; nobody else meets it. As in one process."""
    _, updates = over_flower(Node(make=Centred))
    start = torch.linspace(-1, 1, 4, dtype=torch.float64)
    models = Centred(), Centred()
    for model in models:
        model.mean.copy_(start)
    trainings = begun(LOSS, all_users(), model=models[0]), begun(updates, updates.users, model=models[1])
    for training in trainings:
        training.run(progress=False)
        assert torch.equal(training.model.mean, start)
    mine, theirs = map(flat, trainings)
    close(mine, theirs)
    assert float((mine - trained(LOSS, all_users())).abs().max()) > 0.01


def test_nodes_are_in_the_modes_of_the_server():
    node, model, plain = Node(make=network_with_dropout), network(0.5), rows(over_flower()[1], [5, 7])
    assert not torch.equal(rows(over_flower(node)[1], [5, 7], model), plain)
    for module in (model, model[2]):
        module.eval()
        assert torch.equal(rows(over_flower(node)[1], [5, 7], model), plain)
        model.train()


def test_a_run_that_ended_in_a_step_goes_on(tmp_path):
    """Without a checkpoint: two steps are repeated."""
    node, folder = Node(make=network_with_dropout), tmp_path / "run"
    _, undisturbed = over_flower(node)
    expected = trained(undisturbed, undisturbed.users, "correlated")
    _, updates = over_flower(node)
    training = begun(updates, updates.users, "correlated", folder=folder)
    for _ in range(2):
        training.take_step()
    training.close()
    _, others = over_flower(node)
    model, unit = network(), eq.Users(torch.arange(USERS), records_per_user=1, rows="update")
    optimizer = SERVERS["momentum"](model.parameters())
    again = eq.PrivateTraining.resume(folder, model, optimizer, loss=others, data=others.users, unit=unit)
    again.run(progress=False)
    assert torch.equal(flat(again), expected)
    assert Assumption.OTHER_DATA not in again.statement().assumptions


def test_the_statement_names_what_it_rests_on(tmp_path):
    _, updates = over_flower()
    budget = {"budget": eq.Budget(50.0, 1e-3), "reproducible": False, "folder": tmp_path / "run"}
    method = eq.DPSGD(clip_norm=0.5)
    statement = begun(updates, updates.users, method, **budget).run(progress=False).statement
    assert (statement.guarantee, statement.unit) == ("proven", "user")
    assert statement.users == {"records": 1, "rows": "update"}
    assert {Assumption.ELSEWHERE, Assumption.TRUSTED} <= {*statement.assumptions}
    assert Assumption.SCANNED not in statement.assumptions
    assert eq.verify_run(tmp_path / "run").consistent
    stated = json.loads((tmp_path / "run/statement.json").read_text())
    stated["assumptions"].remove(Assumption.ELSEWHERE)
    (tmp_path / "run/statement.json").write_text(json.dumps(stated))
    assert not eq.verify_run(tmp_path / "run").consistent
    here = begun(LOSS, all_users())
    assert Assumption.ELSEWHERE not in here.statement().assumptions


# ---- nonsense


class Spoilt(LocalGrid):
    """Node 101 answers something else in the steps."""

    spoil = None

    def deliver(self, kind, node, content):
        reply = super().deliver(kind, node, content)
        if self.spoil is not None and (kind, node) == ("train", 101):
            self.spoil(reply.content)
        return reply


def with_params(change):
    def spoil(content):
        params = read_params(content["model"])
        change(params)
        content["model"] = to_record(params)

    return spoil


GARBAGE = {
    "nothing": lambda c: c.clear(),
    "no updates": lambda c: c.pop("model"),
    "no losses": lambda c: c.pop("reports"),
    "bytes": lambda c: setattr(c["model"]["0.bias"], "data", b"nonsense"),
    "a user too few": with_params(lambda p: p.update({n: v[1:] for n, v in p.items()})),
    "another type": with_params(lambda p: p.update({n: v.float() for n, v in p.items()})),
    "a parameter too few": with_params(lambda p: p.pop("0.bias")),
    "a loss too few": lambda c: c.update({"reports": MetricRecord({"losses": [1.0]})}),
    "a loss in words": lambda c: c.update({"reports": ConfigRecord({"losses": "small"})}),
}


def test_an_answer_that_makes_no_sense_ends_the_step():
    for name, spoil in GARBAGE.items():
        grid = Spoilt(user_app(Node()), 3)
        updates = FlowerUpdates(grid, COUNTS, wait=0.0)
        training = begun(updates, updates.users)
        grid.spoil = spoil
        with pytest.raises(NoAnswerError, match="node 1"):
            training.take_step()
        assert (training.steps_done, training.epsilon_so_far()) == (0, 0.0), name


def asked(change=lambda c: None):
    params = {name: p.detach() for name, p in network().named_parameters()}
    content = write_request(Request(1, params, {"users": [0, 2], "seeds": [5, 6], "training": [True] * 5}))
    change(content)
    return content


REQUESTS = {
    "no users": lambda c: c["extras"].pop("users"),
    "users in words": lambda c: c["extras"].update({"users": "all"}),
    "a user below zero": lambda c: c["extras"].update({"users": [0, -1]}),
    "a seed too few": lambda c: c["extras"].update({"seeds": [5]}),
    "no modes": lambda c: c["extras"].pop("training"),
    "a module too few": lambda c: c["extras"].update({"training": [True] * 4}),
    "nobody": lambda c: c["extras"].update({"users": [], "seeds": []}),
    "another model": lambda c: c["model"].pop("0.bias"),
}


def test_a_request_that_makes_no_sense_is_refused():
    grid, _ = over_flower()
    fine = grid.deliver("train", 100, asked())
    assert sorted(fine.content) == ["model", "reports"]
    assert all(len(value) == 2 for value in read_params(fine.content["model"]).values())
    assert not fine.content["reports"].keys() - {"losses"}
    for name, change in REQUESTS.items():
        reply = grid.deliver("train", 100, asked(change))
        assert reply.content["refusal"]["reason"].startswith("Refused:"), name


def test_what_cannot_work_is_named(caplog):
    for users in ([], [3, 0], [2.5], 10, torch.tensor([3]), {0: 3}, None):
        with pytest.raises(ValueError, match="give how many users each node has"):
            FlowerUpdates(LocalGrid(user_app(Node()), 1), users)
    _, updates = over_flower()
    frozen = network()
    frozen[0].bias.requires_grad_(False)
    _, others = over_flower(Node(make=lambda: nn.Sequential(nn.Linear(4, 3)).double()))

    def torn(context):
        raise OSError("record 17 of patient Smith is torn")

    _, unread = over_flower(torn)
    for data, loss, options, error, said in (
        (all_users(), updates, {}, DataError, r"give data=updates\.users"),
        (updates.users, updates, {"model": network().bfloat16()}, DataError, r"'0\.weight'.* is bfloat16"),
        (others.users, others, {}, NoAnswerError, "build the same model at the server and at every node"),
        (updates.users, updates, {"model": frozen}, NoAnswerError, "with the same parameters trainable"),
        (unread.users, unread, {}, NoAnswerError, r"node \d gives no updates: 'the client((?!Smith).)*$"),
        (updates.users, updates, {"augmentation": lambda batch, _: batch}, ValueError, "augment in the loss"),
    ):
        with pytest.raises(error, match=said):
            begun(loss, data, **options)
    assert "Smith" in caplog.text
    with pytest.raises(TypeError, match="give a list with an item of records for each user"):
        NodeUsers(network(), LOSS, all_users())
