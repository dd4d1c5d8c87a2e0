"""Does anything else move? Steps on neighbouring data sets, with a model and data of your own.

The guarantee says how far the released sum may move when one record enters, leaves or is replaced. Here it is
measured. A training is prepared, a step is taken on either data set, and the difference of the exact sums is
held against the bound that the noise follows. Several steps are compared under the same releases, so that
both stay at the same parameters.

One record of the data leaves, at each position another one. What enters in its place is a copy of a record
with other contents, and at every other position one whose floating-point numbers are far larger than those
of the data (`SCALES`). So records of large gradients are met, too.

Two positions are those of the smallest and the largest record, by how many numbers a batch of one holds, or
by their norm. Either enters where it was not before, and replaces the other: a long text among short ones
shows padding that is not masked.

What is compared must differ by one record only. Every other record keeps its number, which keys the random
numbers of its item; the draws hold the same others; and the record that is audited is in every draw. Where
collate, augmentation, model or loss draw random numbers (dropout, places assigned at random) that record
comes last in its draw, so that the others keep theirs: their law is the same with it and without, and the
proof may leave them where they are. Otherwise it stands at a position of the draw that is tried.

A record whose own gradient is left out (`"silent"`) shows what else moves: nothing may.

This compares what was tried, and proves nothing. A model that mixes records only under conditions that the
data do not meet passes.
"""

from equipoise.audit.neighbours.neighbour_audit import audit_neighbours
from equipoise.audit.neighbours.neighbour_findings import (
    CHANGES,
    MOVEMENT_SLACK,
    NeighbourAudit,
    NeighbourPair,
)
from equipoise.audit.neighbours.scaled_copies import SCALES

__all__ = [
    "CHANGES",
    "MOVEMENT_SLACK",
    "SCALES",
    "NeighbourAudit",
    "NeighbourPair",
    "audit_neighbours",
]
