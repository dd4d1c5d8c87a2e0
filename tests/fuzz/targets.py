"""What reads files and messages of others, each with good inputs to start from and a way to mutate them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import strategies as st
from mutating import HOSTILE, mutated_bytes, mutated_json, mutated_lines, mutated_text, mutated_tree
from PIL import Image
from rich.console import Console
from safetensors.torch import save_file
from torch import nn

import equipoise as eq
from equipoise.app import run_checks as saved
from equipoise.app.federation.folder import report_federation, verify_federation
from equipoise.app.settings import FederationSettings, RunSettings
from equipoise.data.readers import cifar, idx, image_folders, schema
from equipoise.federated import Client, FedAvg, Reply, Request, simulate
from equipoise.privacy import FullBatch
from equipoise.report import read_run, render_page, summary

Strategy = st.SearchStrategy[Any]


@dataclass(frozen=True)
class Target:
    """A reader of foreign input.

    Attributes:
        name: for the table.
        inputs: strategy of mutated inputs.
        feed: (input, empty folder) -> None; any error must be one that the library raises on purpose.
        share: of the inputs of a whole run.
        good: an input that must be accepted: a reader that refuses everything would pass otherwise.
    """

    name: str
    inputs: Strategy
    feed: Callable[[Any, Path], None]
    share: int
    good: Any


class _Payload:
    """Pickled, it would run a program when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch executed",)


PICKLE = pickle.dumps(_Payload(), protocol=2)


# ---- run folders


def _loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (model(batch["x"])[:, 0] - batch["y"]).square()


def _data() -> dict[str, torch.Tensor]:
    return {"x": torch.arange(60.0).reshape(20, 3) / 60, "y": torch.arange(20.0) / 20}


def _model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(3, 1)


@functools.cache
def home() -> Path:
    return Path(tempfile.mkdtemp(prefix="fuzz-seeds-"))


@functools.cache
def begun_run() -> Path:
    """A run of three steps that was left after two, with a momentum buffer in its checkpoint."""
    folder = home() / "begun"
    model = _model()
    training = eq.PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        loss=_loss,
        data=eq.Data(_data(), microbatch_size=20),
        sampling=FullBatch(20, 3),
        method=eq.DPSGD(clip_norm=1.0, noise_multiplier=5.0),
        run=folder,
    )
    for _ in range(2):
        training.take_step()
    training.save_checkpoint()
    training.close()
    return folder


@functools.cache
def finished_run() -> Path:
    """The same run to its end, signed."""
    folder = home() / "finished"
    shutil.copytree(begun_run(), folder)
    training = resumed(folder)
    training.run(progress=False)
    training.close()
    eq.sign_run(folder, signing_key_file())
    return folder


def command(*words: str) -> None:
    """Run a command that must succeed, and keep its words to itself."""
    from equipoise.cli import main

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert main([*words, "--json"]) == 0


@functools.cache
def signing_key_file() -> Path:
    """An issuer's private key."""
    place = home() / "key.pem"
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    key = Ed25519PrivateKey.generate()
    place.write_bytes(key.private_bytes(encoding, form, serialization.NoEncryption()))
    return place


def resumed(folder: Path) -> eq.PrivateTraining:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return eq.PrivateTraining.resume(folder, model, optimizer, loss=_loss, data=_data())


def resume(folder: Path) -> None:
    training = resumed(folder)
    try:
        training.run(progress=False)
    finally:
        training.close()


def with_file(
    run: Callable[[], Path], name: str, then: Callable[[Path], None]
) -> Callable[[bytes, Path], None]:
    """Put the input in the place of one file of a copied run."""

    def feed(content: bytes, folder: Path) -> None:
        copied = shutil.copytree(run(), folder / "run")
        (copied / name).write_bytes(content)
        then(copied)

    return feed


def _look(folder: Path) -> None:
    """Everything that reads a finished run without data: page, summary of the run, verification."""
    run = read_run(folder)
    page = render_page(run)
    Console(file=io.StringIO()).print(summary(run, str(folder)))
    assert "<script>alert" not in page, "text from a file reached the page unescaped"
    eq.verify_run(folder).to_json()


