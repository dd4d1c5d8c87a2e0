"""CUDA graphs on the processor: operations that are recorded once and run again on the memory they had.

As a graph does, a launch reads and writes the addresses of the recording and runs none of the Python around
it, and nothing can be read on the host while it is recorded.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only


def _tensors(nest):
    return [leaf for leaf in tree_leaves(nest) if torch.is_tensor(leaf)]


class _Recording(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations, self._own = [], set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("the host reads a value")
        out = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        made = _tensors(out)
        fresh = [tensor.untyped_storage()._cdata not in given for tensor in made]
        self._own |= {
            one.untyped_storage()._cdata for one, is_fresh in zip(made, fresh, strict=True) if is_fresh
        }
        args, kwargs, made = tree_map_only(torch.Tensor, self._address, (args, kwargs or {}, made))
        self.operations.append((func, args, kwargs, made, fresh))
        return out

    def _address(self, tensor):
        """The tensor; of memory that was there before, another at its address that does not own it."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._own:
            return tensor
        there = torch._C._construct_storage_from_data_pointer(
            storage.data_ptr(), tensor.device, storage.nbytes()
        )
        with _disable_current_modes():
            like = torch.empty(0, dtype=tensor.dtype)
            return like.set_(there, tensor.storage_offset(), tensor.size(), tensor.stride())


class RecordedGraph:
    """Takes the place of `CudaGraph`."""

    def __init__(self, function, device):
        with _Recording() as recording:
            self.outputs = function()
        self._operations = recording.operations

    def launch(self):
        with torch.no_grad():
            for func, args, kwargs, made, fresh in self._operations:
                if any(fresh) or func._schema.is_mutable:
                    again = _tensors(func(*args, **kwargs))
                    for own, new, is_fresh in zip(made, again, fresh, strict=True):
                        if is_fresh:
                            own.copy_(new)
