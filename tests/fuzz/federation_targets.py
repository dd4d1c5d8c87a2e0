"""What reads the files of a federation, and the messages of secure sums."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from mutating import HOSTILE, mutated_json
from targets import GOOD_REQUEST, Target, client, command, file_of, home, signing_key_file, with_file

from contrib.secure_sum import SecureClient, SecureExchange, SecureSum
from equipoise.app.federation.folder import report_federation, verify_federation
from equipoise.app.run_checks import check_federation_folder, schema_of_run, settings_of_run
from equipoise.app.settings import FederationSettings
from equipoise.federated import Refused, Reply, Request

CLIENTS = 3
PARAMS = GOOD_REQUEST["params"]
RULE = SecureSum(CLIENTS)
LEAVES = [*HOSTILE, b"", b"x", bytes(64), bytes(104), b"\xff" * 32, [0, 0], [True, 1]]
EXTRA = ["key.9", "share.0", "share.-1", "share.1e3", "key.", "clip_norm", "terms.7"]


# ---- files


@functools.cache
def _federation() -> Path:
    """A finished and signed federation of two clients."""
    folder = home() / "federation"
    line = "federate --data digits --model logistic --method dp-fedavg --clients 2 --rounds 1 --local-steps 1"
    command(*line.split(), "--run-dir", str(folder))
    command("sign", str(folder), "--key", str(signing_key_file()))
    for name in ("server", "clients/000/checkpoint", "clients/001/checkpoint"):
        shutil.rmtree(folder / name, ignore_errors=True)
    return folder


def _look(folder: Path) -> None:
    verify_federation(str(folder)).to_json()
    report_federation(str(folder))


def _published(folder: Path) -> None:
    """What whoever was given the published part reads: it has no settings of its owner."""
    _look(folder)
    settings_of_run(str(folder), published=True)
    schema_of_run(str(folder))


@functools.cache
def _published_part() -> Path:
    return Path(shutil.copytree(_federation(), home() / "published", ignore=lambda *_: {"settings.json"}))


def _settings(folder: Path) -> None:
    _look(folder)
    settings_of_run(str(folder))
    settings = FederationSettings.read(folder / "settings.json")
    settings.check()
    settings.command()
    check_federation_folder(settings, str(folder))


# ---- messages of secure sums


def _sealed(number: int) -> SecureClient:
    return SecureClient(client(), RULE, number)


def _requests(clients: list[SecureClient], stop: str) -> dict[str, Any]:
    """Lead honest clients through a sum, up to the request `stop` to the first of them."""
    opening = {"stage": "keys", "request": Request(1, PARAMS).fingerprint()}
    if stop == "keys":
        return opening
    first = [one.answer_stage(1, {}, opening) for one in clients]
    shares: dict[str, Any] = {"stage": "shares"}
    for number, found in enumerate(first):
        shares |= {f"key.{number}": found["key"], f"terms.{number}": found["terms"]}
    if stop == "shares":
        return shares
    boxes = [one.answer_stage(1, {}, shares) for one in clients]

    def masked(number: int) -> dict[str, Any]:
        others = {f"share.{u}": boxes[u][f"share.{number}"] for u in range(CLIENTS) if u != number}
        return {"stage": "masked", "kind": "train", **others}

    if stop == "masked":
        return masked(0)
    for number, one in enumerate(clients):
        one.answer_stage(1, PARAMS, masked(number))
    return {"stage": "unmask", "survivors": list(range(CLIENTS))}


def _stage(value: tuple[str, Callable[[Mapping[str, Any]], Any]], folder: Path) -> None:
    """A client in the middle of a sum is sent a request that the server made up."""
    stage, spoil = value
    clients = [_sealed(number) for number in range(CLIENTS)]
    try:
        request = _requests(clients, stage)
        params = PARAMS if stage == "masked" else {}
        try:
            clients[0].answer_stage(1, params, spoil(request))
        except Refused:
            assert clients[0].client.training.steps_done in (0, 2), "half a round was made"
            raise
    finally:
        for one in clients:
            one.close()


@st.composite
def _spoiled(draw: Callable[..., Any]) -> Callable[[Mapping[str, Any]], Any]:
    """An edit of a message whose values are known only when it is sent."""
    seed = draw(st.integers(0, 2**16))
    leaf = draw(st.sampled_from(LEAVES))
    kind = draw(st.sampled_from(["replace", "drop", "add", "cut", "flip", "swap", "nothing"]))
    extra = draw(st.sampled_from(EXTRA))

    def spoil(message: Mapping[str, Any]) -> Any:
        found = dict(message)
        name = sorted(found)[seed % len(found)]
        value = found[name]
        if kind == "replace":
            found[name] = leaf
        elif kind == "drop":
            del found[name]
        elif kind == "add":
            found[extra] = leaf
        elif kind == "cut" and isinstance(value, bytes):
            found[name] = value[: seed % (len(value) + 1)]
        elif kind == "flip" and value and isinstance(value, bytes):
            at = seed % len(value)
            found[name] = value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]
        elif kind == "swap":
            other = sorted(found)[(seed // 7) % len(found)]
            found[name], found[other] = found[other], value
        return found

    return spoil


def _messages() -> st.SearchStrategy[Any]:
    return st.tuples(st.sampled_from(["keys", "shares", "masked", "unmask"]), _spoiled())


class _Relay:
    """Three clients, one of which answers something else at one stage."""

    def __init__(self, stage: str, spoil: Callable[[Mapping[str, Any]], Any]) -> None:
        self.clients = [_sealed(number) for number in range(CLIENTS)]
        self._stage, self._spoil = stage, spoil

    def __len__(self) -> int:
        return CLIENTS

    def relay(self, number: int, requests: Mapping[int, Any]) -> dict[int, Any]:
        found: dict[int, Any] = {}
        for index, (params, values) in requests.items():
            try:
                found[index] = self.clients[index].answer_stage(number, params, values)
            except Refused as refused:
                found[index] = str(refused)
        if values["stage"] == self._stage and isinstance(found.get(0), dict):
            found[0] = self._spoil(found[0])
        return found


def _answers(value: tuple[str, Callable[[Mapping[str, Any]], Any]], folder: Path) -> None:
    """The server: a client's answer may spoil the sum, but not end the training."""
    relay = _Relay(*value)
    try:
        found = SecureExchange(relay, RULE).send(Request(1, PARAMS), range(CLIENTS))
    finally:
        for one in relay.clients:
            one.close()
    assert set(found) == set(range(CLIENTS))
    for one in found.values():
        finite = isinstance(one, Reply) and all(bool(torch.isfinite(v).all()) for v in one.params.values())
        assert isinstance(one, str) or finite


def _nothing(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return message


def federation_targets() -> tuple[Target, ...]:
    """All of this file."""

    def of_folder(
        name: str, then: Callable[[Path], None], share: int, folder: Callable[[], Path] = _federation
    ) -> Target:
        good = file_of(folder, name)
        feed = with_file(folder, name, then)
        kind = "federation" if folder is _federation else "published federation"
        return Target(f"{kind}: {name}", mutated_json([good]), feed, share, good)

    files = (
        of_folder("federation.json", _look, 300),
        of_folder("federation.json", _published, 300, _published_part),
        of_folder("settings.json", _settings, 300),
        of_folder("federation.sig.json", _look, 100),
        of_folder("clients/001/statement.json", _look, 100),
    )
    return (
        *files,
        Target("secure sums: requests", _messages(), _stage, 200, ("masked", _nothing)),
        Target(
            "secure sums: answers",
            _messages(),
            _answers,
            200,
            ("masked", _nothing),
        ),
    )
