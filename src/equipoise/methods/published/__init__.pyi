from equipoise.methods.published.adaptive_rms import AdaptiveRMS as AdaptiveRMS
from equipoise.methods.published.dc_dpsgd import DCDPSGD as DCDPSGD
from equipoise.methods.published.dice_sgd import DiceSGD as DiceSGD
from equipoise.methods.published.dp_c4 import DPC4 as DPC4
from equipoise.methods.published.dp_c4 import DPC4Plus as DPC4Plus
from equipoise.methods.published.pcdp_sgd import PCDPSGD as PCDPSGD
from equipoise.methods.published.pcdp_sgd import PDPSGD as PDPSGD
from equipoise.methods.published.pcdp_sgd import BiasedGEP as BiasedGEP
