"""What travels: requests and replies as Flower's records, and back.

A request's global model is an `ArrayRecord`, its round and numbers a `ConfigRecord`, and every extra that is
a group of named tensors an `ArrayRecord` of its own. A reply holds tensors, reports, or both, or the reason
why it has neither. The kind of a request is the message's type. Arrays travel as NumPy writes them: bit for
bit, and without pickles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from equipoise.federated.flower.forward import REFUSAL
from equipoise.federated.messages import Refused, Reply, Request, RequestKind
from equipoise.methods.base import Parameters

#: Flower's message type of each kind of request.
MESSAGE_TYPES: Mapping[RequestKind, str] = {
    "train": "train",
    "query": "query.reports",
    "score": "query.score",
}

# Names of records in a message, and of the round in a record.
MODEL, EXTRAS, GROUP = "model", "extras", "group."
REPORTS = "reports"
ROUND = "round"


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


def write_request(request: Request) -> RecordDict:
    """A request as the content of a message.

    Example:
        >>> content = write_request(Request(3, {"w": torch.zeros(1)}, {"clip_norm": 0.5}))
        >>> read_request(content, "train")
        Request(round=3, params={'w': tensor([0.])}, extras={'clip_norm': 0.5}, kind='train')
    """
    groups, numbers = {}, {}
    for name, value in request.extras.items():
        if isinstance(value, Mapping):
            groups[GROUP + name] = to_record(value)
        else:
            numbers[name] = value
    values = ConfigRecord({**numbers, ROUND: request.round})
    return RecordDict({MODEL: to_record(request.params), EXTRAS: values, **groups})  # type: ignore[dict-item,unused-ignore]


def read_request(content: RecordDict, kind: RequestKind) -> Request:
    """The request of a message's content.

    Raises:
        Refused: it cannot be read. Nothing was spent.
    """
    config = content.get(EXTRAS)
    if not isinstance(config, ConfigRecord) or ROUND not in config:
        raise Refused("the request names no round; nothing was spent")
    extras: dict[str, Any] = dict(config)
    number: Any = extras.pop(ROUND)
    try:
        params = read_params(content.get(MODEL))
        for name, record in content.items():
            if name.startswith(GROUP):
                extras[name.removeprefix(GROUP)] = read_params(record)
    except ValueError as error:
        raise Refused(f"the request cannot be read: {error}; nothing was spent") from error
    return Request(number, params, extras, kind)


def write_reply(reply: Reply) -> RecordDict:
    """A reply as the content of a message; what is empty is left out."""
    content = RecordDict()
    if reply.params:
        content[MODEL] = to_record(reply.params)
    if reply.reports:
        content[REPORTS] = MetricRecord(dict(reply.reports))
    return content


def read_reply(message: Message) -> Reply | str:
    """What a client replied, or why there is nothing; what cannot be read counts as no reply."""
    why = refusal_of(message)
    if why is not None:
        return why
    content = message.content
    reports = content.get(REPORTS, MetricRecord())
    if not isinstance(reports, MetricRecord) or not (MODEL in content or REPORTS in content):
        return "the reply cannot be read"
    try:
        params = read_params(content[MODEL]) if MODEL in content else {}
    except ValueError as error:
        return f"the reply cannot be read: {error}"
    return Reply(params, dict(reports))  # type: ignore[arg-type,unused-ignore]


def refusal_of(message: Message) -> str | None:
    """Why a message holds no reply, or None."""
    if message.has_error():
        return f"no answer (Flower's error {message.error.code})"
    refusal = message.content.get(REFUSAL)
    return str(refusal.get("reason", "refused")) if isinstance(refusal, ConfigRecord) else None
