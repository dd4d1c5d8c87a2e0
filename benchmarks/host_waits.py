"""How often one DP-SGD step would make the host wait for a device, and how many operations it runs there.

No device is needed. Tensors that would lie on one are followed through a step: parameters, rows of
private records, random numbers that become one of their shapes, and all that is computed from these. Counted
is each time the host reads a value of them: `item`, `bool`, `tolist`, `nonzero`, a mask as an index, a copy
to the host.

Operations stand for kernels: all that PyTorch runs in the step, but for views and memory without values.
They are counted in a step of plain training, too. Norms are taken in the way that is the cheapest by count.

Launches are what the host starts on the device where stretches of a step are captured as graphs (the module
`_launched`; here each is recorded and run again), noise is one kernel and the optimizer goes over all tensors
at once: each graph counts once, with the copy of what it is given, so does the noise, and so does each copy
to or from the host.

What keeps a step at two waits: its records follow from a digest of the parameters' values, so that a step
that is repeated with other parameters has other records, even after a journal was put back from an older
copy. The values are known after the optimizer's step, which is the user's code. The records' sums, whose
digest stands in the journal before any noise is made, are known after the forward. A digest chained from what
was released needs no wait; it would not tell another learning rate, hook or optimizer, and two questions
would have the same records.

What is launched: copies of the records, of which rows are theirs and of both to where graphs read them; rows
with their norms; weights with sums; what is looked at before the release; noise, sums, the mean and its
norm, which lie elsewhere in each step; the optimizer, which is the user's code with numbers that may change;
and the digest of what it leaves.

    python benchmarks/host_waits.py                          # small networks of every regime
    python benchmarks/host_waits.py --regimes gpt2 --places  # and where the host waits
    python benchmarks/host_waits.py --check                  # exit code 1 where it waits too often

The run has a folder: metrics and diagnostics are written, too.
"""

from __future__ import annotations

import argparse
import collections
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import equipoise as eq
from equipoise import _host, _launched
from equipoise.gradients.factors import lookup, outer
from equipoise.privacy import digests
from equipoise.privacy.ledger import ledger
from equipoise.privacy.noise.streams import NormalStream
from equipoise.privacy.private import unwrap
from equipoise.training import forwards

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import tasks
from step_time import BUILDERS, private_training
from tasks import Task
from tests.recorded_graphs import RecordedGraph

