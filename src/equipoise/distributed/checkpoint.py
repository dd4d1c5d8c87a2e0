"""The part of a checkpoint that processes hold in parts: parameters, optimiser state, their average.

`torch.distributed.checkpoint` writes a folder, `checkpoint/step-00000042.shards/`: each process its own
parts, so that no process holds them all. The sealed file of the checkpoint has the SHA-256 of every file in
it, and comes last: a folder without one is never taken for whole. Another number of processes reads its own
parts from it.

A DCP folder has one file that is a pickle. It is read with the few names that such a file needs.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipoise._dtensor import is_dtensor, local_part, with_part
from equipoise._files import CheckpointError
from equipoise.distributed.processes import Processes

_NAMES = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "pathlib": ("PosixPath", "WindowsPath"),
    "collections": ("OrderedDict",),
}


class _Unpickler(pickle.Unpickler):
    """Takes what describes tensors, and no other code."""

    def find_class(self, module: str, name: str) -> Any:
        of_torch = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not (of_torch or name in _NAMES.get(module, ())):
            raise CheckpointError(f"the checkpoint names {module}.{name}, which describes no tensor: refused")
        return super().find_class(module, name)


def sharded_tensors(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: Mapping[str, Tensor] | None,
    of_method: Mapping[str, Any] | None,
) -> dict[str, Tensor]:
    """The tensors that processes hold in parts, by name; in a method's state they are named as parameters."""
    found = {f"model.{name}": value for name, value in model.state_dict().items()}
    for number, entry in optimizer.state_dict()["state"].items():
        found |= {f"optimizer.{number}.{name}": value for name, value in entry.items()}
    found |= {f"average.{name}": value for name, value in (average or {}).items()}
    for key, tensors in (of_method or {}).items():
        if isinstance(tensors, Mapping):
            found |= {f"method.{key}.{name}": value for name, value in tensors.items()}
    return {name: value.detach() for name, value in found.items() if is_dtensor(value)}


def without_parts(nest: Any) -> Any:
    """A nest of plain values in which each tensor that processes hold in parts is None."""
    if isinstance(nest, Mapping):
        return {key: without_parts(value) for key, value in nest.items()}
    if isinstance(nest, list | tuple):
        return type(nest)(without_parts(value) for value in nest)
    return None if is_dtensor(nest) else nest


def save_parts(folder: Path, parts: Mapping[str, Tensor], processes: Processes) -> dict[str, str]:
    """Write the parts of every process; the answer has the digest of each file.

    Raises:
        CheckpointError: they could not be written.
    """
    from torch.distributed import checkpoint as dcp

    unfinished = folder.with_name(f".{folder.name}.tmp")

    def clear() -> None:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        for old in (unfinished, folder):
            shutil.rmtree(old, ignore_errors=True)

    processes.first(clear)
    try:
        with warnings.catch_warnings(action="ignore"):  # DCP warns of what is meant here
            dcp.save(dict(parts), checkpoint_id=str(unfinished))  # type: ignore[attr-defined]
    except Exception as error:
        raise CheckpointError(
            f"the parts of the checkpoint {folder.name} could not be written to {folder.parent} "
            f"({type(error).__name__}: {error}). The checkpoint before is intact."
        ) from error

    def seal() -> dict[str, str]:
        os.replace(unfinished, folder)
        return digests(folder)

    return processes.first(seal)


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each file."""
    found = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def check_parts(folder: Path, expected: Mapping[str, str]) -> None:
    """See that the files are those that were written.

    Raises:
        ValueError: naming one that is missing, additional or other.
    """
    found = digests(folder) if folder.is_dir() else {}
    wrong = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    if wrong:
        raise ValueError(f"{folder.name}/{wrong[0]} is missing, or is not the file that was written")


def load_parts(
    folder: Path, model: nn.Module, parameters: list[Tensor], names: Mapping[str, str]
) -> dict[str, Tensor]:
    """The parts that this process holds.

    Args:
        folder: of the parts.
        model: its `state_dict` gives the placements.
        parameters: of the optimiser, in its order.
        names: of all parts, and their types (`str(dtype)`).

    Raises:
        ValueError: the model lacks some of them.
    """
    from torch.distributed import checkpoint as dcp

    own = {name: value for name, value in model.state_dict().items() if is_dtensor(value)}
    trained = dict(model.named_parameters())
    wanted: dict[str, Tensor] = {}
    for name, dtype in names.items():
        kind, _, rest = name.partition(".")
        if kind == "optimizer":
            like: Tensor | None = parameters[int(rest.partition(".")[0])]
        elif kind == "method":
            like = trained.get(rest.partition(".")[2])
        else:
            like = own.get(rest) if kind == "model" else trained.get(rest)
        if like is None or not is_dtensor(like):
            raise ValueError(f"the model holds no parts of {rest}")
        empty = torch.empty_like(local_part(like), dtype=getattr(torch, dtype.removeprefix("torch.")))
        wanted[name] = with_part(empty, like.detach())
    with warnings.catch_warnings(action="ignore"):
        dcp.load(wanted, storage_reader=_reader(folder))  # type: ignore[attr-defined]
    return wanted


def _reader(folder: Path) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import StorageMeta

    class Reader(FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Any:
            with (folder / ".metadata").open("rb") as file:
                metadata = _Unpickler(file).load()
            if metadata.storage_meta is None:
                metadata.storage_meta = StorageMeta()
            metadata.storage_meta.load_id = self.load_id
            return metadata

    return Reader(str(folder))
