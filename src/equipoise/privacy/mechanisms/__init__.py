"""The noise of one release, and what it costs: a file per mechanism, and the table that reads them back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from equipoise.privacy._torch_side import by_author
from equipoise.privacy.errors import PlanError
from equipoise.privacy.mechanisms.base import Mechanism
from equipoise.privacy.mechanisms.correlated_gaussian import BandedGaussian, OneStepGaussian
from equipoise.privacy.mechanisms.gaussian import Gaussian
from equipoise.privacy.mechanisms.grid_gaussian import GridGaussian
from equipoise.privacy.mechanisms.joint_gaussian import JointGaussian
from equipoise.privacy.mechanisms.staged import Staged

__all__ = [
    "MECHANISMS",
    "BandedGaussian",
    "Gaussian",
    "GridGaussian",
    "JointGaussian",
    "Mechanism",
    "OneStepGaussian",
    "Staged",
    "mechanism_from",
]

MECHANISMS: dict[str, type[Mechanism]] = {
    c.kind: c for c in (Gaussian, JointGaussian, GridGaussian, BandedGaussian, OneStepGaussian, Staged)
}
"""Every mechanism by its kind. A new one is its file and a word here."""


def mechanism_from(description: Mapping[str, Any]) -> Mechanism:
    """The mechanism that `Mechanism.describe` wrote.

    Raises:
        PlanError: of a kind that is not in the table.

    Example:
        >>> mechanism_from(Gaussian(1.5).describe())
        Gaussian(noise_multiplier=1.5)
    """
    kind = description["kind"]
    if kind == "own":
        return by_author.OwnMechanism.described(description)
    if kind not in MECHANISMS:
        raise PlanError(f"mechanism kind={kind!r} is unknown; this version has {', '.join(MECHANISMS)}")
    values = dict(description)
    if "mechanism" in values:  # around another one
        values["mechanism"] = mechanism_from(values["mechanism"])
    return MECHANISMS[kind].from_description(values)
