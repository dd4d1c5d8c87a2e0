"""Methods: differentially private estimators of the gradient, one file each, with clip rules and thresholds.

`METHODS` is the table of methods by name. Adding a method is one file and one line here.
"""

from equipoise.methods.adaptive_rms.adaptive_rms import AdaptiveRMS
from equipoise.methods.anchored.dp_c4 import DPC4, DPC4Plus
from equipoise.methods.anchored.dp_svrg import DPSVRG
from equipoise.methods.base import Context, DrawHandle, Method, State
from equipoise.methods.card import Card
from equipoise.methods.clip_rules import CLIP_RULES, NSGD, PSAC, Abadi, AutoS, ClipRule
from equipoise.methods.dp_sgd import DPSGD
from equipoise.methods.feedback.dice_sgd import DiceSGD
from equipoise.methods.non_private import EFSGD, ClipSGD
from equipoise.methods.projected.gep import GEP, BiasedGEP
from equipoise.methods.projected.pcdp_sgd import PCDPSGD
from equipoise.methods.projected.pdp_sgd import PDPSGD
from equipoise.methods.projected.random_projection import RandomProjection
from equipoise.methods.public import PublicOnly, PublicWarmStart
from equipoise.methods.random_sparsification import RandomSparsification
from equipoise.methods.thresholds import (
    ExponentialDecay,
    Fixed,
    LinearDecay,
    ReleasedQuantile,
    Schedule,
    Threshold,
)
from equipoise.methods.two_thresholds.dc_dpsgd import DCDPSGD

METHODS: dict[str, type[Method]] = {
    DPSGD.name: DPSGD,
    DPSVRG.name: DPSVRG,
    DPC4.name: DPC4,
    DPC4Plus.name: DPC4Plus,
    DiceSGD.name: DiceSGD,
    ClipSGD.name: ClipSGD,
    EFSGD.name: EFSGD,
    PCDPSGD.name: PCDPSGD,
    BiasedGEP.name: BiasedGEP,
    GEP.name: GEP,
    PDPSGD.name: PDPSGD,
    RandomProjection.name: RandomProjection,
    RandomSparsification.name: RandomSparsification,
    DCDPSGD.name: DCDPSGD,
    AdaptiveRMS.name: AdaptiveRMS,
    PublicOnly.name: PublicOnly,
    PublicWarmStart.name: PublicWarmStart,
}

__all__ = [
    "CLIP_RULES",
    "DCDPSGD",
    "DPC4",
    "DPSGD",
    "DPSVRG",
    "EFSGD",
    "GEP",
    "METHODS",
    "NSGD",
    "PCDPSGD",
    "PDPSGD",
    "PSAC",
    "Abadi",
    "AdaptiveRMS",
    "AutoS",
    "BiasedGEP",
    "Card",
    "ClipRule",
    "ClipSGD",
    "Context",
    "DPC4Plus",
    "DiceSGD",
    "DrawHandle",
    "ExponentialDecay",
    "Fixed",
    "LinearDecay",
    "Method",
    "PublicOnly",
    "PublicWarmStart",
    "RandomProjection",
    "RandomSparsification",
    "ReleasedQuantile",
    "Schedule",
    "State",
    "Threshold",
]
