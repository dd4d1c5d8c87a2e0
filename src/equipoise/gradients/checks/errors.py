"""Refusals that teach: what cannot be computed per record, where it is, why, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "BufferWritesError",
    "CoverageError",
    "CrossRecordError",
    "ForwardWritesError",
    "RefusedParameter",
    "TensorWritesError",
]


@dataclass(frozen=True)
class RefusedParameter:
    """A parameter whose rows cannot be computed."""

    name: str
    module_path: str
    reason: str
    remedy: str


class CoverageError(RuntimeError):
    """Some trainable parameters have no per-sample gradients; ``refused`` lists them all."""

    def __init__(self, refused: Sequence[RefusedParameter]) -> None:
        self.refused = tuple(refused)
        places: dict[tuple[str, str], list[str]] = {}
        for one in self.refused:
            place = f"{one.name} in {one.module_path or 'the model itself'}"
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
            + f" Or answer for it yourself, by trust=({module_path!r},)."
            * bool(module_path)
        )


#: What to do, by a part of the operation's name.
_REMEDIES = {
    ("batch_norm",): "use F.group_norm, or the running statistics (training=False)",
    ("mm", "dot", "attention", "softmax", "cdist"): (
        "let attention run within a record (batch_first=True, if batches come first), and draw the negatives "
        "of a softmax or contrastive loss from public ids or records in the loss, or let each item of data "
        "hold its pair or triplet"
    ),
    ("sort", "topk", "cumsum", "median", "quantile", "nonzero"): (
        "order or count a record's own entries alone; a capacity that records share, or a choice among them, "
        "has to go"
    ),
    ("mean", "sum", "var", "std", "max", "min", "any", "all", "norm"): (
        "a statistic over the batch has to go, such as a loss that balances experts: take it over a record's "
        "own entries (reduction='none' in a loss)"
    ),
    ("roll", "flip", "index", "cat", "select", "slice"): (
        "a record has to stay by itself: no mixup between records, no neighbour in the batch"
    ),
    ("lstm", "gru", "rnn"): (
        "recurrent layers take [time, records, ...] unless batch_first=True, and an input of two dimensions "
        "is one record"
    ),
    ("loss",): "give one number per record, by reduction='none'",
}


def _remedy(found: str, module_path: str | None, module_type: str, operation: str) -> str:
    if module_type.startswith("frozen"):
        return "call eval() on it before the training: it then uses its running statistics, and stays so"
    if "BatchNorm" in module_type and module_path is None:
        return (
            "before the training, put GroupNorm in its place by that_module = "
            "equipoise.replace_batch_norm(that_module), or call that_module.eval()"
        )
    if "BatchNorm" in module_type:
        return (
            "put GroupNorm in its place by model = equipoise.replace_batch_norm(model), before the optimizer "
            "is made, or call eval() on it"
        )
    for parts, remedy in _REMEDIES.items():
        if any(part in operation for part in parts):
            return remedy
    if "meet" in found:  # entry by entry
        return (
            "a statistic over the batch has to go, and an output [B, 1] minus a target [B] is [B, B]: give "
            "both one shape, for instance output.squeeze(1)"
        )
    if operation:
        return (
            "no operation may take the records' axis for another one, as after a view, a transpose or a "
            "permute too many, or repeat in place of repeat_interleave"
        )
    return (
        "compute it record by record: a statistic over the batch, such as a loss that balances experts, has "
        "to go, and a branch on it (torch.where on a record's own entries can be traced and proved); a view "
        "or a permute must leave the records' axis what it is; a backward of your own or a hook has to treat "
        "every record by itself"
    )


class ForwardWritesError(RuntimeError):
    """The model changed its own parameters, without noise; ``names`` lists them."""

    def __init__(self, names: Sequence[str], reason: str = "") -> None:
        self.names = tuple(names)
        why = f" ({reason})" if reason else ""
        super().__init__(
            f"the model changes its parameters {list(self.names)} while it runs{why}: what a forward writes "
            "follows the private records, and would be published with the model without noise. Take max_norm "
            "off embeddings (bound their rows after optimizer.step() instead), and keep running statistics "
            "out of the model, or update them from public records alone"
        )


class BufferWritesError(ForwardWritesError):
    """The model changed a buffer; it is as it was. ``names`` lists them."""

    def __init__(self, names: Sequence[str], reason: str, remedy: str = "") -> None:
        self.names = tuple(names)
        RuntimeError.__init__(
            self,
            f"the model changes its buffers {list(names)} while it runs ({reason}): a buffer that "
            "follows private records would be saved with the model, without noise. "
            + (
                remedy
                or "Switch the statistics off (track_running_stats=False, or eval() for that layer), or "
                "update them from public records outside of the private training"
            ),
        )


class TensorWritesError(ForwardWritesError):
    """Model or loss changed a tensor that is neither parameter nor buffer; ``names`` lists them."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        RuntimeError.__init__(
            self,
            f"model or loss change tensors of their own in place, {list(names)}, which are neither "
            "parameters nor buffers: their values follow the records that were met, and one record would "
            "move the gradients of all later ones. Register them as buffers (register_buffer), which are put "
            "back; bind a new tensor in the place of the old one, which is forgotten; or change them outside "
            "of the loss, from public records or released parameters",
        )
