"""A Flower `ClientApp` around a `Client`.

A message is answered by a client that is opened from its folder and closed again, as Flower runs every
message in another process and keeps its own `context.state` only in memory, or by one that stays open
beside it. What counts is the journal in the client's folder.

Only a client's own replies leave. An error goes in full to the node's own log, and the server learns only
that there was one: its message could hold a record.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any, Protocol

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from equipoise._files import PathLike
from equipoise.federated.flower.forward import FAILED, from_bytes, introduction_app, to_bytes, write_refusal
from equipoise.federated.flower.wire import MESSAGE_TYPES, read_request, write_reply
from equipoise.federated.messages import Refused, RequestKind
from equipoise.federated.server import Participant

_log = logging.getLogger("equipoise.federated")


class OpenClient(Participant, Protocol):
    """What an app needs of a client; see `Client`."""

    def close(self) -> None: ...


def client_app(build: Callable[[Context], OpenClient]) -> ClientApp:
    """An app that answers the requests of a `GridExchange`.

    Args:
        build: makes the client of a node, with a `folder` that only this client uses; called for every
            message. It must be picklable where Flower's simulation runs it.

    Returns:
        An app with `train`, `query.reports`, `query.score` and `query.introduce`.
    """
    app = introduction_app()

    for kind, name in MESSAGE_TYPES.items():
        register = app.train() if kind == "train" else app.query(name.removeprefix("query."))
        register(partial(answer_message, build=build, work=partial(_reply, kind=kind)))
    return app


def _reply(client: OpenClient, content: RecordDict, kind: RequestKind) -> RecordDict:
    return write_reply(client.answer(read_request(content, kind)))


def _reply_to_bytes(client: OpenClient, name: bytes, content: bytes) -> RecordDict:
    kinds = {name: kind for kind, name in MESSAGE_TYPES.items()}
    return _reply(client, from_bytes(content), kinds[name.decode()])


def stay_open(client: OpenClient, socket: PathLike) -> None:
    """Answer the messages of `forwarding_app`, one after another, until the process is stopped.

    A round then costs the owner its training and what Flower's own process costs. Whoever kills this process
    and starts it again loses nothing: the client goes on with what its folder holds.

    Args:
        client: of this owner; closed in the end.
        socket: path of a Unix socket that only this user can open; a path of a killed process is taken over.

    Raises:
        ValueError: another process serves there.
    """
    place = Path(socket)
    if place.is_socket():
        with suppress(OSError), Client(str(place), "AF_UNIX"):
            raise ValueError(f"socket={str(place)!r} is served by another process: give each client its own")
        place.unlink()
    mask = os.umask(0o177)
    try:
        listener = Listener(str(place), "AF_UNIX")
    finally:
        os.umask(mask)
    with closing(client), listener:
        while True:
            with listener.accept() as line, suppress(EOFError, OSError):  # Flower may end its process
                work = partial(_reply_to_bytes, client, line.recv_bytes(), line.recv_bytes())
                line.send_bytes(to_bytes(answered(work, place)))


def answer_message(
    message: Message,
    context: Context,
    build: Callable[[Context], Any],
    work: Callable[[Any, RecordDict], RecordDict],
) -> Message:
    """Open the client, let `work(client, content)` answer, close it; an error leaves without its details."""

    def work_and_close() -> RecordDict:
        with closing(build(context)) as client:
            return work(client, message.content)

    return Message(answered(work_and_close, context.node_config.get("partition-id")), reply_to=message)


def answered(work: Callable[[], RecordDict], who: object) -> RecordDict:
    """What `work()` answers; an error leaves without its details."""
    try:
        return work()
    except Refused as refused:
        return write_refusal(f"Refused: {refused}")
    except Exception:  # its message could hold a record
        _log.exception("client %s could not answer", who)
        return write_refusal(FAILED)
