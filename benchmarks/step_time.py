"""Time and memory of one private training step, beside plain training and other libraries, in one run.

A step is: forward, backward, clip each record's gradient to norm 1, add noise (multiplier 1), average,
SGD update, on one fixed batch without data loading. Each (task, method) lives in a process of its own;
rounds visit the methods in turn, so that a busy machine slows all of them alike; the ratio to plain training
is taken round by round and its median and quartiles are reported. Memory is the peak of the resident
set during steps, less what it was with the model and the batch only: gradients and what a method keeps count.

Where there is a GPU all of it runs there, and memory is what tensors take there. `CUDA_VISIBLE_DEVICES=`
before the command keeps it on the processor.

    python benchmarks/step_time.py                          # everything that is installed
    python benchmarks/step_time.py --tasks cnn --methods plain ours --rounds 30
    python benchmarks/step_time.py --tasks lora --together 1   # each method beside plain only
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
# Processes are copies of one that has the libraries loaded: importing them takes longer than many a row.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "tasks",
        "equipoise.training",
        "torch.func",
        "torch._dynamo",
        "opacus.validators",
        "transformers",
        "peft",
    ]
)

METHODS = (
    "plain",
    "ours",
    "ours-training",
    "ours-eager",
    "ours-compiled",
    "vmap",
    "opacus-hooks",
    "opacus-functorch",
    "opacus-ew",
    "opacus-ghost",
)
# Freed memory stays in the process: without this glibc returns every large block to the kernel and the
# methods that materialise per-sample gradients pay page faults for it. The setting favours them.
KEEP = {
    "MALLOC_MMAP_THRESHOLD_": "17179869184",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "268435456",
    "MALLOC_ARENA_MAX": "1",
}
PUBLIC_RECORDS = 100  # for the methods that take some
PREFIX = "method:"  # before a name of the method table
CLIP_NORM, NOISE_MULTIPLIER, LEARNING_RATE = 1.0, 1.0, 0.01


# --- the methods
def trained(model) -> dict:
    """The parameters that are trained, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def plain_step(task):
    import torch

    optimizer = torch.optim.SGD(task.model.parameters(), lr=LEARNING_RATE)

    def step() -> None:
        optimizer.zero_grad()
        task.losses(task.model(task.inputs), task.labels).mean().backward()
        optimizer.step()

    return step


def ours_step(task):
    """The engine, a clip rule and the ledger's noise, no sampling and no journal."""
    import torch

    from equipoise.gradients import GradientEngine
    from equipoise.methods.clip_rules import Abadi
    from equipoise.privacy import Secrets
    from equipoise.privacy.noise.streams import NormalStream

    batch = {"input": task.inputs, "label": task.labels}
    optimizer = torch.optim.SGD(task.model.parameters(), lr=LEARNING_RATE)
    engine = GradientEngine(task.model, lambda model, b: task.losses(model(b["input"]), b["label"]), batch)
    rule = Abadi()
    named = trained(task.model)
    sizes = [p.numel() for p in named.values()]
    records = len(task.labels)
    noise, std = NormalStream(Secrets().key), NOISE_MULTIPLIER * CLIP_NORM

    def step() -> None:
        gradients = engine(batch)
        sums = gradients.weighted_sums(rule.weights(gradients.row_norms(), CLIP_NORM))
        del gradients
        pieces = torch.split(noise.draw(sum(sizes), std, device=task.inputs.device), sizes)
        for (name, parameter), piece in zip(named.items(), pieces, strict=True):
            parameter.grad = piece.view(parameter.shape).add_(sums[name]).div_(records)
        optimizer.step()

    return step


def records_of(task) -> dict:
    """The batch as data of a training, which lie on the host."""
    return {"input": task.inputs.cpu(), "label": task.labels.cpu()}


