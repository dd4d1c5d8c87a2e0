from equipoise.methods.published.pcdp_sgd import PCDPSGD as PCDPSGD
from equipoise.methods.published.pcdp_sgd import PDPSGD as PDPSGD
from equipoise.methods.published.pcdp_sgd import BiasedGEP as BiasedGEP
