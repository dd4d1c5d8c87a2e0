"""Training with several data owners: every client keeps its records, its noise and its ledger to itself.

The unit of privacy is one record at one client. The server and the other clients are honest but curious:
whatever leaves a client went through that client's ledger, and each client's epsilon is its own.
"""

from equipoise.federated.client import Client
from equipoise.federated.driver import Exchange, run_rounds, simulate
from equipoise.federated.errors import Refused
from equipoise.federated.history import History, Round
from equipoise.federated.methods.fedlrs import FedLRS, SparseAverage
from equipoise.federated.methods.fedpcdp import RoundPCDP, RoundPDP, SubspaceAverage
from equipoise.federated.methods.moon import Moon, MoonLoss
from equipoise.federated.methods.projected_upload import ProjectedUpload
from equipoise.federated.methods.proximal import Proximal
from equipoise.federated.methods.round_subspace import RoundSubspace
from equipoise.federated.methods.scaffold import Scaffold, ScaffoldAverage
from equipoise.federated.methods.server_quantile import QuantileFedAvg, ServerQuantile
from equipoise.federated.methods.server_radius import ServerRMS
from equipoise.federated.partitions import dirichlet, iid, one_class
from equipoise.federated.secure_client import SecureClient, SumClaim, noise_share
from equipoise.federated.secure_sum import SecureSum
from equipoise.federated.strategies import AdaptDPFedAvg, FedAvg, Reply, Strategy

__all__ = [
    "AdaptDPFedAvg",
    "Client",
    "Exchange",
    "FedAvg",
    "FedLRS",
    "History",
    "Moon",
    "MoonLoss",
    "ProjectedUpload",
    "Proximal",
    "QuantileFedAvg",
    "Refused",
    "Reply",
    "Round",
    "RoundPCDP",
    "RoundPDP",
    "RoundSubspace",
    "Scaffold",
    "ScaffoldAverage",
    "SecureClient",
    "SecureSum",
    "ServerQuantile",
    "ServerRMS",
    "SparseAverage",
    "Strategy",
    "SubspaceAverage",
    "SumClaim",
    "dirichlet",
    "iid",
    "noise_share",
    "one_class",
    "run_rounds",
    "simulate",
]
