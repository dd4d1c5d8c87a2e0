"""Every model of the zoo, trained as users do: its sum is that of single records, or it is refused."""

import copy
import re

import pytest
import torch
from flat_arguments import arranged
from small_problems import Listening, OnDemand
from zoo import CASES, RECORDS, Case

import equipoise as eq
from equipoise.gradients import CoverageError, CrossRecordError, ForwardWritesError
from equipoise.gradients.capture.attributes import attributes_kept
from equipoise.gradients.capture.isolation import undisturbed
from equipoise.gradients.engine_inputs import uncompiled
from equipoise.training.record_source import RecordSource

#: What a sum may be wrong by, relative to the sum of the clipped norms.
TOLERANCE = {"float32": 1e-4, "float64": 1e-9, "bfloat16": 5e-2}

REFUSALS = (ValueError, TypeError, CoverageError, CrossRecordError, ForwardWritesError)


def in_mode(case: Case, mode: str):
    torch.manual_seed(0)
    model, loss, records = case.model(), case.loss, dict(case.records())
    if mode == "float64":
        model, records = model.double(), widened(records)
    if mode == "bfloat16":

        def loss(model, batch):
            with torch.autocast("cpu", torch.bfloat16):
                return case.loss(model, batch).float()

    return model, loss, records


def widened(records):
    return {name: t.double() if t.is_floating_point() else t for name, t in records.items()}


def single_rows(case: Case, model, records):
    """Gradients of one record after another, in float64: [records, P]."""
    found = []
    for number in range(len(records["x"])):
        wide = copy.deepcopy(model).double()  # its first forward, for every record
        trained = [p for p in wide.parameters() if p.requires_grad]
        record = {name: t[number : number + 1] for name, t in widened(records).items()}
        with undisturbed(wide), attributes_kept(wide), uncompiled():
            gradients = torch.autograd.grad(case.loss(wide, record).sum(), trained, allow_unused=True)
        both = zip(trained, gradients, strict=True)
        whole = [torch.zeros_like(p) if g is None else g.to_dense() for p, g in both]
        found.append(torch.cat([g.flatten() for g in whole]))
    return torch.stack(found).detach()


def start(case: Case, mode: str, clip_norm: float = 1.0):
    model, loss, records = in_mode(case, mode)
    data = OnDemand(records) if "collate" in case.options else records
    options = {"loss": loss, "data": data, "sampling": eq.FullBatch(RECORDS + 1, 20), "reproducible": True}
    method = eq.DPSGD(clip_norm=clip_norm, noise_multiplier=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run = Listening(model, optimizer, **arranged(method=method, **options, **case.options))
    return run, records


def sum_of(run, records):
    """The sum that a step releases, without its noise, on these records; random numbers are constant."""
    run._setup.rows.source = RecordSource(records)
    with undisturbed(run.model):
        run.take_step()
    return run.ledger.heard


def drawn_sum(case: Case, mode: str, clip_norm: float, count: int):
    """The sum over the first records, with the random numbers of the first step."""
    run, records = start(case, mode, clip_norm)
    run._setup.rows.source = RecordSource({name: t[:count] for name, t in records.items()})
    run.take_step()
    return run.ledger.heard


def check(name, mode):
    case = CASES[name]
    outcome = case.other.get(mode, case.outcome)
    if outcome.kind == "refused":
        with pytest.raises((*REFUSALS, RuntimeError), match=outcome.text) as caught:
            start(case, mode)[0].take_step()
        assert type(caught.value).__module__.startswith(("equipoise", "builtins"))
        return
    if outcome.kind == "unseen":
        run = start(case, mode)[0]
        run.take_step()
        assert run._setup.rows.engine.independence.word == outcome.text
        return
    model, _, records = in_mode(case, mode)
    expected = single_rows(case, model, records)
    norms = expected.norm(dim=1)
    clip_norm = float(norms.median())
    clipped = expected * (clip_norm / norms).clamp(max=1)[:, None]
    try:
        run, records = start(case, mode, clip_norm)
    except REFUSALS as error:
        if outcome.kind == "right or refused" and re.search(outcome.text, str(error)):
            return
        raise
    slack = TOLERANCE[mode] * float(clipped.norm(dim=1).sum())
    for left_out in (None, RECORDS, 0, 7):
        kept = torch.tensor([n for n in range(RECORDS + 1) if n != left_out])
        found = sum_of(run, {name: t[kept] for name, t in records.items()})
        assert (found - clipped[kept].sum(0)).norm() <= slack
        if left_out is None:
            whole = found
        else:  # one record more, and nothing else moves
            assert (whole - found).norm() <= clip_norm * (1 + 1e-5)
    if case.is_random:
        with_last, without = (drawn_sum(case, mode, clip_norm, count) for count in (RECORDS + 1, RECORDS))
        assert (with_last - without).norm() <= clip_norm * (1 + 1e-5)


@pytest.mark.few(22)
@pytest.mark.parametrize("name", CASES)
def test_zoo(name):
    check(name, "float32")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["float64", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_zoo_in_other_modes(name, mode):
    check(name, mode)
