"""Public records that are private ones are refused."""

from __future__ import annotations

import json

import pytest
import torch
from small_problems import OnDemand, training
from torch import nn

import equipoise as eq
from equipoise.audit.canary_scores import WithCanaryScores
from equipoise.data import Records
from equipoise.methods import PublicRecords, PublicSubspace
from equipoise.report import write_report
from equipoise.statements.assumptions import NOT_COMPARED
from equipoise.training.record_source import DataError
from equipoise.training.setup.private_copies import are_copies


def _batch(seed: int, count: int = 20) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(count, 3, generator=rng), "y": torch.randint(2, (count,), generator=rng)}


PRIVATE = _batch(0)
HELD = {"dict": PRIVATE, "records": Records(PRIVATE)}


def _mixed(copies: int) -> dict[str, torch.Tensor]:
    """Five public records, of which some are private ones."""
    public = _batch(1, 5)
    for name, field in public.items():
        field[:copies] = PRIVATE[name][7 : 7 + copies]
    return public


def _training(method, data=PRIVATE, **options):
    return training(
        nn.Linear(3, 2), data=data, loss=_loss, sampling=eq.Poisson(5, 20, 2), method=method, **options
    )


def _loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


METHODS = {
    "pcdp-sgd": lambda public: eq.PCDPSGD(source=PublicSubspace(PublicRecords(public)), noise_multiplier=1.0),
    "public-only": lambda public: eq.methods.PublicOnly(public=PublicRecords(public)),
    "inner": lambda public: eq.methods.PublicWarmStart(
        public=PublicRecords(_batch(2)),
        inner=eq.methods.GEP(source=PublicSubspace(PublicRecords(public)), noise_multiplier=1.0),
        warm_steps=1,
    ),
    "watched": lambda public: WithCanaryScores(
        eq.PCDPSGD(source=PublicSubspace(PublicRecords(public)), noise_multiplier=1.0),
        _batch(3),
    ),
}


@pytest.mark.parametrize(("kind", "held"), [*((kind, "dict") for kind in METHODS), ("inner", "records")])
def test_copies_are_counted_and_refused_before_anything_is_written(tmp_path, kind, held):
    run = tmp_path / "run"
    with pytest.raises(DataError, match="2 records of data equal some of the 5 public ones"):
        _training(METHODS[kind](_mixed(2)), HELD[held], folder=run)
    assert not run.exists()
    assert _training(METHODS[kind](_mixed(0)), HELD[held]).plan is not None


def test_the_types_may_differ_and_part_of_a_record_is_no_copy():
    public = _mixed(1)
    with pytest.raises(DataError, match="1 records of data equal some of the 5"):
        _training(eq.methods.PublicOnly(public=PublicRecords({**public, "x": public["x"].double()})))
    left = torch.nonzero(~are_copies(PRIVATE, public)).flatten()  # without the equal ones the run goes
    assert len(left) == 19
    _training(METHODS["public-only"](public), {name: field[left] for name, field in PRIVATE.items()})
    public["y"][0] = 1 - public["y"][0]
    _training(eq.methods.PublicOnly(public=PublicRecords(public)))
    _training(eq.methods.PublicOnly(public=PublicRecords({"x": public["x"][:, :2], "y": public["y"]})))


def test_a_statement_cannot_leave_its_public_records_out(tmp_path):
    run = tmp_path / "run"
    _training(METHODS["inner"](_mixed(0)), folder=run).run(progress=False)
    assert eq.verify_run(run).consistent
    path = run / "statement.json"
    whole = path.read_text()
    statement = json.loads(whole)
    for words in ("5 records are public", "20 records are public"):
        left = [text for text in statement["assumptions"] if words not in text]
        assert len(left) == len(statement["assumptions"]) - 1
        path.write_text(json.dumps(statement | {"assumptions": left}))
        write_report(run)
        assert [f.subject for f in eq.verify_run(run).findings if f.ok is False] == ["assumptions"]
    path.write_text(whole)
    write_report(run)
    assert eq.verify_run(run).consistent


def test_records_made_on_demand_are_not_compared_and_the_statement_says_so():
    run = _training(METHODS["public-only"](_mixed(2)), OnDemand(PRIVATE))
    assert NOT_COMPARED in run.statement().assumptions
