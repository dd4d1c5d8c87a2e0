"""What is claimed of a run, recomputed, verified and signed."""

from equipoise.statements.recompute import Finding
from equipoise.statements.signatures import KeyFileError, Signature

__all__ = ["Finding", "KeyFileError", "Signature"]
