"""Training with several data owners: every client keeps its records, its noise and its ledger to itself.

The unit of privacy is one record at one client. The server and the other clients are honest but curious:
whatever leaves a client went through that client's ledger, and each client's epsilon is its own.
"""

from equipoise.federated.client import Client
from equipoise.federated.driver import Exchange, History, Round, run_rounds, simulate
from equipoise.federated.errors import Refused
from equipoise.federated.partitions import dirichlet, iid, one_class
from equipoise.federated.proximal import Proximal
from equipoise.federated.server_radius import ServerRMS
from equipoise.federated.strategies import AdaptDPFedAvg, FedAvg, Reply, Strategy

__all__ = [
    "AdaptDPFedAvg",
    "Client",
    "Exchange",
    "FedAvg",
    "History",
    "Proximal",
    "Refused",
    "Reply",
    "Round",
    "ServerRMS",
    "Strategy",
    "dirichlet",
    "iid",
    "one_class",
    "run_rounds",
    "simulate",
]
