"""What a run starts from: parameters that another run left, and steps that an optimizer remembers.

Epsilon covers what a run releases, and nothing that was in the model before. So a model that a run of this
process trained, or that was loaded from a run's file, starts another run only if both are booked in one
journal, or if the user says that the start is public. What other programs did to a model cannot be seen:
every statement names the assumption.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from equipoise._dtensor import local_part
from equipoise._tree import leaves
from equipoise.distributed.processes import Processes
from equipoise.privacy.ledger.journal_records import runs_in
from equipoise.statements.assumptions import AFTER, Assumption
from equipoise.training.arguments import TrainingInputs
from equipoise.training.setup.private_copies import held_tensors
from equipoise.training.traces import digests, runs_by_digest


def check_start(given: TrainingInputs, processes: Processes) -> list[str]:
    """Refuse a start that another run left, or an optimizer that remembers steps, if a claim would hide it.

    Returns:
        What the statement says of the start.

    Raises:
        ValueError: with the remedies. A run that claims no epsilon may start from anything.
    """
    begun, found = given.run, _runs_in(given.model, given.loss)
    claims = not (begun.reproducible or given.method.guarantee == "none")
    if claims and begun.starts_from is None:
        paid = processes.first(lambda: frozenset(runs_in(begun.journal)))
        for run, name in found.items():
            if run not in paid:
                raise ValueError(
                    f"model or loss holds in {name!r} what run {run} left, and the epsilon of this run "
                    "would not cover that. Build the model anew; or give both runs one Run(journal=...) "
                    "(of a run with a folder alone it is private/journal.jsonl there) and this one a budget "
                    "for both; or, if no record of these people went into that run, Run(starts_from='public')"
                )
        remembered = _remembered(given.optimizer)
        if remembered is not None:
            raise ValueError(
                f"optimizer remembers steps that it took ({remembered!r} in its state), which this run's "
                "epsilon would not cover: build it anew, or, if they followed no record of these people, "
                "give Run(starts_from='public')"
            )
    stated: list[str] = [] if begun.starts_from is None else [Assumption.PUBLIC_START]
    return [*stated, AFTER + ", ".join(found)] if found else stated


def _runs_in(model: nn.Module, loss: Any) -> dict[str, str]:
    """The runs that left what model or loss (a teacher) hold, each with the name of one such tensor."""
    found: dict[str, str] = {}
    if known := runs_by_digest():  # the model of a first run is not read
        for name, held in held_tensors(model, loss):
            if local_part(held).layout is not torch.strided:
                continue  # no parameter that a run trains is sparse
            for one in digests([held]) & known.keys():
                found.setdefault(known[one].run, name.removeprefix("model."))
    return found


def _remembered(optimizer: torch.optim.Optimizer) -> str | None:
    """What of the optimizer's state a step left: all that is neither zero nor a number of its settings."""
    for group in optimizer.param_groups:
        fresh = [0.0, *(value for value in group.values() if isinstance(value, (int, float)))]
        for parameter in group["params"]:
            for name, value in optimizer.state.get(parameter, {}).items():
                for leaf in leaves(value):
                    if not isinstance(leaf, (int, float, Tensor)):
                        continue
                    held = local_part(torch.as_tensor(leaf))
                    if not any(bool((held == number).all()) for number in fresh):
                        return str(name)
    return None
