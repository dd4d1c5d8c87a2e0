"""Partitions of a data set among simulated clients.

=============  ==========================================================================================
`iid`          a random partition into shares of equal size
`dirichlet`    of every class, client p gets a share drawn from Dirichlet(alpha): small alpha, few classes
`shards`       the records are sorted by class and cut into equal shards; every client gets some at random
`one_class`    every client holds records of a single class
=============  ==========================================================================================

A simulation's partition is public: it looks at labels, which real clients would never show.

Sources: of `dirichlet`, Hsu, Qi and Brown 2019, "Measuring the Effects of Non-Identical Data Distribution for
Federated Visual Classification"; of `shards`, McMahan et al. 2017, "Communication-Efficient Learning of Deep
Networks from Decentralized Data".
"""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from equipoise import _validate


def iid(num_records: int, clients: int, seed: int = 0) -> list[Tensor]:
    """Sorted record numbers of each client; the rest of an uneven division is left out.

    Args:
        num_records: N.
        clients: P, at most N.
        seed: of the public shuffle.

    Returns:
        P LongTensors of N // P numbers each.

    Example:
        >>> [len(part) for part in iid(10, 3)]
        [3, 3, 3]
    """
    size = _check(num_records, clients)
    order = torch.randperm(num_records, generator=_rng(seed))
    return [order[p * size : (p + 1) * size].sort().values for p in range(clients)]


def dirichlet(labels: Tensor, clients: int, alpha: float = 0.5, seed: int = 0) -> list[Tensor]:
    """Sorted record numbers of each client, sizes unequal; no client is left without a record.

    Args:
        labels: [N] classes.
        clients: P.
        alpha: > 0; 0.1 gives most clients one or two classes, 100 is nearly iid.
        seed: of the public draw.

    Raises:
        ValueError: after 100 draws some client still had no record: take a larger alpha or fewer clients.

    Example:
        >>> parts = dirichlet(torch.arange(100) % 4, clients=5, alpha=1.0)
        >>> sum(len(part) for part in parts)
        100
    """
    _check(len(labels), clients)
    _validate.positive("the concentration", alpha=alpha)
    rng, shares = _rng(seed), numpy.random.default_rng(seed)
    for _ in range(100):
        parts: list[list[Tensor]] = [[] for _ in range(clients)]
        for label in torch.unique(labels):
            members = (labels == label).nonzero().flatten()
            members = members[torch.randperm(len(members), generator=rng)]
            weights = torch.from_numpy(shares.dirichlet([alpha] * clients))
            cuts = (weights.cumsum(0) * len(members)).round().long()
            cuts[-1] = len(members)  # rounding may leave the last one short
            for p, piece in enumerate(torch.tensor_split(members, cuts[:-1])):
                parts[p].append(piece)
        joined = [torch.cat(pieces).sort().values for pieces in parts]
        if all(len(part) for part in joined):
            return joined
    raise ValueError(
        f"alpha={alpha!r} left one of {clients} clients without a record 100 times over: take a larger alpha "
        "or fewer clients"
    )


def shards(labels: Tensor, clients: int, each: int = 2, seed: int = 0) -> list[Tensor]:
    """Sorted record numbers of each client: a few stretches of the records in the order of their classes.

    Args:
        labels: [N] classes.
        clients: P.
        each: shards of a client, of N // (P each) records; the rest of an uneven division is left out.
        seed: of the public draw.

    Example:
        >>> labels = torch.arange(12) % 3
        >>> [labels[part].tolist() for part in shards(labels, clients=3)]
        [[1, 1, 2, 2], [0, 0, 1, 1], [2, 2, 0, 0]]
    """
    _validate.count(each=each)
    size = _check(len(labels), clients * each)
    order = labels.argsort(stable=True)[: size * clients * each].view(-1, size)
    given = torch.randperm(len(order), generator=_rng(seed)).view(clients, each)
    return [order[mine].flatten().sort().values for mine in given]


def one_class(labels: Tensor, clients: int, seed: int = 0) -> list[Tensor]:
    """Sorted record numbers of each client: client p holds only records of class number p mod (classes).

    Clients that share a class split it evenly; the rest of an uneven division is left out.

    Example:
        >>> labels = torch.arange(12) % 3
        >>> [labels[part].tolist() for part in one_class(labels, clients=6)][:2]
        [[0, 0], [1, 1]]
    """
    _check(len(labels), clients)
    classes, rng = torch.unique(labels), _rng(seed)
    parts: dict[int, Tensor] = {}
    for number, label in enumerate(classes):
        owners = list(range(number, clients, len(classes)))
        members = (labels == label).nonzero().flatten()
        members = members[torch.randperm(len(members), generator=rng)]
        size = len(members) // max(1, len(owners))
        for k, owner in enumerate(owners):
            if not size:
                raise ValueError(
                    f"class {label.item()} has {len(members)} records for {len(owners)} clients; take fewer"
                )
            parts[owner] = members[k * size : (k + 1) * size].sort().values
    return [parts[p] for p in range(clients)]


def _check(num_records: int, clients: int) -> int:
    _validate.count(clients=clients)
    if num_records < clients:
        raise ValueError(f"clients={clients}: {num_records} records are too few for so many")
    return num_records // clients


def _rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
