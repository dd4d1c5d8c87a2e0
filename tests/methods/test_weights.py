"""Weights of records: they multiply what the clip left, and the bound stays what it is."""

from __future__ import annotations

import pytest
import torch
from flat_arguments import arranged
from table import EXAMPLES, RECORDS, loss, network, records

import equipoise as eq
from equipoise.audit.neighbours import audit_neighbours
from equipoise.gradients import DenseGradients
from equipoise.methods import Abadi
from equipoise.privacy import PrivateRows, Secrets, clip
from equipoise.privacy.bounds import clipping
from equipoise.privacy.private import unwrap
from equipoise.statements.assumptions import Assumption
from equipoise.training.record_source import DataError, RecordSource

#: Whose sums are not those of clipped rows; of the others each has to keep the laws below.
OWN_SUMS = (
    "adaclip", "biased-gep", "clip-sgd", "dp-zo", "ef-sgd", "fitted-rate", "gep", "joint-whitening",
    "pcdp-sgd", "pdp", "public", "rpdp", "sgd",
)  # fmt: skip
TAKEN = [name for name in EXAMPLES if EXAMPLES[name]().takes_weights]
OF_EACH = [*{EXAMPLES[name]().name: name for name in TAKEN}.values()]
HALF = torch.linspace(0, 1, RECORDS)


def trained(weights=None, method=None, data=None, unit="record", steps=2):
    data = records(scale=3.0) if data is None else data
    model = network()
    training = eq.PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5),
        loss=loss,
        data=eq.Data(data, weights=weights),
        sampling=eq.Poisson(20, RECORDS, steps),
        budget=eq.Budget(8.0, 1e-3),
        method=method or eq.DPSGD(clip_norm=0.5),
        unit=unit,
        run=eq.Run(reproducible=True, seed=0),
    )
    training.run(progress=False)
    return torch.cat([p.detach().flatten() for p in model.parameters()]), training


def rows_of(count=6, columns=4, weights=None):
    rng = torch.Generator().manual_seed(0)
    some = torch.randn(count, columns, generator=rng, dtype=torch.float64) * 3
    return PrivateRows(DenseGradients({"a": some[:, :1], "b": some[:, 1:]}), weights=weights)


@pytest.mark.parametrize("groups", [None, [["a"], ["b"]]])
def test_the_sum_is_that_of_the_clipped_rows_times_their_weights(groups):
    weights = torch.tensor([1.0, 0.5, 0.0, 0.25, 1.0, 0.125], dtype=torch.float64)
    found = clip(rows_of(weights=weights), Abadi(), 1.0, groups)
    alone = [clip(rows_of().rows(torch.tensor([i])), Abadi(), 1.0, groups) for i in range(len(weights))]
    for name, value in found.value.items():
        wanted = sum(w * unwrap(one.value[name]) for w, one in zip(weights, alone, strict=True))
        assert torch.allclose(unwrap(value), wanted, atol=1e-15)
    assert (found.add_remove, found.replace) == pytest.approx((1.0, 2.0))


@pytest.mark.parametrize("weight", [7.0, -7.0, float("nan"), float("inf")])
def test_no_weight_carries_a_row_beyond_its_bound(weight):
    some = torch.tensor([[torch.inf, 0.0], [3.0, 4.0], [0.3, 0.4]])
    rows = PrivateRows(DenseGradients({"a": some}), weights=torch.tensor([1.0, 0.5, 0.25]))
    left = unwrap(clip(rows, Abadi(), 1.0).value["a"])  # what is not finite is left out with its weight
    assert torch.allclose(left, torch.tensor([0.3 + 0.075, 0.4 + 0.1]))
    found = clip(rows_of(1, weights=torch.tensor([weight])), Abadi(), 1.0)
    assert torch.cat([unwrap(one) for one in found.value.values()]).norm() <= 1 + 1e-6


@pytest.mark.few(5)
@pytest.mark.parametrize("name", OF_EACH)
def test_weights_of_one_change_no_bit_and_others_no_epsilon(name):
    make = EXAMPLES[name]
    plain, _ = trained(method=make())
    ones, training = trained(torch.ones(RECORDS), make())
    assert torch.equal(plain, ones)
    assert Assumption.WEIGHTED in training.statement().assumptions
    half, other = trained(HALF, make())
    assert not torch.equal(plain, half)
    assert other.statement().epsilon == training.statement().epsilon


