"""An exponential moving average of the parameters: post-processing of releases, so it costs no privacy.

    average_t = d_t average_{t-1} + (1 - d_t) x_t,      d_t = min(decay, (1 + t) / (10 + t))

The warm-up of d_t keeps the random initial parameters from weighing on short trainings. Source of the use
in private training: De et al. 2022, "Unlocking High-Accuracy Differentially Private Image Classification
through Scale".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class Values:
    """Values that stand in for a model's parameters where it is judged and published.

    Args:
        params: the parameters, live.
        values: by the same names.
    """

    def __init__(self, params: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        self._params, self.values = dict(params), dict(values)

    @contextmanager
    @torch.no_grad()
    def swapped_in(self) -> Iterator[None]:
        """Inside, the parameters have the these values."""
        kept = {name: p.detach().clone() for name, p in self._params.items()}
        for name, p in self._params.items():
            p.detach().copy_(self.values[name])
        try:
            yield
        finally:
            for name, p in self._params.items():
                p.detach().copy_(kept[name])

    @torch.no_grad()
    def move_in(self) -> None:
        """Give the parameters the these values, for good."""
        for name, p in self._params.items():
            p.detach().copy_(self.values[name])


class MovingAverage(Values):
    """The moving average of named parameters.

    Args:
        params: the parameters, live; they are read at every update.
        decay: in (0, 1).

    Example:
        >>> x = torch.zeros(1)
        >>> average = MovingAverage({"x": x}, decay=0.5)
        >>> x += 1
        >>> average.update(step=100); average.values["x"]
        tensor([0.5000])
    """

    def __init__(self, params: Mapping[str, Tensor], decay: float) -> None:
        super().__init__(params, {name: p.detach().clone() for name, p in params.items()})
        self.decay, self._taken = decay, -1

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the parameters after step `step` (0, 1, ...); once, however often it is called after it."""
        if step == self._taken:
            return
        decay = min(self.decay, (1 + step) / (10 + step))
        values = {
            name: (value * decay).add_(self._params[name].detach(), alpha=1 - decay)
            for name, value in self.values.items()
        }
        self.values, self._taken = values, step  # together: an interrupt leaves the average as it was
