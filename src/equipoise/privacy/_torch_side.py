"""What mechanisms and samplings need only to draw, imported when it is first used.

Who verifies a run reads its plans and adds up their losses, and has no torch.
"""

# Others import from here what this module only passes on.
# mypy: implicit-reexport
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from equipoise._lazy import later

if TYPE_CHECKING:
    import torch
    from cryptography.hazmat.primitives import ciphers

    from equipoise.privacy import by_author, private
    from equipoise.privacy.bounds import bounded, requirements
    from equipoise.privacy.bounds.bounded import Bounded
    from equipoise.privacy.noise import secrets, uniform
    from equipoise.privacy.noise import streams as keyed
    from equipoise.privacy.noise.secrets import Secrets
    from equipoise.privacy.noise.streams import ReleaseStreams
else:
    torch, ciphers = later("torch"), later("cryptography.hazmat.primitives.ciphers")
    by_author, private = later("equipoise.privacy.by_author"), later("equipoise.privacy.private")
    bounded = later("equipoise.privacy.bounds.bounded")
    requirements = later("equipoise.privacy.bounds.requirements")
    secrets, uniform = later("equipoise.privacy.noise.secrets"), later("equipoise.privacy.noise.uniform")
    keyed = later("equipoise.privacy.noise.streams")
    Bounded = ReleaseStreams = Secrets = Any  # names in annotations, which nothing evaluates
