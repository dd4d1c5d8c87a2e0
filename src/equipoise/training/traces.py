"""By what the parameters that a run of this process trained, or loaded, are known again."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, MutableMapping, Set
from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from equipoise._dtensor import is_dtensor, local_part
from equipoise.privacy.digests import KeyedDigest

# Under a key of 32 bytes that this process alone has: what parameters hold cannot be tried against a digest.
_DIGEST = KeyedDigest(secrets.token_bytes(32), "what a run left")


@dataclass(frozen=True, eq=False)
class Traces:
    """By what the parameters that a run trained are known again.

    Attributes:
        run: its name in its journal.
        begun: digests of what the run began with; a tensor that holds it again holds nothing of the run.
    """

    run: str
    begun: Set[str] = frozenset()

    def trained(self, parameters: Iterable[Tensor]) -> None:
        """From now on whatever these tensors hold comes from the run."""
        for parameter in parameters:
            if not is_dtensor(parameter):  # torch converts no model whose DTensors have weak references
                _TRAINED[parameter] = self

    def left(self, parameters: Iterable[Tensor]) -> None:
        """What these tensors hold now is known in other tensors, too: copies, and a state that was loaded."""
        _LEFT.update(dict.fromkeys(digests(parameters) - self.begun, self))


_TRAINED: MutableMapping[Tensor, Traces] = WeakIdKeyDictionary()
_LEFT: dict[str, Traces] = {}


def digests(parameters: Iterable[Tensor]) -> Set[str]:
    """Digests of what the tensors hold; of one that is like many others, such as zeros, there is none."""
    return {_DIGEST(p).value() for p in parameters if not _is_common(local_part(p.detach()).flatten())}


def _is_common(values: Tensor) -> bool:
    """Whether one number stands at every place; if there is one place only, a number of few decimals."""
    if bool((values[1:] != values[:-1]).any()):
        return False
    return len(values) != 1 or bool(values == (values * 1000).round() / 1000)


def loaded(model: nn.Module, metadata: Mapping[str, str] | None) -> None:
    """The model got its parameters from a file with this metadata: "run", and lines of names under "trained".

    Files of older versions, and of other programs, have neither.
    """
    names = set((metadata or {}).get("trained", "").split("\n"))
    trained = [p for name, p in model.named_parameters(remove_duplicate=False) if name in names]
    if metadata and "run" in metadata:
        traces = Traces(metadata["run"])
        traces.trained(trained)
        traces.left(trained)


def runs_by_digest() -> dict[str, Traces]:
    """What runs left, and what their tensors hold now, by digest."""
    return _LEFT | {d: run for p, run in _TRAINED.items() for d in digests([p]) - run.begun}
