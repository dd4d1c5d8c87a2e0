"""Projected upload, after PFA: local steps as they are, only what is sent is projected on a public subspace.

    client:   any method, K steps;   sends u = V^T (x - y)
    server:   x <- x - rate_g mean_p V u_p

What local noise lies outside of the span of V is dropped, and so is what the update holds there. The server's
half is `SubspaceAverage`. In the source, clients with weaker protection are projected on the span of those
with stronger protection; here all have the same, and the span is that of public gradients.

Source: Liu, Lou, Xiong, Liu and Meng 2021, "Projected Federated Averaging with Heterogeneous Differential
Privacy", simplified as in PCDP-SGD's comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from equipoise.federated.methods.fedpcdp import SubspaceUpload, checked_form
from equipoise.federated.methods.round_subspace import Form, RoundSubspace
from equipoise.federated.round_protocol import RoundWrapper
from equipoise.methods import Method
from equipoise.methods.base import Plan
from equipoise.methods.card import Card
from equipoise.methods.public_records import PublicRecords

__all__ = ["ProjectedUpload"]


class ProjectedUpload(SubspaceUpload, RoundWrapper):
    """The client's half.

    Args:
        method: what estimates the gradient.
        directions: the public records and their subspace.
        form: what is sent: "combination" or "coordinates".
    """

    name: ClassVar[str] = "projected-upload"
    card: ClassVar[Card] = Card(
        summary="Any method; what is sent is projected on the span of public gradients.",
        claim="Short uploads, and the noise outside of the span is dropped; private as the inner method is.",
        source="Liu et al. 2021, Projected Federated Averaging, simplified",
        guarantee="proven",
        cost="that of the inner method, and a pass over the public records a round",
        use_when="Sending is dear and public records of the task are at hand.",
        avoid_when="The subspace misses much of the update: that bias stays.",
    )

    def __init__(self, method: Method, directions: RoundSubspace, *, form: Form = "combination") -> None:
        super().__init__(method)
        self.directions, self.form = directions, checked_form(form)

    def assumptions(self, plan: Plan | None = None) -> Sequence[str]:
        """The inner method's, and that the public records are public."""
        return tuple(dict.fromkeys((*self.inner.assumptions(plan), *self.directions.public.assumptions())))

    def public_batches(self) -> Sequence[PublicRecords]:
        """The inner method's, and those of the directions."""
        return (*self.inner.public_batches(), self.directions.public)

    def config(self) -> dict[str, Any]:
        own = {"form": self.form, "public": self.directions.public.describe()}
        return {**super().config(), **own}
