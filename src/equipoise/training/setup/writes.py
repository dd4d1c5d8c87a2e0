"""What to do about what a forward writes to: buffers, attributes and variables.

A buffer that follows records and that the model reads is refused: it could neither hold private numbers nor
stay as it was. What nothing reads but its own update, such as a count, is thrown away with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from equipoise.gradients.checks.errors import BufferWritesError

__all__ = ["refuse_followed", "warn_of_writes"]

REMEDIES = (
    "Running statistics: give the layer track_running_stats=False. A codebook or an average: make it a "
    "parameter that the loss trains, or change it by public numbers in a hook of the optimizer's step "
    "(optimizer.register_step_post_hook), as a count of steps. What is written in training mode alone stays "
    "as it is after .eval() of its module. A log: run(evaluate=...) on public records."
)
MOST = 8  # names in the warning; describe() lists all


def refuse_followed(names: Sequence[str]) -> None:
    """Refuse buffers that a forward reads and to which it writes what comes of records.

    Raises:
        BufferWritesError: naming them, with the remedies.
    """
    if names:
        raise BufferWritesError(names, "by what comes of records, and it reads them", REMEDIES)


def warn_of_writes(names: Sequence[str]) -> None:
    """Name paths of buffers, attributes and variables, with the remedies."""
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    warnings.warn(
        f"what a forward writes to {', '.join(names[:MOST])}{more} is thrown away, since it would hold "
        f"private numbers without noise: each stays as it was at the start. {REMEDIES}",
        stacklevel=2,
    )
