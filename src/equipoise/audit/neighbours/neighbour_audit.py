"""The audit: every change of one record, at several positions of the draw, with every number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from equipoise import _validate
from equipoise.audit.neighbours.neighbour_findings import CHANGES, NeighbourAudit, NeighbourPair
from equipoise.audit.neighbours.neighbour_trainings import NeighbourTrainings
from equipoise.audit.neighbours.silent_record import WholeDrawError
from equipoise.gradients.engine_inputs import Loss
from equipoise.methods import DPSGD, Method
from equipoise.privacy import Budget, FullBatch, Sampling, Unit, WithoutReplacement
from equipoise.training.arguments import Data, Record, Run, Users, unit_of
from equipoise.training.owners import Owners, column_of
from equipoise.training.record_source import RecordSource


def audit_neighbours(
    model: nn.Module,
    loss: Loss,
    data: Any,
    *,
    sampling: Sampling | None = None,
    method: Method | None = None,
    positions: int = 10,
    changes: Sequence[str] | None = None,
    steps: int = 1,
    threads: Sequence[int] = (1,),
    seed: int = 0,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    unit: Record | Users | str = "record",
    budget: Budget | None = None,
    hardened: bool = False,
    device: str | torch.device | None = None,
) -> NeighbourAudit:
    """Measure how far the released sums move when one record enters, leaves or is replaced.

    With `unit=Users(...)` it is one user with all records, of which the training uses the number that it may.

    Nothing is released or spent, and the model is not moved: copies are trained.

    Args:
        model, loss, data: as for `PrivateTraining`; `data` may be `Data`.
        sampling: of the training; all records in every step by default.
        method: `DPSGD(noise_multiplier=1.0)` by default. One without a multiplier needs a `budget`.
        positions: how many records or users, spread over the draw, are added, removed and replaced. Where
            there are two or more, the smallest and the largest of up to 1,000 records, or the users who own
            them, are among them. They are left out where batches are padded to the longest and random
            numbers are drawn: in another shape the others get other numbers, and nothing can be compared.
        changes: some of `CHANGES`; by default all that sampling and method have a place for.
        steps: to compare on each pair of data sets.
        threads: numbers of processor threads to try.
        seed: of the draws and of the places.
        optimizer: parameters -> optimiser; plain SGD at 0.1 by default. It matters after the first step.
        unit, budget, device: as for `PrivateTraining`.
        hardened: as for `Run`.

    Raises:
        ValueError: fewer than two records or users, no number of threads, a change that sampling or method
            have no place for, a method whose releases are not proved; and whatever refuses the training.

    Example:
        >>> records = {"x": torch.randn(50, 3), "y": torch.randn(50)}
        >>> def loss(model, batch):
        ...     return (model(batch["x"])[:, 0] - batch["y"]).square()
        >>> found = audit_neighbours(nn.Linear(3, 1), loss, records, positions=2)
        >>> found.holds, len(found.pairs)
        (True, 8)
    """
    _validate.count(positions=positions, steps=steps)
    for count in threads or [0]:
        _validate.count("the number of processor threads", threads=count)
    given: dict[str, Any] = {
        "data": replace(Data.of(data), score=None),  # no step asks for it
        "unit": unit_of(unit),
        "loss": loss,
        "method": method or DPSGD(noise_multiplier=1.0),
        "budget": budget,
        "device": device,
        # Reproducible: both sides draw alike. Nothing leaves.
        "run": Run(seed=seed, reproducible=True, hardened=hardened),
    }
    sampling, kinds = _checked(_drawn(given["data"], given["unit"]), sampling, changes, steps)
    left_out = {} if changes is not None else {kind: FIXED_SIZE for kind in CHANGES if kind not in kinds}
    pairs: list[NeighbourPair] = []
    for count in threads:
        with _threads(count):
            audited = NeighbourTrainings(positions, optimizer, model, sampling=sampling, **given)
            for number in range(positions):
                for kind in kinds:
                    if kind in left_out:
                        continue
                    try:
                        pairs.append(audited.compare(kind, number, steps, count))
                    except WholeDrawError:
                        left_out[kind] = WHOLE_DRAW
                        if changes is not None:
                            raise ValueError(
                                f"changes={kind!r} is not for method {audited.setup.method.name!r}: "
                                f"{WHOLE_DRAW}; leave it out"
                            ) from None
    setup = audited.setup
    return NeighbourAudit(
        pairs=tuple(pairs),
        method=setup.method.name,
        steps=steps,
        records=audited.records,
        micro_batch_size=setup.rows.micro_batch_size,
        draws_numbers=audited.draws_numbers,
        left_out=left_out,
        delta=setup.delta,
        plan_epsilon=setup.plan.epsilon(setup.delta).value,
        unit=setup.plan.unit.name,
    )


FIXED_SIZE = "subsets of a fixed size are accounted under replace-one alone"
WHOLE_DRAW = "the method looks at all rows of a draw at once"


def _drawn(data: Data, unit: Record | Users) -> int:
    """How many records, or users where they are drawn, there are; at least two."""
    owner, held = unit.owner, data.records
    if isinstance(owner, str):
        owner, held = column_of(held, owner)
    records = len(RecordSource(held, data.collate))
    units = records if owner is None else Owners(owner, Unit("user")).count
    if units < 2:
        name = "record" if owner is None else "user"
        raise ValueError(f"data holds {units} {name}: neighbours need at least two")
    return units if unit.protected.joined is not None else records


def _checked(
    records: int, sampling: Sampling | None, changes: Sequence[str] | None, steps: int
) -> tuple[Sampling, tuple[str, ...]]:
    sampling = FullBatch(records, steps) if sampling is None else sampling
    if steps > sampling.steps:
        raise ValueError(f"steps={steps}, but sampling plans {sampling.steps}; give at most as many")
    fixed = isinstance(sampling, WithoutReplacement)
    kinds = tuple(changes or (("replace",) if fixed else CHANGES))
    unknown = [kind for kind in kinds if kind not in CHANGES]
    if unknown:
        raise ValueError(f"changes={unknown[0]!r} is unknown; give some of {', '.join(CHANGES)}")
    if fixed and kinds != ("replace",):
        raise ValueError(f"changes={changes!r}, but {FIXED_SIZE}; give changes=('replace',)")
    return sampling, kinds


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
