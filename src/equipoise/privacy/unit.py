"""The unit of privacy: what one neighbouring data set has more, less or other than the next.

A record by default. A user may own several records, and then the guarantee is that of all of them together.
Two ways lead there, which differ in what is drawn:

*Records drawn by themselves* (`rows=None`). Every record decides on its own whether it enters a draw, and is
clipped by itself. A user who owns G records moves a sum by k bounds where k of them are drawn. Under Poisson
sampling at rate q, k is binomial, and the release is a mixture of Gaussians:

    remove    P = sum_k Binomial(G, q)(k) N(k)     Q = N(0)
    add       the same, exchanged

Its event is `MixtureOfGaussiansDpEvent`. That the parts are vectors which follow from the other records, and
that a user may own fewer than G, is covered: the mixture of lengths k bounds that of any vectors at most as
long (A. Ganesh 2024, "Tight Group-Level DP Guarantees for DP-SGD with Sampling via Mixture of Gaussians
Mechanisms", arXiv:2401.10294; C. Choquette-Choo et al. 2024, arXiv:2310.15526). Where nothing is left to
chance (`FullBatch`, `FixedEpochs`) a user meets one Gaussian of G times a record's part at most.

*Users drawn* (`rows="sum"` or `"mean"`). A row is the sum, or the mean, of its user's gradients, and is
clipped as a whole. With the mean each user counts once: the model fits an average over users (households).
With the sum each record counts once, below the clip norm: an average over records (persons). One user moves
a sum by one bound, and every event is that of records. With `rows="update"` each item of the data is a whole
user already, and its row an update made of all that it holds (`federated.LocalUpdates`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from equipoise import _validate

Joined = Literal["sum", "mean"]
UserRows = Literal["sum", "mean", "update"]

#: A start took 6 s at 1,000 places a user and 17 s at 3,000, for a net of 131 parameters; steps take as much.
#: A choice beyond these: more let a start take minutes before anything is said.
MOST_JOINED = 10_000


@dataclass(frozen=True)
class Unit:
    """The unit of privacy.

    Args:
        name: "record" or "user".
        records: at most so many records of a user are drawn from; 1 for records.
        rows: "sum" or "mean" where a row is all of a user's records, "update" where each item of the data is
            a user; None where records are drawn by themselves.

    Example:
        >>> Unit("user", records=4).group, Unit("user", records=4, rows="mean").group
        (4, 1)
    """

    name: str = "record"
    records: int = 1
    rows: UserRows | None = None

    def __post_init__(self) -> None:
        _validate.one_of(("record", "user"), unit=self.name)
        _validate.count("the most records of a user that are drawn from", records_per_user=self.records)
        if self.rows is not None:
            _validate.one_of(("sum", "mean", "update"), rows=self.rows)
        if self.rows is not None and self.records > MOST_JOINED:
            raise ValueError(
                f"records_per_user={self.records} with rows={self.rows!r} is above {MOST_JOINED:,}: "
                "each user takes so many places in a forward, whatever they own. State a smaller cap (of a "
                "user with more records, secret randomness chooses), or make an item of each user "
                "(rows='update')"
            )
        if self.rows == "update" and self.records != 1:
            raise ValueError(
                f"records_per_user={self.records} with rows='update': each item of the data is a whole "
                "user there, however many records it holds; give 1"
            )
        if self.name == "record" and (self.records, self.rows) != (1, None):
            raise ValueError(
                f"records_per_user={self.records} and rows={self.rows!r} belong to users; leave them "
                "out, or name the unit 'user'"
            )

    @property
    def group(self) -> int:
        """How many things that are drawn by themselves belong to one unit, at most."""
        return 1 if self.rows is not None else self.records

    @property
    def joined(self) -> Joined | None:
        """How several records of a user are made one row; None where each item of the data is a row."""
        return None if self.rows == "update" else self.rows

    @property
    def drawn(self) -> str:
        """What a draw draws: "record" or "user"."""
        return "user" if self.rows is not None else "record"

    def describe(self) -> dict[str, Any] | None:
        """Plain values of a unit that is no record; None for records."""
        return None if self.name == "record" else {"records": self.records, "rows": self.rows}


RECORD = Unit()


def unit_from(description: Mapping[str, Any] | None) -> Unit:
    """The unit that `Unit.describe` wrote."""
    if description is None:
        return RECORD
    if set(description) != {"records", "rows"}:
        raise ValueError(f"users has the keys {sorted(description)}, and must have records and rows")
    return Unit("user", **description)