def private_training(task, microbatch_size=None, **options):
    """DP-SGD by ``PrivateTraining`` on the batch of a task.

    Args:
        microbatch_size: the whole batch by default.
        options: of ``PrivateTraining``, others than these.
    """
    import torch

    import equipoise as eq

    settings = {
        "data": eq.Data(records_of(task), microbatch_size=microbatch_size or len(task.labels)),
        "sampling": eq.FullBatch(population=len(task.labels), steps=100_000),
        "method": eq.DPSGD(clip_norm=CLIP_NORM, noise_multiplier=NOISE_MULTIPLIER),
    }
    return eq.PrivateTraining(
        task.model,
        torch.optim.SGD(task.model.parameters(), lr=LEARNING_RATE),
        loss=lambda model, b: task.losses(model(b["input"]), b["label"]),
        **(settings | options),
    )


def ours_training_step(task):
    """The whole of ``PrivateTraining``: sampling, fetching, ledger, journal and diagnostics included."""
    iterator = iter(private_training(task))
    return lambda: next(iterator)


def ours_eager_step(task):
    """The same, running the model; each method runs in a process of its own, so the switch stays there."""
    os.environ["EQUIPOISE_EAGER"] = "1"
    return ours_training_step(task)


def ours_compiled_step(task):
    """The same with ``compile=True``."""
    iterator = iter(private_training(task, compile=True))
    return lambda: next(iterator)


def equipoise_step(words: str, public):
    """A step of ``PrivateTraining`` with any method of the table.

    Args:
        words: a method's name and settings, such as ``pcdp-sgd:source.basis=held``.
        public: a task whose records are public, for the methods that take some.
    """
    name, _, settings = words.partition(":")

    def build(task):
        import equipoise as eq
        from equipoise.methods import PublicRecords, find

        options: dict = {"clip_norm": CLIP_NORM}
        for key, value in (pair.split("=") for pair in settings.split(",") if pair):
            options[key] = int(value) if value.isdigit() else value
        kind = find(name)
        options = {
            key: value for key, value in options.items() if key.split(".")[0] in kind.__dataclass_fields__
        }
        method = kind.from_config({"name": name, **options}, PublicRecords(records_of(public)))
        iterator = iter(
            private_training(
                task,
                method=method,
                sampling=eq.FullBatch(population=len(task.labels), steps=1_000),
                budget=eq.Budget(epsilon=1000.0, delta=1e-5),  # the scale of the noise changes no time
            )
        )
        return lambda: next(iterator)

    return build


def vmap_step(task):
    """A reference of a few lines: vmap of grad, every per-sample gradient formed."""
    import torch
    from torch.func import functional_call, grad, vmap
    from torch.nn.attention import SDPBackend, sdpa_kernel

    optimizer = torch.optim.SGD(task.model.parameters(), lr=LEARNING_RATE)
    named = trained(task.model)

    def loss(values, x, y):
        return task.losses(functional_call(task.model, values, (x[None],)), y[None])[0]

    rows_of = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")

    def step() -> None:
        with sdpa_kernel(SDPBackend.MATH):
            rows = rows_of({n: p.detach() for n, p in named.items()}, task.inputs, task.labels)
        norms = torch.stack([r.flatten(1).norm(dim=1) for r in rows.values()]).norm(dim=0)
        weights = (CLIP_NORM / norms.clamp_min(1e-12)).clamp(max=1.0)
        for name, r in rows.items():
            total = torch.tensordot(weights, r, dims=1)
            noise = torch.empty_like(total).normal_(0.0, NOISE_MULTIPLIER * CLIP_NORM)
            named[name].grad = total.add_(noise).div_(len(task.labels))
        optimizer.step()

    return step