def _run_settings(folder: Path) -> None:
    settings = saved.settings_of_run(str(folder))
    settings.resolved("mlp-tanh")
    settings.command()


def file_of(run: Callable[[], Path], name: str) -> bytes:
    return (run() / name).read_bytes()


# ---- checkpoints


def _sealed(content: bytes, folder: Path) -> None:
    copied = shutil.copytree(begun_run(), folder / "run")
    path = copied / "checkpoint" / "step-00000002.pt"
    for other in path.parent.glob("step-*"):
        other.unlink()
    path.write_bytes(content)
    seal = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    path.with_suffix(".json").write_text(json.dumps(seal))
    resume(copied)


@st.composite
def _checkpoints(draw: Callable[..., Any]) -> bytes:
    """A checkpoint edited and sealed again, broken bytes, or a pickle that would run a program."""
    good = file_of(begun_run, "checkpoint/step-00000002.pt")
    kind = draw(st.integers(0, 9))
    if kind < 3:
        return draw(mutated_bytes([good, PICKLE]))
    tree = torch.load(io.BytesIO(good), weights_only=True)
    if kind == 3:
        tree = {**tree, "state": _Payload()}
    else:
        wrong = [torch.ones(7), torch.full((1, 3), float("nan")), torch.ones(1, 3, dtype=torch.int64)]
        tree = draw(mutated_tree(tree, [*HOSTILE, *wrong]))
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    return buffer.getvalue()


# ---- data files


def _data_file(name: str, read: Callable[[Path], Any]) -> Callable[[bytes, Path], None]:
    def feed(content: bytes, folder: Path) -> None:
        (folder / name).write_bytes(content)
        read(folder / name)

    return feed


IDX = bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4]) + bytes(range(24))
IDX_FLOATS = bytes([0, 0, 0x0D, 1, 0, 0, 0, 2]) + np.array([1.5, 2.5], ">f4").tobytes()
CSV = b"age,member,group\n30, yes, a\n50, no, b\n# a remark\n61,?,a\n"
FORM = schema.table_of(
    {
        "target": "group",
        "comment": "#",
        "columns": {
            "age": {"type": "number", "low": 0, "high": 100},
            "member": {"type": "category", "values": ["no", "yes"], "missing": ["?"], "other": False},
            "group": {"type": "category", "values": ["a", "b"]},
        },
    }
)
SCHEMA = b"""population = 6
target = "group"
missing = ["", "?"]
[columns.age]
type = "number"
low = 0
high = 100
log = true
[columns.member]
type = "category"
values = ["no", "yes"]
other = false
[columns.group]
type = "category"
values = ["a", "b"]
"""
ROWS = b"age,member,group\n30,yes,a\n50,no,b\n61,?,a\n,no,b\n7,yes,a\n99,no,b\n"


def _rows_by_schema(path: Path) -> None:
    """A table of which either the rows or the schema are mutated; the other one is good."""
    rows, columns = path.with_suffix(".csv"), path.with_suffix(".toml")
    for good, content in ((rows, ROWS), (columns, SCHEMA)):
        if not good.exists():
            good.write_bytes(content)
    schema.load_table(rows, columns, test=shutil.copy(rows, path.with_suffix(".test.csv")))


def _png() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(buffer, "png")
    return buffer.getvalue()


def _image_folder(path: Path) -> None:
    """A folder of two classes, with one mutated image among good ones."""
    for name in ("a", "b"):
        place = path.parent / "photos" / name
        place.mkdir(parents=True)
        (place / "good.png").write_bytes(_png())
    shutil.copy(path, path.parent / "photos" / "b" / "mutated.png")
    test = shutil.copytree(path.parent / "photos", path.parent / "more", dirs_exist_ok=True)
    image_folders.load_images(path.parent / "photos", "4x4x1", test=test, population=3)


CIFAR = bytes([3]) + bytes(3072) + bytes([5]) + bytes([7]) * 3072


# ---- models, keys, messages