WAITS = 2  # the limit of a step, whatever its number of micro-batches: sums before the noise, then the end
LAUNCHES = 20  # the limit of a step of one micro-batch
SETTLED = 10  # steps until all that can be captured is: a graph reads what another one left
PACKAGE = str(Path(eq.__file__).parent) + "/"
READS = {
    getattr(Tensor, name)
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
}
NOTHING_COMPUTED = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
    torch.ops.aten._unsafe_view.default,
}
FOLLOW_VALUES = {
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten._unique2.default,
    torch.ops.aten.equal.default,
}
"""Operations whose result has no shape, or is no tensor, until values are known."""
SMALL_GPT2 = {"n_embd": 32, "n_head": 2, "n_layer": 4, "n_positions": 24, "vocab_size": 300}
REGIMES: dict[str, Callable[[], Task]] = {
    "mlp": partial(tasks.mlp, 20, width=16),
    "cnn": partial(tasks.cnn, 8),
    "residual": partial(tasks.resnet, 8, (8, 16), blocks=1),
    "lstm": partial(tasks.recurrent, nn.LSTM, 4),
    "attention": partial(tasks.attention, 4),
    "language": partial(tasks.language, 4, 24, words=50),
    "gpt2": partial(tasks.gpt2_small, 4, 24, **SMALL_GPT2),
    "lora": partial(tasks.gpt2_small, 4, 24, low_rank=True, **SMALL_GPT2),
}
"""Small networks of the kinds in `tasks.TASKS`: neither count follows the width."""


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


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what computes, and what of it the host launches on a device.

    Args:
        device: whose tensors are followed, if any are.
    """

    def __init__(self, device: Device | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.count, self.launches = device, 0, 0
        self._within = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        views = [given.alias_info and not given.alias_info.is_write for given in func._schema.returns]
        computes = not (any(views) or func in NOTHING_COMPUTED)
        # What is recorded writes its results where they were before.
        self.count += computes and not (self._within and func is torch.ops.aten.copy_.default)
        is_there = computes and self.device is not None and self.device.holds(args, kwargs)
        self.launches += is_there and not self._within
        return func(*args, **(kwargs or {}))

    def counted(self, move: Callable[..., Any]) -> Callable[..., Any]:
        """What moves records to the device; each of their tensors is a copy."""

        def moved(nest: Any, to: torch.device) -> Any:
            self.launches += len(tree_leaves(nest))
            return move(nest, to)

        return moved

    def as_one(self, function: Callable[..., Any], copies: Callable[..., int]) -> Callable[..., Any]:
        """The function, whose operations are launched as one, behind so many copies of what it is given."""

        def launched(*given: Any) -> Any:
            self.launches += 1 + copies(*given)
            before, self._within = self._within, True
            try:
                return function(*given)
            finally:
                self._within = before

        return launched


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
        if is_there and func._schema.is_mutable:  # what lies there was written to the first of them
            self.device.take(args[0])
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


def operations_of_plain_training(task: Task) -> int:
    """In the second step."""
    step = BUILDERS["plain"](task)
    step()
    with _Operations() as found:
        step()
    return found.count


@mock.patch.dict(_launched.GRAPHS, {"cpu": RecordedGraph})
def of_a_step(
    task: Task, run_dir: Path, micro_batch_size: int | None = None
) -> tuple[collections.Counter[str], int, int]:
    """Where the host would wait for a device in a later step, and how often; operations and launches.

    Args:
        task: the network; a step draws its whole batch.
        run_dir: for the files of the run.
        micro_batch_size: records of a forward; all of them when None.
    """
    size = len(task.labels) if micro_batch_size is None else micro_batch_size
    training = private_training(task, microbatch_size=size, run=run_dir)
    training._steps.looks_at_once = False  # as on a device
    device = Device()
    state = tree_leaves(list(training.optimizer.state.values()))
    # Frozen parameters and buffers too; counts of the optimizer stay on the host.
    device.take([*task.model.parameters(), *task.model.buffers(), *(value for value in state if value.ndim)])
    move = forwards.moved
    with (
        mock.patch.object(forwards, "moved", lambda nest, to: device.take(move(nest, to))),
        mock.patch.object(digests, "HASHED_WHERE_THEY_ARE", ("cpu",)),
        mock.patch.object(lookup, "host_waits", return_value=True),
        mock.patch.object(outer, "host_waits", return_value=True),
        mock.patch.object(_host, "host_waits", return_value=True),
        mock.patch.object(ledger, "host_waits", return_value=True),
        _Followed(device),
        _Reads(device),
    ):
        training._steps.watch.accept_parameters()  # from here on digests are taken on the device
        for _ in range(SETTLED):
            training.take_step()
        device.waits.clear()
        found, launch = _Operations(device), _launched.Launched._launch
        with (
            # All inputs that lie elsewhere are copied at once.
            mock.patch.object(
                _launched.Launched, "_launch", found.as_one(launch, lambda one, *_: bool(one._given))
            ),
            # A device makes 2^24 numbers at once.
            mock.patch.object(NormalStream, "_ranges", found.as_one(NormalStream._ranges, lambda *_: 0)),
            mock.patch.object(forwards, "moved", found.counted(forwards.moved)),
            mock.patch("torch.optim.sgd._default_to_fused_or_foreach", return_value=(False, True)),
            found,
        ):
            training.take_step()
    return device.waits, found.count, found.launches + device.waits.total()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--regimes", nargs="+", default=[*REGIMES], choices=[*REGIMES])
    parser.add_argument("--micro-batch-size", type=int, help="records of a forward; all by default")
    parser.add_argument("--places", action="store_true", help="print where the host waits")
    parser.add_argument("--check", action="store_true", help="fail where the host waits more often")
    given = parser.parse_args()
    too_often = []
    for name in given.regimes:
        torch.manual_seed(0)
        plain = operations_of_plain_training(REGIMES[name]())
        with tempfile.TemporaryDirectory() as folder:
            waits, operations, launches = of_a_step(
                REGIMES[name](), Path(folder) / "run", given.micro_batch_size
            )
        print(
            f"{name:10} waits {waits.total():3}, launches {launches:4}, operations {operations:6,}, of plain "
            f"training {plain:6,}",
            flush=True,
        )
        for place, count in waits.most_common() if given.places else ():
            print(f"{count:6}  {place}")
        if waits.total() > WAITS or (given.micro_batch_size is None and launches > LAUNCHES):
            too_often.append(name)
    if given.check and too_often:
        sys.exit(f"at most {WAITS} waits and {LAUNCHES} launches are allowed: {', '.join(too_often)}")


if __name__ == "__main__":
    main()
