"""A Flower `ClientApp` around a `Client`.

A message is answered by a client that is opened from its folder and closed again: Flower may run every
message in another process, and keeps its own `context.state` in memory alone. What counts is the journal in
the client's folder.

Nothing but a client's own answers leaves. An error is told in full to the node's own log, and to the server
only that there was one: its words could hold a record.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from equipoise.federated.client import Client
from equipoise.federated.errors import Refused
from equipoise.federated.flower.wire import ANSWER, read_request, to_record, write_refusal
from equipoise.federated.secure_client import SecureClient

__all__ = ["client_app", "client_number"]

_log = logging.getLogger("equipoise.federated")

FAILED = "the client could not answer; its own log says why"


def client_number(context: Context) -> int:
    """The client's number, from 0: `partition-id` of the node's configuration.

    Raises:
        ValueError: it has none.
    """
    number = context.node_config.get("partition-id")
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError(
            f"node_config['partition-id'] is {number!r}: start the node with its number, such as "
            "flower-supernode --node-config 'partition-id=0'"
        )
    return number


def client_app(build: Callable[[Context], Client | SecureClient]) -> ClientApp:
    """An app that answers the requests of `GridExchange` and `FlowerStrategy`.

    Args:
        build: makes the client of a node, with a `folder` that only this client uses; called for every
            message. It must be picklable where Flower's simulation runs it. A `SecureClient` answers in
            secure sums alone.

    Returns:
        An app with `train`, `query.radius`, `query.secure` and `query.introduce`.
    """
    app = ClientApp()

    @app.query("introduce")
    def introduce(message: Message, context: Context) -> Message:
        return Message(
            RecordDict({ANSWER: ConfigRecord({"client": client_number(context)})}), reply_to=message
        )

    @app.query("radius")
    def ask(message: Message, context: Context) -> Message:
        return _answer(message, context, build, _ask)

    @app.query("secure")
    def secure(message: Message, context: Context) -> Message:
        return _answer(message, context, build, _secure)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return _answer(message, context, build, _train)

    return app


def _ask(sealed: Client | SecureClient, content: RecordDict) -> RecordDict:
    client = _plain(sealed)
    number, params, values = read_request(content)
    _check_names(client.ask, values)
    mean = client.ask(number, params, **values)
    return RecordDict({ANSWER: MetricRecord({"mean": mean, "noise": client.radius_noise})})


def _train(sealed: Client | SecureClient, content: RecordDict) -> RecordDict:
    client = _plain(sealed)
    number, params, values = read_request(content)
    _check_names(client.train, values)
    return RecordDict({ANSWER: to_record(client.train(number, params, **values))})


def _secure(client: Client | SecureClient, content: RecordDict) -> RecordDict:
    if not isinstance(client, SecureClient):
        raise Refused("this client takes part in no secure sums; nothing was spent")
    return RecordDict({ANSWER: ConfigRecord(client.answer(*read_request(content)))})


def _plain(client: Client | SecureClient) -> Client:
    if isinstance(client, SecureClient):
        raise Refused("this client answers in secure sums alone; nothing was spent")
    return client


def _check_names(method: Callable[..., Any], values: dict[str, Any]) -> None:
    """Names come from outside: what a client does not take is refused, not raised."""
    names = list(inspect.signature(method).parameters)[2:]
    unknown = sorted(set(values) - set(names))
    if unknown:
        raise Refused(f"the request holds {', '.join(unknown)}, which this client does not take")
    missing = [
        name
        for name in names
        if inspect.signature(method).parameters[name].default is inspect.Parameter.empty
        and name not in values
    ]
    if missing:
        raise Refused(f"the request lacks {', '.join(missing)}; nothing was spent")


def _answer(
    message: Message,
    context: Context,
    build: Callable[[Context], Client | SecureClient],
    work: Callable[[Client | SecureClient, RecordDict], RecordDict],
) -> Message:
    """Open the client, work, close it; whatever goes wrong becomes an answer without details."""
    try:
        client = build(context)
        try:
            content = work(client, message.content)
        finally:
            client.close()
    except Refused as refused:
        content = write_refusal(f"Refused: {refused}")
    except Exception:
        _log.exception("client %s could not answer", context.node_config.get("partition-id"))
        content = write_refusal(FAILED)
    return Message(content, reply_to=message)
