"""One step of every method under audit, clean and with bugs: an audit that misses a fifth of the noise is of
little use.

The certified epsilon must exceed the claim where noise is 0.8 of what is booked, and where a record's part is
1.25 times what is booked. `python -m reproduction.planted_steps [NAME ...]` prints the table.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from equipoise.audit.replay import RecordingLedger
from equipoise.privacy import RECORD, Budget, Draw, Unit
from equipoise.privacy.mechanisms.base import Sums
from equipoise.testing.checks import Check, check_noise
from equipoise.testing.designs import ONE_STEP, Design, with_options
from equipoise.testing.method_audit import Audit, audit_method, find_design

__all__ = ["Altered", "Long", "Probe", "Quiet", "probe_method"]


class Altered(RecordingLedger):
    """Everything that leaves with other noise, or longer sums, than is booked, whatever the mechanism.

    Attributes:
        noise_by, sums_by: factors.
    """

    noise_by, sums_by = 1.0, 1.0

    def release(self, draw: Draw, sums: Mapping[str, Any], checks: Any = ()) -> Sums:
        out = super().release(draw, sums, checks)
        for name, tensors in out.items():
            for key, value in tensors.items():
                raw = self.sums[-1][name][key]
                altered = self.sums_by * raw + self.noise_by * (value - raw)
                tensors[key] = altered.to(value.dtype)
                self.transcript[-1][name][key] = tensors[key].clone()
        return out


class Quiet(Altered):
    """All noise at 0.8 of its scale."""

    noise_by = 0.8


class Long(Altered):
    """All sums a quarter longer than booked."""

    sums_by = 1.25


@dataclass(frozen=True)
class Probe:
    """A method's step as it is and with bugs.

    Attributes:
        clean: the audit of the step.
        quiet, long: of the step with 0.8 of the noise, and with sums 1.25 times as long; None where nothing
            leaves with noise, or nothing is claimed.
        noise: release -> check of its noise, clean and at 0.8.
    """

    clean: Audit
    quiet: Audit | None
    long: Audit | None
    noise: Mapping[str, tuple[Check, Check]]

    @property
    def holds(self) -> bool:
        """Nothing is wrong with the step as it is."""
        return self.clean.holds and all(clean.passes for clean, _ in self.noise.values())

    @property
    def finds(self) -> bool:
        """What was planted is seen: either bug by the certificate, and every release's noise by its check."""
        planted = (found for found in (self.quiet, self.long) if found is not None)
        return not any(found.holds for found in planted) and not any(
            quiet.passes for _, quiet in self.noise.values()
        )


def probe_method(
    method: str | Design,
    epsilon: float = 2.0,
    delta: float = 1e-5,
    *,
    options: Mapping[str, Any] | None = None,
    relation: str = "add_or_remove_one",
    seed: int = 0,
    confidence: float = 0.99,
    unit: Unit = RECORD,
) -> Probe:
    """Audit one step of a method, and the same step with bugs.

    Args:
        method: a name of `ONE_STEP`, or how to audit a method of your own (`Design(rate=1.0)`).
        epsilon, delta: what the noise is calibrated to.
        options: further arguments of the method.
        relation: of the claim and of the neighbours.
        seed: of canaries and noise.
        confidence: of each certificate.
        unit: of the claim: a record, or a user with so many records.

    Example:
        >>> from dataclasses import replace
        >>> found = probe_method(replace(find_design("dp-sgd", one_step=True), canaries=20_000))
        >>> found.holds, found.finds
        (True, True)
    """
    design = with_options(find_design(method, one_step=True), options or {})

    def audit(ledger: type[RecordingLedger], trainings: int) -> Audit:
        return audit_method(
            design,
            epsilon,
            delta,
            relation=relation,
            seeds=(seed,),
            confidence=confidence,
            trainings=trainings,
            make_ledger=ledger,
            unit=unit,
        )

    clean = audit(RecordingLedger, design.trainings)
    if not clean.claimed:
        return Probe(clean, None, None, {})
    fewer = max(1, design.trainings // 2)
    budget = Budget(epsilon, delta)
    without, planted = (check_noise(design, budget, ledger, seed=seed) for ledger in (RecordingLedger, Quiet))
    return Probe(
        clean,
        audit(Quiet, fewer),
        audit(Long, fewer),
        {name: (without[name], planted[name]) for name in without},
    )


def main(names: list[str]) -> int:
    """Print the table of these methods, or of all; gives 1 if a claim is refuted or a bug missed."""
    chosen = names or list(ONE_STEP)
    print("method, claimed, certified, noise x 0.8, sums x 1.25, noise checked, verdict")
    fine = True
    for name in chosen:
        # The certificates are true together with 99%.
        row = probe_method(name, confidence=1 - 0.01 / len(chosen))
        audits = (row.clean, row.quiet, row.long)
        certified = ["-" if audit is None else f"{audit.certified:.3f}" for audit in audits]
        claimed = "nothing" if row.clean.claimed is None else f"{row.clean.claimed:.3f}"
        verdict = "REFUTED" * (not row.holds) + " MISSED" * (not row.finds)
        print(", ".join([name, claimed, *certified, " and ".join(row.noise), verdict.strip()]), flush=True)
        fine = fine and row.holds and row.finds
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