def opacus_step(mode: str):
    def build(task):
        import warnings

        import torch
        from opacus import PrivacyEngine
        from opacus.validators import ModuleValidator

        warnings.filterwarnings("ignore")
        model = ModuleValidator.fix(task.model)  # recurrent layers become its own
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        dataset = torch.utils.data.TensorDataset(task.inputs, task.labels)
        loader = torch.utils.data.DataLoader(dataset, batch_size=len(dataset))

        class Criterion(torch.nn.Module):
            reduction = "mean"

            def forward(self, outputs, labels):
                losses = task.losses(outputs, labels)
                return losses if self.reduction == "none" else losses.mean()

        made = PrivacyEngine().make_private(
            module=model.train(),
            optimizer=optimizer,
            data_loader=loader,
            criterion=Criterion(),
            noise_multiplier=NOISE_MULTIPLIER,
            max_grad_norm=CLIP_NORM,
            poisson_sampling=False,
            grad_sample_mode=mode,
        )
        model, optimizer = made[0], made[1]
        criterion = made[2] if mode == "ghost" else Criterion()

        def step() -> None:
            optimizer.zero_grad()
            criterion(model(task.inputs), task.labels).backward()
            optimizer.step()

        return step

    return build


BUILDERS: dict[str, Callable] = {
    "plain": plain_step,
    "ours": ours_step,
    "ours-training": ours_training_step,
    "ours-eager": ours_eager_step,
    "ours-compiled": ours_compiled_step,
    "vmap": vmap_step,
    **{f"opacus-{m}": opacus_step(m) for m in ("hooks", "functorch", "ew", "ghost")},
}


# --- one worker
def _status_kib(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    return 0


def _held_kib(device) -> int:
    """The resident set, with what was freed given back; on a GPU what tensors take. Peaks count from here."""
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device) >> 10
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status_kib("VmRSS")


def _peak_kib(step: Callable[[], object], device) -> int:
    """The most that is held during three steps."""
    import torch

    _held_kib(device)
    for _ in range(3):
        step()
    return torch.cuda.max_memory_allocated(device) >> 10 if device.type == "cuda" else _status_kib("VmHWM")


def worker(orders: Connection, task_name: str, method: str, threads: int, gigabytes: int) -> None:
    """Answer orders until the other end is closed; the first answer says that the method runs, or why not."""
    try:
        _serve(orders, task_name, method, threads, gigabytes)
    except EOFError:
        return
    except Exception as error:  # whatever a library refuses with is shown in the table
        with contextlib.suppress(OSError):
            orders.send({"failed": f"{type(error).__name__}: {error}"[:300]})


def _serve(orders: Connection, task_name: str, method: str, threads: int, gigabytes: int) -> None:
    import torch

    from tasks import TASKS

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if gigabytes and device.type == "cpu":
        resource.setrlimit(resource.RLIMIT_DATA, (gigabytes << 30, gigabytes << 30))
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    task = TASKS[task_name]().to(device)
    if method.startswith(PREFIX):
        build = equipoise_step(method.removeprefix(PREFIX), TASKS[task_name](batch_size=PUBLIC_RECORDS))
    else:
        build = BUILDERS[method]
    before = _held_kib(device)
    step = build(task)
    for _ in range(2):  # the first takes what is made only once
        step()
    orders.send({"ready": True})
    while True:
        order = orders.recv()
        if order["do"] == "memory":
            orders.send({"mb": (_peak_kib(step, device) - before) / 1024})
            continue
        clock = time.process_time if order["processor"] else time.perf_counter
        times = []
        begin = clock()
        while clock() - begin < order["seconds"] or len(times) < order["steps"]:
            start = clock()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(clock() - start)
        orders.send({"seconds": statistics.median(times), "mean": statistics.fmean(times)})


class Process:
    """A method in a process of its own."""

    def __init__(self, *arguments: object) -> None:
        self.orders, end = FORKS.Pipe()
        self.process = FORKS.Process(target=worker, args=(end, *arguments), daemon=True)
        self.process.start()
        end.close()

    def read(self) -> dict:
        """The next answer."""
        try:
            answer = self.orders.recv()
        except EOFError:
            answer = {"failed": "the process ended without a word"}
        if "failed" in answer:
            raise RuntimeError(answer["failed"])
        return answer

    def ask(self, **order: object) -> dict:
        self.orders.send(order)
        return self.read()

    def close(self) -> None:
        self.process.kill()
        self.process.join()


