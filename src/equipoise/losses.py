"""Losses that treat each record by itself where the usual form does not."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from equipoise import _validate


def sampled_softmax(queries: Tensor, items: Tensor, labels: Tensor, negatives: int = 100) -> Tensor:
    """Cross-entropy over a large catalogue, from negatives that each record draws for itself.

    With q a record's query, e_j the embedding of item j of N, y the label, and S `negatives` items drawn
    uniformly with replacement from all of them but y:

        loss = log(exp(q e_y) + (N - 1) / |S| sum_{j in S} exp(q e_j)) - q e_y,

    whose sum over S is an unbiased estimate of that of the whole softmax. Negatives that are the other
    records of the batch (in-batch negatives) would mix records. Source: Bengio and Senecal 2008, "Adaptive
    importance sampling to accelerate training of a neural probabilistic language model".

    Args:
        queries: [B, D].
        items: embeddings of the whole catalogue, [N, D], N > 1: `model.items.weight`, say.
        labels: items that were chosen, int64 [B].
        negatives: how many items a record draws, a public number.

    Returns:
        [B], one loss per record.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> queries, items, labels = torch.randn(4, 4), torch.randn(1000, 4), torch.tensor([1, 2, 3, 999])
        >>> whole = functional.cross_entropy(queries @ items.T, labels, reduction="none")
        >>> drawn = torch.stack([sampled_softmax(queries, items, labels, 500) for _ in range(50)]).mean(0)
        >>> bool(((drawn - whole).abs() < 0.1).all())
        True
    """
    _validate.count("the items that a record draws", negatives=negatives)
    count = len(items)
    if count < 2:
        raise ValueError(f"items holds {count} rows; a choice needs at least two")
    others = torch.randint(count - 1, (len(queries), negatives), device=labels.device)
    others = others + (others >= labels.unsqueeze(1))  # all but the label
    chosen = functional.embedding(labels, items)
    drawn = functional.embedding(others, items)
    right = (queries * chosen).sum(1, keepdim=True)
    wrong = (drawn * queries.unsqueeze(1)).sum(2) + math.log((count - 1) / negatives)
    return torch.cat([right, wrong], dim=1).logsumexp(1) - right.squeeze(1)
