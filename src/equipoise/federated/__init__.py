"""Training with several data owners: every client keeps its records, its noise and its ledger to itself.

The unit of privacy is one record at one client. The server and the other clients are honest but curious:
whatever leaves a client went through that client's ledger, and each client's epsilon is its own.
"""

from equipoise._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
