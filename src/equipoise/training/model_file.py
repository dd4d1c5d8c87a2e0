"""The trained model as a safetensors file: tensors and names only, nothing that could run code."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import nn

from equipoise.training.checkpoint import write_atomically

__all__ = ["load_model", "save_model"]


def save_model(
    model: nn.Module, path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
) -> None:
    """Write all parameters and buffers; tensors that share memory are written once.

    Args:
        model: any module.
        path: the file; written atomically, readable by others (it is post-processing of releases).
        metadata: strings that go into the file's header.
    """
    seen: set[tuple[int, int, tuple[int, ...]]] = set()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.storage_offset(), tuple(tensor.shape))
        if key in seen and tensor.numel():
            continue
        seen.add(key)
        tensors[name] = tensor.detach().cpu().contiguous()
    write_atomically(path, safetensors.save(tensors, dict(metadata or {})), mode=0o644)


def load_model(model: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Load a file of `save_model` into a model of the same architecture; the model is returned.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: names or shapes do not fit the model, or the file is damaged.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"{path} does not exist: name the model.safetensors of a finished run")
    try:
        safetensors.load_model(model, str(path))
    except (RuntimeError, SafetensorError) as error:
        raise ValueError(
            f"{path} is damaged or does not fit the model ({type(model).__name__}): {error}"
        ) from error
    return model
