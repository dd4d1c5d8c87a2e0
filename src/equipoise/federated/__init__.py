"""Training with several data owners: every client keeps its records, its noise and its ledger to itself.

The unit of privacy is one record at one client. The server and the other clients are honest but curious:
whatever leaves a client went through that client's ledger, and each client's epsilon is its own.
"""

from equipoise.federated.client import Client
from equipoise.federated.messages import Refused, Reply, Request
from equipoise.federated.methods.averaged_iterate import AveragedIterate, IterateAverage
from equipoise.federated.methods.fedlrs import FedLRS, SparseAverage
from equipoise.federated.methods.fedpcdp import ProjectedUpload, RoundPCDP, RoundPDP, SubspaceAverage
from equipoise.federated.methods.moon import Moon, MoonLoss
from equipoise.federated.methods.proximal import Proximal
from equipoise.federated.methods.round_subspace import RoundSubspace
from equipoise.federated.methods.scaffold import Scaffold, ScaffoldAverage
from equipoise.federated.methods.server_quantile import QuantileFedAvg, ServerQuantile
from equipoise.federated.methods.server_radius import AdaptDPFedAvg, PublishedServerRMS, ServerRMS
from equipoise.federated.partitions import dirichlet, iid, one_class
from equipoise.federated.round_protocol import Extra, RoundProtocol, RoundWrapper
from equipoise.federated.server import (
    Exchange,
    FedAvg,
    FederationHistory,
    RoundReport,
    Strategy,
    run_rounds,
    simulate,
)

__all__ = [
    "AdaptDPFedAvg",
    "AveragedIterate",
    "Client",
    "Exchange",
    "Extra",
    "FedAvg",
    "FedLRS",
    "FederationHistory",
    "IterateAverage",
    "Moon",
    "MoonLoss",
    "ProjectedUpload",
    "Proximal",
    "PublishedServerRMS",
    "QuantileFedAvg",
    "Refused",
    "Reply",
    "Request",
    "RoundPCDP",
    "RoundPDP",
    "RoundProtocol",
    "RoundReport",
    "RoundSubspace",
    "RoundWrapper",
    "Scaffold",
    "ScaffoldAverage",
    "ServerQuantile",
    "ServerRMS",
    "SparseAverage",
    "Strategy",
    "SubspaceAverage",
    "dirichlet",
    "iid",
    "one_class",
    "run_rounds",
    "simulate",
]
