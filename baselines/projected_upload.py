"""Projected upload: any method at the clients; what is sent is projected on the span of public gradients.

    K steps of any method, then a client sends    u = V^T (x - y), or the combination of public gradients

What the update, and its noise, hold outside of the span is dropped. See `RoundSubspace` for V.

Source: Liu, Lou, Xiong, Liu and Meng 2021, "Projected Federated Averaging with Heterogeneous Differential
Privacy" (PFA), as simplified in PCDP-SGD, arXiv 2312.03792: in PFA clients with weaker protection are
projected on the span of those with stronger protection; here all have the same, and the span is that of
public gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar

from equipoise.federated import RoundSubspace, RoundWrapper
from equipoise.federated.methods.fedpcdp import SubspaceUpload
from equipoise.federated.methods.round_subspace import Form
from equipoise.federated.registry import FEDERATED, dp_sgd
from equipoise.methods.base import Plan
from equipoise.methods.card import Card
from equipoise.methods.public_records import PublicRecords

__all__ = ["PROJECTED_UPLOAD", "ProjectedUpload"]


@dataclass(frozen=True)
class ProjectedUpload(SubspaceUpload, RoundWrapper):
    """The client's half of projected upload.

    Args:
        inner: estimates the gradient.
        source: the public records and their subspace.
        form: what is sent: "combination" or "coordinates".
    """

    name: ClassVar[str] = "projected-upload"
    card: ClassVar[Card] = Card(
        summary="Any method; what is sent is projected on the span of public gradients.",
        claim="Short uploads, and the noise outside of the span is dropped; private as the inner method is.",
        source="Liu et al. 2021, Projected Federated Averaging, simplified",
        guarantee="proven",
        cost="that of the inner method, and a pass over the public records per round",
        use_when="Sending is dear and public records of the task are at hand.",
        avoid_when="The subspace misses much of the update: that bias stays.",
    )

    source: RoundSubspace
    _: KW_ONLY
    form: Form = "combination"

    def assumptions(self, plan: Plan | None = None) -> Sequence[str]:
        return tuple(dict.fromkeys((*super().assumptions(plan), *self.source.public.assumptions())))

    def public_batches(self) -> Sequence[PublicRecords]:
        return (*super().public_batches(), self.source.public)


PROJECTED_UPLOAD = replace(
    FEDERATED["fedpcdp"],
    summary="DP-SGD; what is sent is projected on the span of public gradients, after PFA",
    published=None,
    method=lambda setup: ProjectedUpload(dp_sgd(setup), setup.directions, form=setup.options["form"]),
)
