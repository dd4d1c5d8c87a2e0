"""How often one DP-SGD step would make the host wait for a device, counted without one.

Tensors that would lie on a device are followed through the fourth step: parameters, rows of private records,
random numbers that become one of their shapes, and all that is computed from these. Counted is each time the
host reads a value of them: `item`, `bool`, `tolist`, `nonzero`, a mask as an index, a copy to the host.

    python benchmarks/host_waits.py            # where the host waits
    python benchmarks/host_waits.py --check    # exit code 1 where it waits more often than it did

The run has a folder: metrics and diagnostics are written, too.
"""

from __future__ import annotations

import argparse
import collections
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import equipoise as eq
from equipoise import _host
from equipoise.gradients.factors import outer
from equipoise.privacy import digests
from equipoise.privacy.private import unwrap
from equipoise.training import forwards

WAITS = 3  # the limit of a step, whatever its number of micro-batches; the aim is 1
PACKAGE = str(Path(eq.__file__).parent) + "/"
READS = {
    getattr(Tensor, name)
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
}
FOLLOW_VALUES = {
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten._unique2.default,
    torch.ops.aten.equal.default,
}
"""Operations whose result has no shape, or is no tensor, until values are known."""


class Device:
    """Which memory would lie on a device, and where the host reads it."""

    def __init__(self) -> None:
        self._memory: dict[int, Any] = {}  # kept alive: no address is used twice
        self.waits: collections.Counter[str] = collections.Counter()

    def holds(self, *values: Any) -> bool:
        return any(
            isinstance(value, Tensor) and unwrap(value).untyped_storage().data_ptr() in self._memory
            for value in tree_leaves(values)
        )

    def take(self, nest: Any) -> Any:
        """What now lies there."""
        for leaf in tree_leaves(nest):
            if isinstance(leaf, Tensor) and leaf.numel():
                storage = unwrap(leaf).untyped_storage()
                self._memory[storage.data_ptr()] = storage
        return nest

    def wait(self) -> None:
        frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(PACKAGE)]
        last = frames[-1]
        self.waits[f"{last.filename.removeprefix(PACKAGE)}:{last.lineno}  {last.line}"] += 1


class _Followed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        is_there = self.device.holds(args, kwargs)
        if is_there and func in FOLLOW_VALUES:
            self.device.wait()
        masks = args[1] if is_there and func is torch.ops.aten.index.Tensor else ()
        if any(mask is not None and mask.dtype == torch.bool for mask in masks):
            self.device.wait()
        out = func(*args, **(kwargs or {}))
        return self.device.take(out) if is_there else out


class _Reads(TorchFunctionMode):
    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func not in READS or not self.device.holds(args[0]):
            return func(*args, **(kwargs or {}))
        self.device.wait()
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):  # a copy on the host
            with _disable_current_modes():
                return out.clone()
        return out


def waits_of_a_step(run_dir: Path, micro_batch_size: int = 300) -> collections.Counter[str]:
    """Where the host would wait for a device in the fourth step, and how often.

    Args:
        run_dir: for the files of the run.
        micro_batch_size: a draw has about 100 records.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3))
    data = {"input": torch.randn(1000, 20), "label": torch.randint(3, (1000,))}

    def losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch["input"]), batch["label"], reduction="none")

    training = eq.PrivateTraining(
        model,
        torch.optim.Adam(model.parameters()),
        loss=losses,
        data=data,
        sampling=eq.Poisson(expected_batch_size=100, population=1000, steps=10),
        budget=eq.Budget(epsilon=3.0, delta=1e-5),
        micro_batch_size=micro_batch_size,
        run_dir=run_dir,
    )
    training._setup.rows.looks_at_once = False  # as on a device
    training.take_step()
    training.take_step()
    device = Device()
    state = tree_leaves(list(training.optimizer.state.values()))
    device.take([*model.parameters(), *(value for value in state if value.ndim)])  # counts stay on the host
    move = forwards.moved
    with (
        mock.patch.object(forwards, "moved", lambda nest, to: device.take(move(nest, to))),
        mock.patch.object(digests, "HASHED_WHERE_THEY_ARE", ("cpu",)),
        mock.patch.object(outer, "host_waits", return_value=True),
        mock.patch.object(_host, "host_waits", return_value=True),
        _Followed(device),
        _Reads(device),
    ):
        training._steps.remember()  # from here on digests are taken on the device
        training.take_step()
        device.waits.clear()
        training.take_step()
    return device.waits


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--micro-batch-size", type=int, default=300, help="a draw has about 100 records")
    parser.add_argument("--check", action="store_true", help="fail where the host waits more often")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        waits = waits_of_a_step(Path(folder) / "run", given.micro_batch_size)
    print(f"the host waits {waits.total()} times in a step")
    for place, count in waits.most_common():
        print(f"{count:6}  {place}")
    if given.check and waits.total() > WAITS:
        sys.exit(f"at most {WAITS} are allowed")


if __name__ == "__main__":
    main()
