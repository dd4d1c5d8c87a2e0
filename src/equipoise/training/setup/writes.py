"""What to do about what a forward writes to: buffers, attributes and variables.

A buffer that follows records and that the model reads is refused: it could neither hold private numbers nor
stay as it was. What nothing reads but its own update, such as a count, is thrown away with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from equipoise.gradients.checks.errors import BufferWritesError

__all__ = ["refuse_followed", "warn_of_writes"]

STATISTICS = "Running statistics: give the layer track_running_stats=False, or call .eval() on it."
BUFFER = (
    "A codebook or an average: make it a parameter that the loss trains, or change it by public numbers in a "
    "hook of the optimizer's step (optimizer.register_step_post_hook). If its module writes in training mode "
    "alone, {module}.eval() keeps it as it is."
)
ATTRIBUTE = "A count of steps: optimizer.register_step_post_hook. A log: run(evaluate=...) on public records."
MOST = 8  # names in the warning; describe() lists all


def refuse_followed(model: nn.Module, names: Sequence[str]) -> None:
    """Refuse buffers that a forward reads and to which it writes what comes of records.

    Raises:
        BufferWritesError: naming them, with the remedies that fit.
    """
    if names:
        raise BufferWritesError(names, "by what comes of records, and it reads them", _remedies(model, names))


def warn_of_writes(model: nn.Module, names: Sequence[str]) -> None:
    """Name them, with the remedies that fit.

    Args:
        model: whose buffers some of them are.
        names: paths of buffers, names of attributes and variables.
    """
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    warnings.warn(
        f"what a forward writes to {', '.join(names[:MOST])}{more} is thrown away, since it would hold "
        f"private numbers without noise: each stays as it was at the start. {_remedies(model, names)}",
        stacklevel=2,
    )


def _remedies(model: nn.Module, names: Sequence[str]) -> str:
    modules, found = dict(model.named_modules()), []
    for path, _, key in (name.rpartition(".") for name in names):
        module = modules.get(path)
        if module is None or key not in module._buffers:
            found.append(ATTRIBUTE)
        elif isinstance(module, _NormBase):
            found.append(STATISTICS)
        else:
            found.append(BUFFER.format(module=f"model.get_submodule({path!r})" if path else "model"))
    return " ".join(dict.fromkeys(found))
