"""The data owners of a federated experiment: as many clients as shares, alike but for records and coins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from equipoise.federated import Client
from equipoise.gradients.engine_inputs import Loss
from equipoise.methods import Method
from equipoise.privacy import Budget, Sampling
from equipoise.training import Data, Run

__all__ = ["largest_epsilon", "make_clients"]


def make_clients(
    shares: Sequence[Any],
    make_model: Callable[[], nn.Module],
    loss: Loss,
    sampling: Sampling,
    make_method: Callable[[], Method],
    *,
    local_steps: int,
    learning_rate: float,
    seed: int,
    micro_batch_size: int,
    budget: Budget | None = None,
) -> list[Client]:
    """One client a share, in memory and reproducible.

    Args:
        shares: the clients' records.
        make_model, make_method: called once a client, in this order.
        seed: of the first client; the next ones count on from it.
        loss, sampling, local_steps, learning_rate, micro_batch_size, budget: as for `Client`.
    """
    return [
        Client(
            make_model(),
            loss,
            Data(share, microbatch_size=micro_batch_size),
            sampling,
            make_method(),
            local_steps=local_steps,
            budget=budget,
            learning_rate=learning_rate,
            run=Run(seed=seed + number, reproducible=True),
        )
        for number, share in enumerate(shares)
    ]


def largest_epsilon(clients: Sequence[Client], delta: float) -> float:
    """What the clients have spent, at the one that has spent most."""
    return max(client.training.ledger.spent(delta).value for client in clients)
