"""The plain settings of a training, which `config.json` holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from equipoise import _validate
from equipoise.privacy import Unit
from equipoise.privacy.accounting.epsilon import check_relation
from equipoise.privacy.unit import UserRows

__all__ = ["CommonSettings", "TrainingSettings", "refuse_unknown"]


@dataclass(frozen=True)
class TrainingSettings:
    """The plain settings of a training; see `PrivateTraining` for their meaning."""

    seed: int = 0
    reproducible: bool = False
    micro_batch_size: int | None = None
    ema_decay: float | None = None
    views: int = 1
    relation: str = "add_or_remove_one"
    epsilon_every: int | None = None
    ledger_file: str | None = None
    hardened: bool = False
    allow_public_duplicates: bool = False
    unit: str = "record"
    records_per_user: int | None = None
    user_rows: UserRows | None = None
    noise_for_cohort: float | None = None
    starts_from: Literal["public"] | None = None
    compile: bool = False
    trust: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("reproducible", "hardened", "allow_public_duplicates", "compile"):
            _validate.instance(bool, "False", **{name: getattr(self, name)})
        _validate.instance(int, "0", seed=self.seed)
        _validate.count("the number of augmented views of a record", views=self.views)
        if self.micro_batch_size is not None:
            _validate.count("the number of records held at once", micro_batch_size=self.micro_batch_size)
        if self.epsilon_every is not None:
            _validate.count("the steps between computations of epsilon", epsilon_every=self.epsilon_every)
        if self.ema_decay is not None:
            _validate.share(ema_decay=self.ema_decay)
        if self.starts_from is not None:
            _validate.one_of(("public",), starts_from=self.starts_from)
        if isinstance(self.trust, str) or not all(isinstance(name, str) for name in self.trust):
            raise TypeError(f"trust={self.trust!r} is no tuple of names: give for instance ('router',)")
        object.__setattr__(self, "trust", tuple(self.trust))
        _validate.positive_if_given(
            "the cohort that noise is scaled to", noise_for_cohort=self.noise_for_cohort
        )
        if self.noise_for_cohort is not None and self.ledger_file is not None:
            raise ValueError(
                f"noise_for_cohort={self.noise_for_cohort:g} with a ledger_file, whose other runs could "
                "claim no epsilon beside a simulation: leave ledger_file out"
            )
        check_relation(self.relation)
        if (self.unit == "user") != (self.records_per_user is not None):
            raise ValueError(
                f"unit={self.unit!r} with records_per_user={self.records_per_user!r}: unit='user' needs the "
                "most records of a user that the run uses, a public number that you state, such as "
                "records_per_user=4; single records need none"
            )
        assert self.protected  # raises for what is no unit

    @property
    def protected(self) -> Unit:
        """The unit of privacy."""
        return Unit(self.unit, 1 if self.records_per_user is None else self.records_per_user, self.user_rows)

    @property
    def simulation(self) -> str | None:
        """Why the run claims nothing, where its noise is that of a larger cohort."""
        if self.noise_for_cohort is None:
            return None
        return (
            f"the run is a simulation and not private: its noise is scaled to cohorts of "
            f"{self.noise_for_cohort:,g}, and smaller ones are drawn"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values; `TrainingSettings(**values)` brings them back."""
        return dataclasses.asdict(self)


class CommonSettings(TypedDict, total=False):
    """The fields of `TrainingSettings` that clients and audits take, too, for the training that they make."""

    micro_batch_size: int | None
    relation: str
    hardened: bool
    allow_public_duplicates: bool


def refuse_unknown(function: str, given: Mapping[str, Any], known: type) -> None:
    """Refuse arguments by name that are none of a `TypedDict`.

    Raises:
        TypeError: naming the first of them.
    """
    unknown = given.keys() - known.__annotations__.keys()
    if unknown:
        raise TypeError(f"{function} takes no argument {min(unknown)!r}")
