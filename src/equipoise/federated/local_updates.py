"""Updates of users by local training, as losses whose gradient they are.

In user-level federated learning a cohort of users is drawn per round, each trains the model on their own
records for some steps, and the server adds the clipped updates and noise. With losses whose gradient is a
user's update, that is a private training like any other: a record is a user, a row is an update, a step is a
round, and the optimiser is the server's. Whoever runs it sees all records (central differential privacy).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from equipoise import _validate
from equipoise.gradients.engine_inputs import (
    Loss,
    map_records,
    record_leaves,
    replace_leaves,
    run_loss,
)
from equipoise.training.record_source import BatchFormError


@dataclass(frozen=True)
class LocalUpdates:
    """Losses [B] of B users, whose gradients are the updates of K local steps of gradient descent.

        theta_0 = theta,   theta_(k+1) = theta_k - r * (mean gradient of local batch k at theta_k),
        gradient row = theta - theta_K.

    One step on one record at rate 1 is DP-SGD. The reported number is the loss of the first local batch.

    Args:
        loss: loss(model, batch) -> one number per record, as for training without users.
        steps: K. More steps than there are batches begin again at a user's first record.
        batch_size: b, records of a local batch: the first b records of a user, then the next b; None takes
            all of them in every step.
        learning_rate: r, of the local steps. The server's is that of the optimiser.
        present: key of a bool or 0/1 tensor [B, G] in the batch that says which of the G places hold a
            record; the others count nothing, whatever numbers stand there, and `loss` is not given the
            tensor. Whole numbers there must be ones that the model takes. None where all places hold one.

    The batch holds users first and their places second, [B, G, ...]. G is public: a cap on the records of a
    user, up to which others are filled up.

    The guarantee is `proven` where that of the method is; its unit is a user, since a row holds all records
    of one.

    Raises:
        ValueError: an argument out of range.
        BatchFormError: no tensor `present`; tensors without the second axis, or of other lengths there.

    Example:
        >>> def squares(model, batch):
        ...     return (model(batch["x"])[:, 0] - batch["y"]).square() / 2
        >>> model = nn.Linear(1, 1, bias=False)
        >>> nn.init.zeros_(model.weight) is model.weight
        True
        >>> users = {"x": torch.ones(1, 2, 1), "y": torch.tensor([[1.0, 3.0]])}  # one user with two records
        >>> loss = LocalUpdates(squares, steps=2, batch_size=1, learning_rate=0.5)
        >>> loss(model, users).sum().backward()
        >>> -model.weight.grad  # 0 -> 0.5 -> 1.75
        tensor([[1.7500]])
    """

    loss: Loss
    steps: int = 1
    batch_size: int | None = None
    learning_rate: float = 1.0
    present: str | None = None

    def __post_init__(self) -> None:
        if not callable(self.loss):
            raise TypeError(f"loss is {_validate.what_is(self.loss)}; give loss(model, batch) -> [B]")
        _validate.count("the local steps of a user", steps=self.steps)
        if self.batch_size is not None:
            _validate.count("the records of a local batch", batch_size=self.batch_size)
        _validate.positive("the rate of the local steps", learning_rate=self.learning_rate)

    def __call__(self, model: nn.Module, users: Any) -> Tensor:
        """One number per user, [B]."""
        records, present = self._parted(users)
        params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if self.steps == 1 or not params:
            # All are at the same parameters, so that an update is the gradient of a mean: rules serve it.
            places = self._places(0, present.shape[1])
            weights = present[:, places]
            flat = map_records(lambda leaf: leaf[:, places].flatten(0, 1), records)
            return _rated(_mean(self.loss(model, flat).reshape(weights.shape), weights), self.learning_rate)
        start = {name: p.detach() for name, p in params.items()}

        def train(present: Tensor, *leaves: Tensor) -> tuple[dict[str, Tensor], Tensor]:
            """Of one user with places [G]: theta - theta_K, and the loss of the first batch."""
            here, losses = start, []
            for step in range(self.steps):
                places = self._places(step, len(present))
                batch = replace_leaves(records, [leaf[places] for leaf in leaves])

                def mean(
                    at: dict[str, Tensor], batch: Any = batch, weights: Tensor = present[places]
                ) -> Tensor:
                    return _mean(run_loss(model, self.loss, batch, at), weights)

                gradient, value = torch.func.grad_and_value(mean)(here)
                here = {name: p - self.learning_rate * gradient[name] for name, p in here.items()}
                losses.append(value)
            return {name: p - here[name] for name, p in start.items()}, losses[0]

        # Fused attention has no rule for vmap.
        with sdpa_kernel(SDPBackend.MATH):
            updates, losses = torch.func.vmap(train, randomness="different")(present, *record_leaves(records))
        return losses_with_updates(params, updates, losses)

    def _parted(self, users: Any) -> tuple[Any, Tensor]:
        """The records, and the weights of their places, [B, G]."""
        weights = None
        if self.present is not None:
            if not isinstance(users, Mapping) or self.present not in users:
                raise BatchFormError(
                    f"present={self.present!r} is no key of the batch; name the tensor [B, G] that says "
                    "which places hold a record"
                )
            weights = users[self.present]
            users = {name: leaf for name, leaf in users.items() if name != self.present}
        leaves = record_leaves(users)
        counts = {leaf.shape[1] if leaf.ndim > 1 else None for leaf in leaves}
        count = counts.pop() if len(counts) == 1 else None
        if count is None:
            raise BatchFormError(
                "the batch needs tensors [B, G, ...], users first and their G places second; one has another "
                "shape. Fill up the records of a user to G, and say with present=... which are there"
            )
        if weights is None:
            return users, leaves[0].new_ones(leaves[0].shape[:2], dtype=torch.float32)

        def without_absent(leaf: Tensor) -> Tensor:
            """Zeros for numbers that are not there: weight zero does not silence NaN."""
            there = weights.bool().reshape(*weights.shape, *[1] * (leaf.ndim - 2))
            return torch.where(there, leaf, 0) if leaf.is_floating_point() else leaf

        return map_records(without_absent, users), weights

    def _places(self, step: int, count: int) -> slice:
        """Where the records of a local step are among `count` places."""
        size = min(self.batch_size or count, count)
        first = step % math.ceil(count / size) * size
        return slice(first, first + size)


def losses_with_updates(
    params: Mapping[str, Tensor], updates: Mapping[str, Tensor], losses: Tensor
) -> Tensor:
    """Losses [B] of these values, whose gradients are the updates.

    Args:
        params: the trainable parameters.
        updates: of each user, by parameter, [B, *shape].
        losses: [B].
    """
    products = [(p * updates[name].detach()).reshape(len(losses), -1).sum(1) for name, p in params.items()]
    linear = torch.stack(products).sum(0)
    return linear - linear.detach() + losses.detach()  # the linear part has the value zero


def _mean(losses: Tensor, weights: Tensor) -> Tensor:
    """Over the last axis, of those that are there; zero where none is."""
    weights = weights.to(losses)
    return (losses * weights).sum(-1) / weights.sum(-1).clamp(min=1)


def _rated(losses: Tensor, rate: float) -> Tensor:
    """The same losses, with gradients that are `rate` times as long."""
    return losses if rate == 1 else rate * losses + (1 - rate) * losses.detach()
