"""Audits of what federated methods release of their own: squares for a radius, sums in a subspace."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.audit.neighbours import audit_neighbours
from equipoise.federated.methods.fedpcdp import RoundPCDP, RoundPDP
from equipoise.federated.methods.round_subspace import RoundSubspace
from equipoise.federated.methods.server_radius import ServerRMS
from equipoise.testing.canaries import Rows, canary_loss, public_records
from equipoise.testing.designs import Design
from equipoise.testing.method_audit import audit_method
from reproduction.planted_steps import probe_method


class Asked(ServerRMS):
    """The client's half with the server's query before each round, as `Client` answers it."""

    name = "asked-server-rms"

    def step(self, context, state):
        self.query(context, state)
        return super().step(context, state)


def projecting(kind, canaries, **options):
    source = RoundSubspace(Rows(canaries), canary_loss(), public_records(canaries), dimension=canaries)
    return kind(source, 1.0, **options)


ALL = {"rate": 1.0, "steps": 1}  # every record, in one round of one step
SQUARES = {"canaries": 200_000, "trainings": 1, **ALL}
COLUMNS = {"canaries": 400, "trainings": 100, **ALL}
DESIGNS = {
    "ServerRMS": Design(lambda m: Asked(1.0), **SQUARES),
    "RoundPCDP": Design(lambda m: projecting(RoundPCDP, m), **COLUMNS),
    "RoundPDP": Design(lambda m: projecting(RoundPDP, m), **COLUMNS),
}
EACH = 1 - 0.01 / 60


@pytest.mark.few(1)
@pytest.mark.parametrize("name", DESIGNS)
def test_a_small_audit_holds(name):
    small = replace(DESIGNS[name], canaries=min(2000, DESIGNS[name].canaries), trainings=3)
    found = audit_method(small, 2.0, confidence=EACH)
    assert found.holds
    assert found.certified > 0.2


@pytest.mark.slow
@pytest.mark.parametrize("name", DESIGNS)
def test_bugs_of_a_fifth_are_seen(name):
    found = probe_method(DESIGNS[name], confidence=EACH)
    assert found.holds
    assert found.finds


def problem():
    torch.manual_seed(0)
    return {"x": torch.randn(60, 5) + 1, "y": torch.randn(60)}


def loss(model, batch):
    return 0.5 * (model(batch["x"]).squeeze(1) - batch["y"]).square()


def methods():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    public = {"x": torch.randn(12, 5), "y": torch.randn(12)}
    source = RoundSubspace(model, loss, public, dimension=6)
    return model, {
        "ServerRMS": Asked(1.0),
        "RoundPCDP": RoundPCDP(source, 1.0),
        "RoundPDP": RoundPDP(source, 1.0),
    }


@pytest.mark.parametrize("name", DESIGNS)
def test_neighbours_move_the_releases_by_their_bounds(name):
    """Squares too, which the canaries' certificates leave out."""
    model, made = methods()
    found = audit_neighbours(
        model, loss, problem(), method=made[name], sampling=eq.FullBatch(60, 2), budget=eq.Budget(4.0, 1e-3),
        steps=2, positions=2,
    )  # fmt: skip
    assert found.holds
    assert found.worst_of("add").movement > 0.2
