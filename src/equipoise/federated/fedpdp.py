"""FedPDP: FedPCDP with every record's gradient clipped before it is projected.

    client:   y <- y - rate V (sum_i min(1, C / |g_i|) V^T g_i + N(0, (z C)^2 I_K)) / B

The server's half is `SubspaceAverage`.

Source: the comparison of PCDP-SGD, arXiv 2312.03792, after Zhou, Wu and Banerjee 2021.
"""

from __future__ import annotations

from typing import ClassVar

from equipoise.federated.fedpcdp import RoundProjection
from equipoise.methods import PDPSGD

__all__ = ["RoundPDP"]


class RoundPDP(RoundProjection):
    """The client's half of FedPDP. Arguments of `RoundProjection`."""

    name: ClassVar[str] = "pdp-client"
    card = PDPSGD.card
    clips_rows: ClassVar[bool] = True
