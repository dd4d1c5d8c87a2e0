"""What papers printed, each a class of its own with its formulas: algorithm, noise and claim."""

from equipoise.methods.published.adaptive_rms import AdaptiveRMS
from equipoise.methods.published.dc_dpsgd import DCDPSGD
from equipoise.methods.published.dice_sgd import DiceSGD
from equipoise.methods.published.dp_c4 import DPC4, DPC4Plus

__all__ = ["DCDPSGD", "DPC4", "AdaptiveRMS", "DPC4Plus", "DiceSGD"]
