"""An app that passes messages on to a client that stays open, in a process that its owner starts.

Flower starts a process for each message. With `client_app` that process imports PyTorch and opens the client;
with this app it does neither, and `stay_open` answers over a socket.
"""

from __future__ import annotations

import logging

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as Parsed

_log = logging.getLogger("equipoise.federated")

CLIENT, NUMBER = "client", "number"  # the record of an introduction, and the name in it
REFUSAL = "refusal"
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


def introduction_app() -> ClientApp:
    """An app that only tells `GridExchange` which client it is."""
    app = ClientApp()

    @app.query("introduce")
    def introduce(message: Message, context: Context) -> Message:
        content = RecordDict({CLIENT: ConfigRecord({NUMBER: client_number(context)})})
        return Message(content, reply_to=message)

    return app


def forwarding_app() -> ClientApp:
    """An app for nodes whose clients run in `stay_open`; it has the actions of `client_app`.

    The node's configuration names the socket: `flower-supernode --node-config 'partition-id=0
    socket="/srv/equipoise/socket"'`. While nobody answers there, the client is out of the round.
    """
    from multiprocessing.connection import Client

    app = introduction_app()

    def forward(message: Message, context: Context) -> Message:
        try:
            with Client(str(context.node_config["socket"]), "AF_UNIX") as line:
                line.send_bytes(message.metadata.message_type.encode())
                line.send_bytes(to_bytes(message.content))
                content = from_bytes(line.recv_bytes())
        except Exception:
            _log.exception("client %s is not reached", context.node_config.get("partition-id"))
            content = write_refusal(FAILED)
        return Message(content, reply_to=message)

    for register in (app.train(), app.query("reports"), app.query("score")):
        register(forward)
    return app


def write_refusal(reason: str) -> RecordDict:
    """The content of a message that says why there is no reply."""
    return RecordDict({REFUSAL: ConfigRecord({"reason": reason})})


def to_bytes(content: RecordDict) -> bytes:
    """The content of a message as Flower's own bytes, without pickles."""
    return recorddict_to_proto(content).SerializeToString()


def from_bytes(content: bytes) -> RecordDict:
    """What `to_bytes` wrote.

    Raises:
        google.protobuf.message.DecodeError: it was not.
    """
    return recorddict_from_proto(Parsed.FromString(content))
