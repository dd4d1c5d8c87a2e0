"""Secure sums (experimental): the server learns the sum of the clients' replies, and no single one.

Nothing is claimed for what the sum hides beyond each client's own noise. `README.md` says how it is used.
"""

from contrib.secure_sum.client import SecureClient, SumClaim, noise_share
from contrib.secure_sum.exchange import InProcessRelay, SecureExchange, check_secure, simulate
from contrib.secure_sum.protocol import SecureSum

__all__ = [
    "InProcessRelay",
    "SecureClient",
    "SecureExchange",
    "SecureSum",
    "SumClaim",
    "check_secure",
    "noise_share",
    "simulate",
]
