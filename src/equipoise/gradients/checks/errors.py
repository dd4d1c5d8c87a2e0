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
    """A record's loss, or its gradient, depends on other records of the batch."""

    def __init__(
        self,
        module_path: str | None,
        module_type: str | None,
        in_its_input: bool = False,
        gradients_of: Sequence[str] = (),
    ) -> None:
        self.module_path = module_path
        if gradients_of:
            super().__init__(
                f"the records of a batch are mixed in the backward pass: changing one record changed the "
                f"gradient of another one, though not its loss, for the parameters {list(gradients_of)[:3]}. "
                "A backward of your own (torch.autograd.Function) or a hook has to treat every record by "
                "itself; a statistic over the batch has to go."
            )
            return
        where = (
            "the loss function, or something outside the model's modules"
            if module_type is None
            else f"{'what is computed for the input of ' if in_its_input else ''}"
            + (
                "a module outside of the model"
                if module_path is None
                else f"module {module_path or '(the model itself)'!r}"
            )
            + f" ({module_type})"
        )
        remedy = (
            "make it treat every record by itself (equipoise.replace_batch_norm replaces BatchNorm; a "
            "statistic over the batch, such as a loss that balances experts, has to go)"
        )
        if module_type is None:
            remedy = (
                "compute it record by record (a statistic over the batch has to go; draw the negatives of a "
                "softmax or contrastive loss from public ids or records in the loss, or let each item of "
                "data hold its pair or triplet; an output [B, 1] minus a target [B] is [B, B], so give both "
                "one shape)"
            )
        elif module_type.startswith("frozen") and not in_its_input:
            remedy = (
                "call eval() on it before the training: it then uses its running statistics, and stays so"
            )
        elif "BatchNorm" in module_type and not in_its_input and module_path is None:
            remedy = (
                "before the training, put GroupNorm in its place by that_module = "
                "equipoise.replace_batch_norm(that_module), or call that_module.eval()"
            )
        elif "BatchNorm" in module_type and not in_its_input:
            remedy = (
                "put GroupNorm in its place by model = equipoise.replace_batch_norm(model), before the "
                "optimizer is made"
            )
        super().__init__(
            f"the records of a batch are mixed by {where}: changing one record changed another record's "
            f"result. Per-sample gradients are not defined there; {remedy}."
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

    def __init__(self, names: Sequence[str], reason: str) -> None:
        self.names = tuple(names)
        RuntimeError.__init__(
            self,
            f"the model changes its buffers {list(names)} in place while it runs ({reason}): a buffer that "
            "follows private records would be saved with the model, without noise. Switch the statistics off "
            "(track_running_stats=False, or eval() for that layer), or update them from public records "
            "outside of the private training",
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
