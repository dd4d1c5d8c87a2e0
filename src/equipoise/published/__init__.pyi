from equipoise.published.adaptive_rms import AdaptiveRMS as AdaptiveRMS
from equipoise.published.dc_dpsgd import DCDPSGD as DCDPSGD
from equipoise.published.dice_sgd import DiceSGD as DiceSGD
from equipoise.published.dp_c4 import DPC4 as DPC4
from equipoise.published.dp_c4 import DPC4Plus as DPC4Plus
from equipoise.published.pcdp_sgd import PCDPSGD as PCDPSGD
from equipoise.published.pcdp_sgd import PDPSGD as PDPSGD
from equipoise.published.pcdp_sgd import BiasedGEP as BiasedGEP
