"""This library's accountants behind Flower's protocol for privacy accountants (`flwr.serverapp`, since 1.35).

Flower's protocol counts Gaussian releases of a trusted server whose unit is a client. It is for those who
run Flower's own strategies with it: the clients of this library do not go through it, each has a ledger of
its own whose unit is a record. The figures are those of `equipoise.privacy.epsilon`: closed form, PLD or RDP,
whichever is valid and tightest.

An event's noise multiplier is the noise's standard deviation over the bound on one client's contribution. A
replaced client moves a sum by twice that bound, so that under `REPLACE_ONE` half of it is counted.
"""

from __future__ import annotations

import math
from dataclasses import asdict

import dp_accounting
from flwr.serverapp import (
    GaussianPrivacyEvent,
    NeighboringRelation,
    PrivacyConfig,
    PrivacySpent,
    SamplingMethod,
)

from equipoise import _validate
from equipoise._roots import crossing
from equipoise.privacy import epsilon

__all__ = ["LedgerAccountant"]

_SMALLEST_DELTA = 1e-15


class LedgerAccountant:
    """An accountant for Flower, as its protocol `PrivacyAccountant` asks.

    Args:
        config: Flower's.

    Example:
        >>> config = PrivacyConfig(1e-5, 100, NeighboringRelation.ADD_OR_REMOVE_ONE,
        ...                        SamplingMethod.NO_AMPLIFICATION, max_epsilon=5.0)
        >>> accountant = LedgerAccountant(config)
        >>> accountant.compose(GaussianPrivacyEvent(2.0, 10, 100), count=4)
        >>> round(accountant.get_epsilon(1e-5), 3)
        4.377
        >>> accountant.would_exceed(GaussianPrivacyEvent(2.0, 10, 100), count=2)
        True
    """

    def __init__(self, config: PrivacyConfig) -> None:
        self._config = config
        self._booked: list[tuple[GaussianPrivacyEvent, int]] = []

    @property
    def config(self) -> PrivacyConfig:
        return self._config

    @property
    def num_releases(self) -> int:
        return sum(count for _, count in self._booked)

    def compose(self, event: GaussianPrivacyEvent, count: int = 1) -> None:
        """Book `count` releases.

        Raises:
            ValueError: a count below 1, or an event of another population.
        """
        self._check(event, count)
        self._booked.append((event, count))

    def get_epsilon(self, delta: float) -> float:
        """Epsilon of all that was booked; 0 where nothing was."""
        return self._epsilon(self._booked, delta)

    def get_delta(self, epsilon: float) -> float:
        """The least delta, from above and to 1%, at which `get_epsilon` is at most `epsilon`."""
        if not epsilon >= 0:
            raise ValueError(f"epsilon={epsilon!r}: give a number of at least 0")
        low, high = math.log(_SMALLEST_DELTA), math.log(1 - 1e-9)

        def excess(log_delta: float) -> float:
            return self._epsilon(self._booked, math.exp(log_delta)) - epsilon

        if excess(low) <= 0:
            return 0.0 if not self._booked else math.exp(low)
        if excess(high) > 0:
            return 1.0
        _, enough = crossing(excess, low, high - low, most=high, tolerance=0.005)
        return math.exp(enough)

    def get_privacy_spent(self, delta: float | None = None) -> PrivacySpent:
        """Epsilon at `delta`, or at the settings' delta."""
        at = self._config.target_delta if delta is None else delta
        return PrivacySpent(self.get_epsilon(at), at, self.num_releases, "equipoise")

    def would_exceed(
        self, event: GaussianPrivacyEvent, max_epsilon: float | None = None, count: int = 1
    ) -> bool:
        """Whether booking `count` releases more would exceed the limit; nothing is booked."""
        self._check(event, count)
        limit = self._config.max_epsilon if max_epsilon is None else max_epsilon
        if limit is None:
            raise ValueError("max_epsilon is neither given nor in the settings: there is no limit to exceed")
        return self._epsilon([*self._booked, (event, count)], self._config.target_delta) > limit

    def state_dict(self) -> dict[str, object]:
        return {
            "config": _plain(self._config),
            "booked": [{**asdict(event), "count": count} for event, count in self._booked],
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Take over what `state_dict` gave.

        Raises:
            ValueError: it belongs to other settings, or is damaged.
        """
        if state.get("config") != _plain(self._config):
            raise ValueError(
                f"state has config={state.get('config')!r}, this accountant {_plain(self._config)}"
            )
        rows = state.get("booked")
        if not isinstance(rows, list):
            raise ValueError("state holds no list of what was booked")
        booked = []
        for row in rows:
            event = {name: value for name, value in row.items() if name != "count"}
            booked.append((GaussianPrivacyEvent(**event), int(row["count"])))
            self._check(*booked[-1])
        self._booked = booked

    def _check(self, event: GaussianPrivacyEvent, count: int) -> None:
        _validate.count(count=count)
        if event.population_size != self._config.population_size:
            raise ValueError(
                f"population_size={event.population_size} of the event differs from the settings' "
                f"{self._config.population_size}"
            )

    def _epsilon(self, booked: list[tuple[GaussianPrivacyEvent, int]], delta: float) -> float:
        if not 0 < delta < 1:
            raise ValueError(f"delta={delta!r}: a probability strictly between 0 and 1")
        if not booked:
            return 0.0
        events = [dp_accounting.SelfComposedDpEvent(self._event(event), count) for event, count in booked]
        relation = self._config.neighboring_relation.name.lower()
        return epsilon(dp_accounting.ComposedDpEvent(events), delta, relation).value

    def _event(self, event: GaussianPrivacyEvent) -> dp_accounting.DpEvent:
        ratio = 2.0 if self._config.neighboring_relation is NeighboringRelation.REPLACE_ONE else 1.0
        gaussian = dp_accounting.GaussianDpEvent(event.noise_multiplier / ratio)
        if self._config.sampling_method is SamplingMethod.POISSON:
            rate = event.sample_size / event.population_size
            return dp_accounting.PoissonSampledDpEvent(rate, gaussian)
        if self._config.sampling_method is SamplingMethod.WITHOUT_REPLACEMENT:
            return dp_accounting.SampledWithoutReplacementDpEvent(
                event.population_size, event.sample_size, gaussian
            )
        return gaussian


def _plain(config: PrivacyConfig) -> dict[str, object]:
    values = asdict(config)
    names = ("neighboring_relation", "sampling_method")
    return values | {name: values[name].value for name in names}
