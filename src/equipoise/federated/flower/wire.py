"""What travels: named tensors and plain values as Flower's records, and back.

A request holds the round's number and plain values in a `ConfigRecord`, the global model in an `ArrayRecord`,
and every further group of tensors in one of its own. An answer holds tensors, or two released numbers, or the
reason why there is none. Arrays travel as NumPy writes them: bit for bit, and without pickles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from equipoise.federated.errors import Refused
from equipoise.federated.strategies import Reply
from equipoise.methods.base import Parameters

__all__ = [
    "read_params",
    "read_reply",
    "read_request",
    "read_values",
    "to_record",
    "write_refusal",
    "write_request",
]

MODEL, VALUES, ANSWER, REFUSAL = "model", "values", "answer", "refusal"
ROUND, GROUP = "round", "group."


def to_record(params: Parameters) -> ArrayRecord:
    """Named tensors as Flower's arrays.

    Raises:
        TypeError: a type that NumPy does not have (bfloat16).

    Example:
        >>> read_params(to_record({"w": torch.ones(2)}))
        {'w': tensor([1., 1.])}
    """
    for name, value in params.items():
        if value.dtype is torch.bfloat16:
            raise TypeError(f"params[{name!r}] is bfloat16, which NumPy does not have: exchange float32")
    return ArrayRecord({name: value.detach().cpu().contiguous() for name, value in params.items()})


def read_params(record: Any) -> dict[str, Tensor]:
    """Named tensors of an array record, copied.

    Raises:
        ValueError: it is no such record, or its bytes are no arrays.
    """
    if not isinstance(record, ArrayRecord):
        raise ValueError(f"there is a {type(record).__name__} where arrays should be")
    try:
        return {name: torch.from_numpy(array.numpy().copy()) for name, array in record.items()}
    except Exception as error:  # any bytes can come from outside, and NumPy raises many things on them
        raise ValueError("the bytes are no arrays of numbers") from error


def write_request(number: int, params: Parameters, values: Mapping[str, Any]) -> RecordDict:
    """A request for round `number` from the global model; values are plain, or groups of named tensors.

    Example:
        >>> read_request(write_request(3, {"w": torch.zeros(1)}, {"clip_norm": 0.5}))
        (3, {'w': tensor([0.])}, {'clip_norm': 0.5})
    """
    groups = {GROUP + name: to_record(value) for name, value in values.items() if isinstance(value, Mapping)}
    plain = {name: value for name, value in values.items() if not isinstance(value, Mapping)}
    return RecordDict(
        {MODEL: to_record(params), VALUES: ConfigRecord({**plain, ROUND: number}), **groups}  # type: ignore[dict-item,unused-ignore]
    )


def read_request(content: RecordDict) -> tuple[int, dict[str, Tensor], dict[str, Any]]:
    """Round, global model and values of a request.

    Raises:
        Refused: it cannot be read. Nothing was spent.
    """
    config = content.get(VALUES)
    if not isinstance(config, ConfigRecord) or ROUND not in config:
        raise Refused("the request names no round; nothing was spent")
    values: dict[str, Any] = dict(config)
    try:
        params = read_params(content.get(MODEL))
        groups = {
            name.removeprefix(GROUP): read_params(record)
            for name, record in content.items()
            if name.startswith(GROUP)
        }
    except ValueError as error:
        raise Refused(f"the request cannot be read: {error}; nothing was spent") from error
    return values.pop(ROUND), params, values | groups


def write_refusal(reason: str) -> RecordDict:
    """An answer that says why there is none."""
    return RecordDict({REFUSAL: ConfigRecord({"reason": reason})})


def read_reply(message: Message) -> Reply | dict[str, Tensor] | str:
    """What a client answered: two released numbers, tensors, or why neither.

    What cannot be read counts as no answer.
    """
    why = _why_none(message)
    if why is not None:
        return why
    answer = message.content.get(ANSWER)
    if isinstance(answer, MetricRecord):
        try:
            return Reply(float(answer["mean"]), float(answer["noise"]))  # type: ignore[arg-type,unused-ignore]
        except (KeyError, TypeError):
            return "the answer cannot be read"
    try:
        return read_params(answer)
    except ValueError as error:
        return f"the answer cannot be read: {error}"


def read_values(message: Message) -> dict[str, Any] | str:
    """Plain values that a client answered, or why there are none."""
    why = _why_none(message)
    if why is not None:
        return why
    answer = message.content.get(ANSWER)
    return dict(answer) if isinstance(answer, ConfigRecord) else "the answer cannot be read"


def _why_none(message: Message) -> str | None:
    if message.has_error():
        return f"no answer (Flower's error {message.error.code})"
    refusal = message.content.get(REFUSAL)
    return str(refusal.get("reason", "refused")) if isinstance(refusal, ConfigRecord) else None