@functools.cache
def _safetensors() -> bytes:
    path = home() / "model.safetensors"
    save_file(_model().state_dict(), path)
    return path.read_bytes()


def _load_model(path: Path) -> None:
    (path.parent / "checkpoint").mkdir()
    saved.check_model_file(str(path.parent))
    eq.load_model(_model(), path)


def _verify_with_key(content: bytes, folder: Path) -> None:
    copied = shutil.copytree(finished_run(), folder / "run")
    (folder / "key").write_bytes(content)
    eq.verify_run(copied, public_key=folder / "key")
    eq.sign_run(copied, folder / "key")


def _key_files() -> list[bytes]:
    key = Ed25519PrivateKey.generate()
    private, public = key.private_bytes, key.public_key().public_bytes
    form = serialization.PrivateFormat
    pem, none = serialization.Encoding.PEM, serialization.NoEncryption()
    return [
        private(pem, form.PKCS8, none),
        private(pem, form.OpenSSH, none),
        public(pem, serialization.PublicFormat.SubjectPublicKeyInfo),
        public(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH),
    ]


GOOD_REQUEST = {
    "round": 1,
    "params": {"weight": torch.zeros(1, 3), "bias": torch.zeros(1)},
    "extras": {},
    "kind": "train",
}
GOOD_REPLY = {"params": GOOD_REQUEST["params"], "reports": {"share": 0.5}}
TENSORS = [
    torch.zeros(3),
    torch.zeros(1, 3, dtype=torch.int64),
    torch.full((1, 3), float("nan")),
    torch.full((1, 3), 1e308, dtype=torch.float64),
    torch.zeros(1, 3).to_sparse(),
    torch.zeros(0),
    torch.zeros(1, 3, dtype=torch.complex64),
    torch.zeros(1, 3, device="meta"),
    np.zeros((1, 3)),
]


def client() -> Client:
    model = _model()
    method, sampling = eq.DPSGD(clip_norm=1.0, noise_multiplier=5.0), FullBatch(20, 4)
    return Client(model, _loss, _data(), sampling, method, local_steps=2, learning_rate=0.1)


@functools.cache
def _shared_client() -> list[Client]:
    return [client()]


def _request(message: Any, folder: Path) -> None:
    """A client of its own only after a request was accepted: refused ones must leave no trace."""
    holder = _shared_client()
    one = holder[0]
    before = one.epsilon()
    message = message if isinstance(message, dict) else {"round": message}
    number, params, extras, kind = (message.get(name) for name in ("round", "params", "extras", "kind"))
    try:
        one.answer(Request(number, _named(params), _named(extras), kind))
    except Exception:
        assert one.epsilon() == before, "a refused request was charged"
        raise
    one.close()
    holder[0] = client()


def _named(values: Any) -> dict[str, Any]:
    """What came under names: the wire carries nothing else in such a place, and its own tests feed that."""
    return values if isinstance(values, dict) else {}


class _Liar:
    """A client that answers with the reply that it was given."""

    def __init__(self, reply: Any) -> None:
        self._reply = reply

    def answer(self, request: Request) -> Any:
        return self._reply


def _reply(answer: Any, folder: Path) -> None:
    """The server: what a client answers must not end the training, nor make the model unusable."""
    params = {"weight": torch.zeros(1, 3), "bias": torch.zeros(1)}
    honest = _Liar(Reply({"weight": torch.ones(1, 3), "bias": torch.ones(1)}))
    sent = _named(_named(answer).get("params"))
    tensors = {name: value for name, value in sent.items() if isinstance(value, torch.Tensor)}
    liar = _Liar(Reply(tensors, _named(_named(answer).get("reports"))))
    found = simulate(FedAvg(), [liar, honest], params, 1)
    assert {n: p.shape for n, p in found.params.items()} == {n: p.shape for n, p in params.items()}
    assert all(bool(torch.isfinite(p).all()) for p in found.params.values())


# ---- federations


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


def _look_at_federation(folder: Path) -> None:
    verify_federation(str(folder)).to_json()
    report_federation(str(folder))


