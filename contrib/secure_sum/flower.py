"""Secure sums over Flower: an app that answers their stages, and a relay over a grid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from contrib.secure_sum.client import SecureClient
from contrib.secure_sum.exchange import SecureExchange, StageRequest, check_secure
from contrib.secure_sum.protocol import SecureSum
from equipoise.federated import FederationHistory, Request, Strategy, run_rounds
from equipoise.federated.flower import GridExchange
from equipoise.federated.flower.forward import introduction_app
from equipoise.federated.flower.node import answer_message
from equipoise.federated.flower.wire import read_request, refusal_of, write_request
from equipoise.methods.base import Parameters

__all__ = ["GridRelay", "secure_client_app", "serve"]

STAGE = "stage"  # the record of an answer


def secure_client_app(build: Callable[[Context], SecureClient]) -> ClientApp:
    """An app that answers the stages of secure sums, and nothing else.

    Args:
        build: as for `client_app`.
    """
    app = introduction_app()

    @app.query("secure")
    def secure(message: Message, context: Context) -> Message:
        return answer_message(message, context, build, _answer)

    return app


def _answer(client: SecureClient, content: RecordDict) -> RecordDict:
    sent = read_request(content, "train")
    return RecordDict({STAGE: ConfigRecord(client.answer_stage(sent.round, sent.params, sent.extras))})


class GridRelay:
    """A relay of stages to the nodes of a Flower grid.

    Args:
        nodes: the clients behind the grid.
    """

    def __init__(self, nodes: GridExchange) -> None:
        self._nodes = nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def relay(self, number: int, requests: Mapping[int, StageRequest]) -> dict[int, dict[str, Any] | str]:
        contents = {p: write_request(Request(number, *request)) for p, request in requests.items()}
        answers = self._nodes.receive(self._nodes.address("query.secure", contents))
        return {p: _read(message) for p, message in answers.items()}


def _read(message: Message) -> dict[str, Any] | str:
    why = refusal_of(message)
    if why is not None:
        return why
    answer = message.content.get(STAGE)
    return dict(answer) if isinstance(answer, ConfigRecord) else "the answer cannot be read"


def serve(
    grid: Grid,
    strategy: Strategy,
    clients: int,
    params: Parameters,
    rounds: int,
    rule: SecureSum,
    *,
    timeout: float = 3600.0,
    wait: float = 60.0,
    **options: Any,
) -> FederationHistory:
    """Run rounds over secure sums on a grid; arguments as for `equipoise.federated.flower.serve`.

    Raises:
        ValueError: as `run_rounds`, or a strategy that needs more than sums.
    """
    check_secure(strategy)
    nodes = GridExchange(grid, clients, timeout=timeout)
    nodes.wait(wait)
    return run_rounds(strategy, SecureExchange(GridRelay(nodes), rule), params, rounds, **options)
