"""What to know of a method before choosing it: `equipoise methods` prints these cards."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Card"]

GUARANTEES = ("proven", "worst_case", "none")


@dataclass(frozen=True, kw_only=True)
class Card:
    """A method in plain sentences.

    Attributes:
        summary: what it does, in a sentence.
        claim: what its publication claims, and what we found of it.
        source: where it comes from.
        guarantee: what the library's recipe may claim: "proven", "worst_case" or "none".
        published_guarantee: the same of the recipe as published; None where there is no such recipe.
        cost: passes over a batch and memory, relative to DP-SGD.
        use_when: when it is the right choice.
        avoid_when: when it is not.

    Example:
        >>> from equipoise.methods import METHODS
        >>> METHODS["dp-sgd"].card.guarantee
        'proven'
    """

    summary: str
    claim: str
    source: str
    guarantee: str
    published_guarantee: str | None
    cost: str
    use_when: str
    avoid_when: str

    def __post_init__(self) -> None:
        for label in ("guarantee", "published_guarantee"):
            value = getattr(self, label)
            if value not in GUARANTEES and not (value is None and label == "published_guarantee"):
                raise ValueError(f"{label}={value!r}: it must be one of {', '.join(GUARANTEES)}")
