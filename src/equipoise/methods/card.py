"""What to know of a method before choosing it: `equipoise methods` prints these cards."""

from __future__ import annotations

from dataclasses import dataclass

from equipoise import _validate
from equipoise.privacy.ledger.run_record import GUARANTEES


@dataclass(frozen=True, kw_only=True)
class Card:
    """A method in plain sentences.

    Attributes:
        summary: what it does, in a sentence.
        claim: what its publication claims, and what we found of it.
        source: where it comes from.
        guarantee: what it may claim: "proven", "worst_case" or "none".
        cost: gradients per drawn record and memory, relative to DP-SGD.
        use_when: when it is the right choice.
        avoid_when: when it is not.

    Example:
        >>> from equipoise.methods import find
        >>> find("dp-sgd").card.guarantee
        'proven'
    """

    summary: str
    claim: str
    source: str
    guarantee: str
    cost: str
    use_when: str
    avoid_when: str

    def __post_init__(self) -> None:
        _validate.one_of(GUARANTEES, guarantee=self.guarantee)
