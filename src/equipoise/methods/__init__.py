"""Methods: differentially private estimators of the gradient, one file each, with clip rules and thresholds.

`METHODS` is the table of methods by name. Adding a method is one file and one line here.
"""

from equipoise.methods.base import Context, DrawHandle, Method, State
from equipoise.methods.card import Card
from equipoise.methods.clip_rules import CLIP_RULES, NSGD, PSAC, Abadi, AutoS, ClipRule
from equipoise.methods.dp_sgd import DPSGD
from equipoise.methods.thresholds import (
    ExponentialDecay,
    Fixed,
    LinearDecay,
    ReleasedQuantile,
    Schedule,
    Threshold,
)

METHODS: dict[str, type[Method]] = {
    DPSGD.name: DPSGD,
}

__all__ = [
    "CLIP_RULES",
    "DPSGD",
    "METHODS",
    "NSGD",
    "PSAC",
    "Abadi",
    "AutoS",
    "Card",
    "ClipRule",
    "Context",
    "DrawHandle",
    "ExponentialDecay",
    "Fixed",
    "LinearDecay",
    "Method",
    "ReleasedQuantile",
    "Schedule",
    "State",
    "Threshold",
]