def test_a_record_of_weight_zero_is_not_in_the_sum():
    weights = (torch.arange(RECORDS) % 3 > 0).float()
    weighted, _ = trained(weights)
    data = records(scale=3.0)
    silent = data | {"weight": data["weight"] * weights}  # of the loss: its gradient is zero
    found, _ = trained(data=silent)
    assert torch.allclose(weighted, found, atol=1e-12)


def test_a_column_leaves_the_batch_and_its_values_stay():
    data = records(scale=3.0)
    named, _ = trained("share", data=data | {"share": HALF})
    assert torch.equal(named, trained(HALF.tolist(), data=data)[0])


@pytest.mark.parametrize("name", [one for one in EXAMPLES if one not in TAKEN])
def test_methods_with_other_sums_refuse_by_name(name):
    method = EXAMPLES[name]()
    assert name.startswith(OWN_SUMS) or method.recipe == "as_published"
    with pytest.raises(ValueError, match=f"weights: method='{method.said()}'.*DPSGD"):
        trained(HALF, method)


@pytest.mark.parametrize(
    "wrong", [1.5, -0.25, float("nan"), HALF[1:], HALF[:, None], ["a"] * RECORDS], ids=type
)
def test_weights_that_are_no_share_a_record_are_refused_without_their_value(wrong):
    weights, message = wrong, "weights must hold one number per record"
    if isinstance(wrong, float):
        weights, message = HALF.clone(), r"weights holds numbers outside \[0, 1\]"
        weights[3] = wrong
    with pytest.raises(DataError, match=message) as caught:
        trained(weights)
    assert str(wrong) not in str(caught.value)


def test_equal_records_of_two_weights_are_drawn_by_names_of_their_own():
    """If the first of them is withdrawn, the other one takes no part in its draws."""
    secrets, weights = Secrets(reproducible_seed=0), torch.tensor([0.5, 1.0, 0.5])
    keys = []
    for those in ([0, 1, 2], [1, 2]):
        source = RecordSource({"input": torch.ones(3, 2)[those]})
        plain = source.keys(secrets)
        source.weights = weights[those]
        keys.append(source.keys(secrets))
    assert torch.equal(keys[0][:2], keys[1].flip(0))
    assert keys[0][1] == plain[0]
    assert len(set(keys[0].tolist())) == 3


def test_a_user_has_the_mean_weight_of_their_records():
    owner = torch.arange(RECORDS) // 2
    users = eq.Users(owner, records_per_user=2, rows="mean")
    pairs = torch.stack([HALF.view(-1, 2).mean(1)] * 2, 1).flatten()
    assert torch.equal(trained(HALF, unit=users)[0], trained(pairs, unit=users)[0])
    assert not torch.equal(trained(HALF, unit=users)[0], trained(unit=users)[0])


@pytest.mark.parametrize("other", [None, HALF / 2])
def test_a_run_goes_on_with_other_weights_as_with_other_records(tmp_path, other):
    def parts(weights):
        model = network()
        optimizer, data = torch.optim.SGD(model.parameters(), lr=0.5), eq.Data(records(), weights=weights)
        return {"model": model, "optimizer": optimizer, "loss": loss, "data": data}

    how = {"sampling": eq.Poisson(20, RECORDS, 4), "budget": eq.Budget(8.0, 1e-3)}
    begun = eq.PrivateTraining(**parts(HALF), **how, run=eq.Run(tmp_path / "run"))
    begun.take_step()
    begun.close()
    with pytest.warns(UserWarning, match="data hold other records"):
        again = eq.PrivateTraining.resume(tmp_path / "run", **parts(other))
    assert {Assumption.OTHER_DATA, Assumption.WEIGHTED} <= {*again.statement().assumptions}


def audited(**options):
    given = arranged(data=records(scale=30.0), positions=2, **options)
    given["data"] = eq.Data(given["data"], weights=torch.ones(RECORDS) / 2)
    return audit_neighbours(network(), loss, **given)


def test_neighbours_differ_by_no_more_than_the_bound_and_weights_above_one_are_seen(monkeypatch):
    owners = {"owner": torch.arange(RECORDS) // 2, "records_per_user": 2, "unit": "user"}
    for options in ({}, owners, {**owners, "rows": "mean"}):
        found = audited(**options)
        assert found.holds
        assert max(one.movement for one in found.pairs) <= 0.5 + 1e-3
    made = clipping.Weighted.__init__

    def larger(self, rows, of_records):
        made(self, rows, of_records)
        self._own = self._own * 2.5

    monkeypatch.setattr(clipping.Weighted, "__init__", larger)
    assert not audited().holds