def _published(folder: Path) -> None:
    """What whoever was given the published part reads: it has no settings of its owner."""
    _look_at_federation(folder)
    saved.settings_of_run(str(folder), published=True)
    saved.schema_of_run(str(folder))


@functools.cache
def _published_part() -> Path:
    return Path(shutil.copytree(_federation(), home() / "published", ignore=lambda *_: {"settings.json"}))


def _federation_settings(folder: Path) -> None:
    _look_at_federation(folder)
    saved.settings_of_run(str(folder))
    settings = FederationSettings.read(folder / "settings.json")
    settings.check()
    settings.command()
    saved.check_federation_folder(settings, str(folder))


# ---- all


def of_data(
    label: str, name: str, seeds: list[bytes], read: Callable[[Path], Any], share: int, words: Any = None
) -> Target:
    inputs = mutated_bytes(seeds) if words is None else mutated_text(seeds, words)
    return Target(f"data: {label}", inputs, _data_file(name, read), share, seeds[0])


def of_folder(
    kind: str,
    name: str,
    then: Callable[[Path], None],
    share: int,
    folder: Callable[[], Path],
    strategy: Callable[..., Strategy] = mutated_json,
) -> Target:
    good = file_of(folder, name)
    inputs = strategy(good) if strategy is mutated_lines else strategy([good])
    return Target(f"{kind}: {name}", inputs, with_file(folder, name, then), share, good)


@functools.cache
def targets() -> tuple[Target, ...]:
    """All of them; the seeds are made on first use."""
    good_checkpoint = file_of(begun_run, "checkpoint/step-00000002.pt")
    settings = json.dumps(asdict(RunSettings(data="digits", epsilon=3.0).resolved())).encode()
    request, reply = (mutated_tree(tree, [*HOSTILE, *TENSORS]) for tree in (GOOD_REQUEST, GOOD_REPLY))
    as_settings = with_file(begun_run, saved.SETTINGS_FILE, _run_settings)
    form = ["true", "[columns.age]", "low = nan", "inf"]
    run, federation, published = "run folder", "federation", "published federation"
    return (
        of_folder("resume", "config.json", resume, 900, begun_run),
        Target("resume: checkpoint", _checkpoints(), _sealed, 1300, good_checkpoint),
        Target("settings.json", mutated_json([settings]), as_settings, 800, settings),
        of_folder(run, "statement.json", _look, 900, finished_run),
        of_folder(run, "config.json", _look, 300, finished_run),
        of_folder(run, "metrics.jsonl", _look, 300, finished_run, mutated_lines),
        of_folder(run, "statement.sig.json", _look, 400, finished_run),
        of_folder(run, "private/journal.jsonl", _look, 700, finished_run, mutated_lines),
        of_data("idx", "x-idx3-ubyte", [IDX, IDX_FLOATS], lambda p: idx.read_idx(p, 3), 500),
        of_data("csv", "x.csv", [CSV], lambda p: schema.read_rows(p, FORM), 400, ["yes", "a", "#", "?"]),
        of_data("table by schema", "x.csv", [ROWS], _rows_by_schema, 300, ["yes", "a", "?"]),
        of_data("schema", "x.toml", [SCHEMA], _rows_by_schema, 400, form),
        of_data("image", "x.png", [_png()], _image_folder, 200),
        of_data("cifar binary", "x.bin", [CIFAR], cifar.read_cifar_binary, 200),
        of_data("model", "model.safetensors", [_safetensors()], _load_model, 300),
        Target("keys", mutated_bytes(_key_files()), _verify_with_key, 200, None),
        Target("client: requests", request, _request, 400, GOOD_REQUEST),
        Target("server: replies", reply, _reply, 300, GOOD_REPLY),
        of_folder(federation, "federation.json", _look_at_federation, 300, _federation),
        of_folder(published, "federation.json", _published, 300, _published_part),
        of_folder(federation, "settings.json", _federation_settings, 300, _federation),
        of_folder(federation, "federation.sig.json", _look_at_federation, 100, _federation),
        of_folder(federation, "clients/001/statement.json", _look_at_federation, 100, _federation),
    )
