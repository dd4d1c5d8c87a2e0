"""A Flower `ClientApp` around a `Client`.

A message is answered by a client that is opened from its folder and closed again: Flower may run every
message in another process, and keeps its own `context.state` only in memory. What counts is the journal in
the client's folder.

Only a client's own replies leave. An error goes in full to the node's own log, and the server learns only
that there was one: its message could hold a record.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from equipoise.federated.flower.wire import MESSAGE_TYPES, read_request, write_refusal, write_reply
from equipoise.federated.messages import Refused, RequestKind
from equipoise.federated.server import Participant

_log = logging.getLogger("equipoise.federated")


CLIENT, NUMBER = "client", "number"  # the record of an introduction, and the name in it


FAILED = "the client could not answer; its own log says why"


class OpenClient(Participant, Protocol):
    """What an app needs of a client; see `Client`."""

    def close(self) -> None: ...


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


def client_app(build: Callable[[Context], OpenClient]) -> ClientApp:
    """An app that answers the requests of a `GridExchange`.

    Args:
        build: makes the client of a node, with a `folder` that only this client uses; called for every
            message. It must be picklable where Flower's simulation runs it.

    Returns:
        An app with `train`, `query.reports`, `query.score` and `query.introduce`.
    """
    app = introduction_app()

    def reply(client: OpenClient, content: RecordDict, kind: RequestKind) -> RecordDict:
        return write_reply(client.answer(read_request(content, kind)))

    @app.query(MESSAGE_TYPES["query"].removeprefix("query."))
    def query(message: Message, context: Context) -> Message:
        return answer_message(message, context, build, partial(reply, kind="query"))

    @app.query(MESSAGE_TYPES["score"].removeprefix("query."))
    def score(message: Message, context: Context) -> Message:
        return answer_message(message, context, build, partial(reply, kind="score"))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return answer_message(message, context, build, partial(reply, kind="train"))

    return app


def introduction_app() -> ClientApp:
    """An app that only tells `GridExchange` which client it is."""
    app = ClientApp()

    @app.query("introduce")
    def introduce(message: Message, context: Context) -> Message:
        content = RecordDict({CLIENT: ConfigRecord({NUMBER: client_number(context)})})
        return Message(content, reply_to=message)

    return app


def answer_message(
    message: Message,
    context: Context,
    build: Callable[[Context], Any],
    work: Callable[[Any, RecordDict], RecordDict],
) -> Message:
    """Open the client, let `work(client, content)` answer, close it; an error leaves without its details."""

    def work_and_close(content: RecordDict) -> RecordDict:
        client = build(context)
        try:
            return work(client, content)
        finally:
            client.close()

    return answered(message, context, work_and_close)


def answered(message: Message, context: Context, work: Callable[[RecordDict], RecordDict]) -> Message:
    """What `work(content)` answers; an error leaves without its details."""
    try:
        content = work(message.content)
    except Refused as refused:
        content = write_refusal(f"Refused: {refused}")
    except Exception:  # its message could hold a record
        _log.exception("client %s could not answer", context.node_config.get("partition-id"))
        content = write_refusal(FAILED)
    return Message(content, reply_to=message)
