"""Stages: which parameters a step trains, fixed before the first one.

The rows of a step are those of its stage's parameters alone, so that the clip norm and the noise serve them
and no others. Each stage's releases are of the one plan, whose cost does not follow which parameters they
are of: stages cost what the same steps cost without them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from equipoise import _validate


@dataclass(frozen=True, init=False)
class Stage:
    """From a step on, the parameters that are trained; the others stay where they are.

    Args:
        begins: how many steps come before it, 0 for the first stage.
        names: patterns of parameters' names as in `model.named_parameters()`, with * for anything.

    Example:
        >>> head_first = [Stage(0, "head.*"), Stage(20, "head.*", "layer2.*")]
        >>> [stage.trains("layer2.weight") for stage in head_first]
        [False, True]
    """

    begins: int
    names: tuple[str, ...]

    def __init__(self, begins: int, *names: str) -> None:
        object.__setattr__(self, "begins", begins)
        object.__setattr__(self, "names", names)
        if isinstance(begins, bool) or not isinstance(begins, int) or begins < 0:
            raise ValueError(f"begins={begins!r} of a Stage is the number of steps before it: 0, 20, ...")
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError(f"Stage({begins}) names no parameters: Stage({begins}, 'head.*')")

    def trains(self, name: str) -> bool:
        """Whether it trains the parameter of this name."""
        return any(fnmatchcase(name, pattern) for pattern in self.names)

    def describe(self) -> list[Any]:
        """Plain values, which `Stage` takes."""
        return [self.begins, *self.names]


def trained_after(
    stages: Sequence[Stage], parameters: Mapping[str, nn.Parameter], done: int
) -> dict[str, nn.Parameter]:
    """The parameters that the step after so many trains; without stages all of them."""
    begun = [stage for stage in stages if stage.begins <= done]
    return {name: one for name, one in parameters.items() if not begun or begun[-1].trains(name)}


def check_covered(stages: Sequence[Stage], parameters: Collection[str]) -> None:
    """Refuse stages that do not begin one after the other, or do not fit the trainable parameters.

    Raises:
        ValueError: none begins with the first step, two begin with one step, a pattern matches nothing, or a
            parameter is in no stage.
    """
    begins = [stage.begins for stage in stages]
    if begins[0] != 0 or sorted(set(begins)) != begins:
        raise ValueError(
            f"stages begin after {begins} steps: the first begins after 0, and each one later than the one "
            "before it"
        )
    for pattern in (pattern for stage in stages for pattern in stage.names):
        if not any(fnmatchcase(name, pattern) for name in parameters):
            near = _validate.suggestion(pattern, parameters)
            raise ValueError(f"{pattern!r} of a Stage matches no trainable parameter of the model.{near}")
    never = [name for name in parameters if not any(stage.trains(name) for stage in stages)]
    if never:
        raise ValueError(
            f"no stage trains {', '.join(never)}: freeze what no step trains, requires_grad_(False)"
        )
