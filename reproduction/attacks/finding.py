"""What an attack on a published claim found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from equipoise.audit.bounds import Certificate
from equipoise.cli.audit_command import certificate_values

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

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "name": self.name,
            "target": self.target,
            "claimed_epsilon": self.claimed,
            "certified_epsilon": None if self.unbounded else self.certificate.epsilon,
            "unbounded": self.unbounded,
            "succeeds": self.succeeds,
            "certificate": certificate_values(self.certificate),
            "details": self.details,
        }