# --- the comparison
def start(
    task: str, methods: list[str], threads: int, gigabytes: int = 0
) -> tuple[dict[str, Process], dict[str, str]]:
    """One process per method, all started before any is awaited; and why the others did not start."""
    workers, failed = {method: Process(task, method, threads, gigabytes) for method in methods}, {}
    for method, process in list(workers.items()):
        try:
            process.read()
        except RuntimeError as error:
            failed[method] = str(error)
            workers.pop(method).close()
    return workers, failed


def measured(task: str, methods: list[str], arguments: argparse.Namespace) -> dict[str, dict]:
    """By method, plain training first: median milliseconds, ratio to plain and its quartiles, megabytes."""
    plain, others = methods[0], methods[1:]
    size = arguments.together or max(len(others), 1)
    times: dict[str, list[float]] = {method: [] for method in methods}
    ratios: dict[str, list[float]] = {method: [] for method in methods}
    rows: dict[str, dict] = {method: {} for method in methods}
    for group in [others[i : i + size] for i in range(0, len(others), size)] or [[]]:
        workers, failed = start(task, [plain, *group], arguments.threads, arguments.gigabytes)
        for method, why in failed.items():
            rows[method] = {"failed": why}
        for _ in range(arguments.rounds if "time" in arguments.measure else 0):
            found = {}
            for method, process in workers.items():
                order = {"seconds": arguments.seconds, "steps": arguments.steps}
                found[method] = process.ask(do="time", processor=arguments.processor, **order)["seconds"]
                times[method].append(found[method])
                ratios[method].append(found[method] / found[plain])
        for method, process in workers.items():
            if "memory" in arguments.measure:
                rows[method]["extra_mb"] = process.ask(do="memory")["mb"]
            process.close()
    for method, own in ratios.items():
        if own:
            low, middle, high = statistics.quantiles(own, n=4) if len(own) > 1 else own * 3
            rows[method] |= {"ms": 1000 * statistics.median(times[method]), "ratio": middle}
            rows[method]["quartiles"] = [low, high]
    return rows


def line(method: str, row: dict) -> str:
    if "failed" in row:
        return f"{method:18} failed: {row['failed']}"
    shown = f"{method:18}"
    if "ms" in row:
        low, high = row["quartiles"]
        shown += f" {row['ms']:9.2f} ms  ratio {row['ratio']:6.2f} [{low:6.2f}, {high:6.2f}]"
    if "extra_mb" in row:
        shown += f"  extra {row['extra_mb']:6.0f} MB"
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", default=["mlp", "cnn", "resnet20", "gpt2lin", "gpt2"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.6, help="time of one visit to one method")
    parser.add_argument("--steps", type=int, default=2, help="steps of a visit, at least")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--together", type=int, default=0, help="methods at once next to plain training; 0: all"
    )
    parser.add_argument("--gigabytes", type=int, default=0, help="most memory of one method; 0: no limit")
    parser.add_argument("--measure", nargs="+", default=["time", "memory"], choices=["time", "memory"])
    parser.add_argument(
        "--default-allocator", action="store_true", help="give freed memory back, as users' processes do"
    )
    parser.add_argument(
        "--processor", action="store_true", help="time of the processor, for machines that do other work too"
    )
    parser.add_argument("--out", type=Path, help="write the results as JSON here, added to what is there")
    arguments = parser.parse_args()
    if not arguments.default_allocator:
        os.environ.update(KEEP)
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    # What the libraries ask of CUDA must not begin it in the process that is copied.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    methods = ["plain", *[m for m in arguments.methods if m != "plain"]]
    for task in arguments.tasks:
        rows = measured(task, methods, arguments)
        print(f"\n{task}", *(line(method, row) for method, row in rows.items()), sep="\n", flush=True)
        if arguments.out:
            found = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
            kept = found.setdefault(task, {})
            for method, row in rows.items():
                kept[method] = kept.get(method, {}) | row
            arguments.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
