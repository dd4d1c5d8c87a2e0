"""TODO."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from equipoise.methods.base import Parameters
from equipoise.training.data_source import Source, map_batch, repeat_views
from equipoise.training.randomness import Coins, public_coins, replayed

__all__ = ["RowSource"]


_log = logging.getLogger("equipoise.training")


class RowSource:
    """Makes gradient rows of records: the engine, the data, the device, the augmentation.

    Args:
        engine: engine(batch, params=None) -> per-sample gradients.
        source: the records.
        device: where batches are moved to.
        micro_batch_size: records at once.
        example: a batch of a few records, from which the rows of an empty draw are cut.
        seed: public seed of dropout and augmentation.
        augmentation: (batch, generator) -> batch; with `views` > 1, that many views a record are averaged.
        views: K.
        probes: numbers of the records of `example`, which could be read at the start.
    """

    def __init__(
        self,
        engine: Any,
        source: Source,
        device: torch.device,
        micro_batch_size: int,
        example: Any,
        seed: int,
        augmentation: Callable[[Any, torch.Generator], Any] | None = None,
        views: int = 1,
        probes: Tensor | None = None,
    ) -> None:
        self.engine, self.source, self.device = engine, source, device
        self.probes = torch.zeros(0, dtype=torch.long) if probes is None else probes
        self.micro_batch_size, self.example, self.seed = micro_batch_size, example, seed
        self.augmentation, self.views = augmentation, views
        self._told = False

    def public(self, *purpose: object) -> Coins:
        """Coins that follow the public seed."""
        return public_coins(self.seed, *purpose)

    def prepare(self, batch: Any, coins: Coins) -> Any:
        """The batch on the device, augmented."""
        batch = map_batch(lambda leaf: leaf.to(self.device, non_blocking=True), batch)
        if self.augmentation is None:
            return batch
        rng = coins("augmentation")
        if self.views == 1:
            return self.augmentation(batch, rng)
        return repeat_views(batch, self.views, self.augmentation, rng)

    def rows(self, batch: Any, at: Sequence[Parameters | None], coins: Coins) -> list[Any]:
        """Gradient rows of a prepared batch at every parameter point, under the same masks."""
        made = []
        for params in at:
            with replayed(self.device, coins("dropout")):
                made.append(self.engine(batch, params=params))
        return made

    def check_source(self) -> None:
        """See that some record of the example, all of which were read at the start, can still be read.

        Reading depends on no parameters. Model and loss are never tried again on chosen records: at
        parameters that a server sent, whether they fail would be an answer without noise.

        Raises:
            Whatever the last of them raises, where none can be read: the source is gone.
        """
        failed: Exception | None = None
        for number in self.probes:
            try:
                self.source.take(number[None])
                return
            except Exception as error:
                failed = error
        if failed is not None:
            raise failed

    def no_rows(self, at: Sequence[Parameters | None]) -> list[Any]:
        """Rows of no records; the engine makes them without running the model."""
        nobody = map_batch(lambda leaf: leaf[:0].to(self.device), self.example)
        return [self.engine(nobody, params=params) for params in at]

    def note_failed_draw(self, name: str) -> None:
        """Tell the keeper, once, that a draw came to nothing; it is no reason to stop."""
        if not self._told:
            _log.error(
                "every record of a draw %r failed: the step goes on with noise alone. The kinds of the "
                "errors are in private/diagnostics.jsonl; this is said once",
                name,
            )
        self._told = True
