"""Refusals that teach: what cannot be computed per record, where it is, why, and what to do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RefusedParameter:
    """A parameter whose rows cannot be computed."""

    name: str
    reason: str
    remedy: str


class CoverageError(RuntimeError):
    """Some trainable parameters have no per-sample gradients; ``refused`` lists them all."""

    def __init__(self, refused: Sequence[RefusedParameter]) -> None:
        self.refused = tuple(refused)
        places: dict[tuple[str, str], list[str]] = {}
        for one in self.refused:
            place = f"{one.name} in {one.name.rpartition('.')[0] or 'the model itself'}"
            places.setdefault((one.reason, one.remedy), []).append(place)
        lines = [
            f"  {', '.join(found[:3])}{f' and {len(found) - 3} more' * (len(found) > 3)}: {reason}. {remedy}."
            for (reason, remedy), found in places.items()
        ]
        super().__init__(
            f"{len(self.refused)} trainable parameters have no per-sample gradients:\n" + "\n".join(lines)
        )


class CrossRecordError(RuntimeError):
    """A record's loss, or its gradient, depends on other records of the batch.

    Args:
        found: what mixes them, and where.
        module_path: of the module that does, if it is one of the model's.
        module_type: its class, if it is known, after "frozen " for a batch norm that trains nothing.
        operation: of PyTorch, if it is known.
    """

    def __init__(
        self, found: str, module_path: str | None = None, module_type: str = "", operation: str = ""
    ) -> None:
        self.found, self.module_path = found, module_path
        if module_path is not None:
            found += f", in module {module_path or '(the model itself)'!r} ({module_type})"
        elif module_type:
            found += f", in a module outside of the model ({module_type})"
        super().__init__(
            f"the records of a batch are mixed: {found}. Per-example gradients are not defined there; "
            f"{_remedy(found, module_path, module_type, operation)}."
            + f" Or answer for it yourself, by Run(trust=({module_path!r},))."
            * bool(module_path)
        )


#: What to do, by a part of the operation's name.
_REMEDIES = {
    ("batch_norm",): "use F.group_norm, or the running statistics (training=False)",
    ("mm", "dot", "attention", "softmax", "cdist"): (
        "let attention run within a record (batch_first=True, if batches come first), and draw the negatives "
        "of a softmax or contrastive loss from public ids or records in the loss, as "
        "equipoise.losses.sampled_softmax does, or let each item of data hold its pair or triplet; of a "
        "product whose diagonal alone is used, write (a * b).sum(1)"
    ),
    (
        *("sort", "topk", "kthvalue", "cumsum", "median", "quantile", "nonzero", "roll", "flip", "index"),
        *("cat", "select", "slice"),
    ): (
        "order, count or choose among a record's own entries alone: no mixup between records, no neighbour "
        "in the batch, no capacity that records share; an entry by label is logits.gather(1, label[:, None])"
    ),
    ("mean", "sum", "var", "std", "max", "min", "any", "all", "norm", "loss"): (
        "a statistic over the batch has to go, such as a loss that balances experts: take it over a record's "
        "own entries (reduction='none' in a loss; a mask [B, T] of its own, not one of all)"
    ),
    ("lstm", "gru", "rnn"): (
        "recurrent layers take [time, records, ...] unless batch_first=True, and an input of two dimensions "
        "is one record"
    ),
}


def _remedy(found: str, module_path: str | None, module_type: str, operation: str) -> str:
    if module_type.startswith("frozen"):
        return "call eval() on it before the training: it then uses its running statistics, and stays so"
    if "BatchNorm" in module_type:
        name = "that_module" if module_path is None else "model"
        return (
            f"put GroupNorm in its place by {name} = equipoise.replace_batch_norm({name}), before the "
            f"optimizer is made, or call eval() on it"
        )
    if "follows values" in found:
        return (
            "a branch on the batch has to go: write torch.where on a record's own entries, which can be "
            "traced and proved; mask by a record's own length and pad to a fixed width "
            "(equipoise.data.PadTo), not to the longest"
        )
    without_rule = re.search(r"no rule for aten\.(\w+)", found)
    operation = operation or (without_rule[1] if without_rule else "")
    for parts, remedy in _REMEDIES.items():
        if any(part in operation for part in parts):
            return remedy
    if "meet" in found:  # entry by entry
        return (
            "a statistic over the batch has to go, and an output [B, 1] minus a target [B] is [B, B]: give "
            "both one shape, for instance output.squeeze(1)"
        )
    return (
        "compute it record by record: a statistic over the batch has to go, such as a loss that balances "
        "experts, and a branch on it (torch.where "
        "on a record's own entries can be traced and proved); a view, a transpose or a permute must leave "
        "the records' axis what it is; a backward of your own or a hook has to treat every record by itself"
    )


class ForwardWritesError(RuntimeError):
    """The model changed its own parameters, without noise; ``names`` lists them."""

    what = "its parameters"
    remedy = (
        "Take max_norm off embeddings (bound their rows after optimizer.step() instead), and keep running "
        "statistics out of the model, or update them from public records alone"
    )

    def __init__(self, names: Sequence[str], reason: str = "", remedy: str = "") -> None:
        self.names = tuple(names)
        super().__init__(
            f"the model changes {self.what} {list(names)} while it runs{f' ({reason})' * bool(reason)}: what "
            "a forward writes follows the private records, and would be published or move later gradients "
            f"without noise. {remedy or self.remedy}"
        )


class BufferWritesError(ForwardWritesError):
    """The model changed a buffer; it is as it was. ``names`` lists them."""

    what = "its buffers"
    remedy = (
        "Switch the statistics off (track_running_stats=False, or eval() for that layer), or update them "
        "from public records outside of the private training"
    )


class TensorWritesError(ForwardWritesError):
    """Model or loss changed a tensor that is neither parameter nor buffer; ``names`` lists them."""

    what = "tensors of its own, or of the loss, in place,"
    remedy = (
        "Register them as buffers (register_buffer), which are put back; bind a new tensor in the place of "
        "the old one, which is forgotten; or change them outside of the loss, from public records or "
        "released parameters"
    )
