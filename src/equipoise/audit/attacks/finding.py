"""What an attack on a published claim found."""

from __future__ import annotations

from dataclasses import dataclass, field

from equipoise.audit.bounds import Certificate

__all__ = ["Finding"]


@dataclass(frozen=True)
class Finding:
    """A claim beside what was certified against it.

    Attributes:
        name: of the attack.
        target: what was attacked, with its constants.
        claimed: epsilon as published, at the certificate's delta.
        certificate: what the runs prove.
        unbounded: whether an event has probability zero without the record, so that no epsilon holds.
        details: further figures, by name.
    """

    name: str
    target: str
    claimed: float
    certificate: Certificate
    unbounded: bool = False
    details: dict[str, float] = field(default_factory=dict)

    @property
    def succeeds(self) -> bool:
        """Whether the claim is refuted."""
        return self.unbounded or self.certificate.epsilon > self.claimed
