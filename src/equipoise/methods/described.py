"""Settings of a method as plain values, and the method back from them.

A clip rule or a threshold becomes its kind and its fields. A function has no plain form: what holds one can
be described, and cannot be made again from a file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from equipoise.methods.clip_rules import CLIP_RULES
from equipoise.methods.options import Option
from equipoise.methods.thresholds import THRESHOLDS

__all__ = ["plain", "rebuild"]


def plain(value: Any) -> Any:
    """A value as JSON can hold it: a settings object becomes its kind and fields, a function only its name.

        Example:
            >>> from equipoise.methods.options import Option
    from equipoise.methods.thresholds import Fixed
            >>> plain(Fixed(0.5))
            {'kind': 'Fixed', 'clip_norm': 0.5}
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"kind": type(value).__name__} | {
            f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)
        }
    return {"opaque": getattr(value, "__qualname__", type(value).__name__)}


def _options(kind: Any) -> dict[str, Any]:
    return {name: one for s in kind.__subclasses__() for name, one in {s.__name__: s, **_options(s)}.items()}


def rebuild(described: Any) -> Any:
    """The settings object that `plain` described: a clip rule or a threshold; plain values stay.

    Raises:
        ValueError: an opaque value or an unknown kind.
    """
    if not isinstance(described, Mapping) or not described.keys() & {"kind", "opaque"}:
        return described
    table: dict[str, type] = (
        {rule.__name__: rule for rule in CLIP_RULES.values()} | THRESHOLDS | _options(Option)
    )
    fields = {name: value for name, value in described.items() if name != "kind"}
    opaque = [
        value["opaque"]
        for value in [described, *fields.values()]
        if isinstance(value, Mapping) and "opaque" in value
    ]
    if opaque or described.get("kind") not in table:
        raise ValueError(
            f"the settings {dict(described)!r} cannot be rebuilt from a file"
            + (f": {opaque[0]} is a function of yours" if opaque else "")
            + "; give the object again, for instance method=... to PrivateTraining.resume"
        )
    return table[described["kind"]](**fields)
