"""Which models trace, and which are proved: a trace's operations are read for mixtures of records.

Every model of `architectures.py` (transformers from small configurations, with padding and without, and
shapes of popular repositories), some ways in which models run, and the zoo of the tests: honest cases, and
wrong ones, of which none may be proved. What the engine does not trace is traced as plain PyTorch: losses,
and gradients by `autograd`, which must be sums over records.

    OMP_NUM_THREADS=1 python -m benchmarks.proofs                 # all of them, minutes
    OMP_NUM_THREADS=1 python -m benchmarks.proofs wrong honest     # some lists
    OMP_NUM_THREADS=1 python -m benchmarks.proofs --only GPT-2     # some names
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from sys import path as import_path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from equipoise.gradients.capture.random_numbers import GlobalState
from equipoise.gradients.engine import GradientEngine
from equipoise.gradients.engine_inputs import record_leaves, replace_leaves
from equipoise.gradients.provenance import Proof, Public, not_a_sum, not_by_record, prove, read
from equipoise.gradients.trace import Line

ROOT = Path(__file__).parent.parent
import_path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests" / "gradients")]
from architectures import ARCHITECTURES  # noqa: E402

RECORDS = 6

#: Wrong cases whose trace is right: what is wrong with them lies elsewhere, and other checks find it.
ELSEWHERE = {
    "custom function whose backward replaces what is not finite": "nothing is wrong, and it trains",
    "hook that gives nothing where some gradient is not finite": "nothing is wrong, and it trains",
    "collated with neighbours, before a head of zeros": "records are blended before the batch",
    "collated with neighbours, behind a rare coin": "records are blended before the batch",
    "augmented with neighbours, behind a rare coin of its generator": "records are blended before the batch",
    "another scale at every call": "an attribute changes between calls",
    "scripted": "parameters cannot be watched",
    "traced part": "parameters cannot be watched",
    "scripted activation": "parameters cannot be watched",
    "divided by a collated count": "the batch has a tensor without a record axis, which is a constant there",
}

#: A model, its loss and a micro-batch.
Made = tuple[nn.Module, Callable[..., Tensor], Any]


def plain(model: nn.Module, loss: Callable[..., Tensor], batch: Any) -> tuple[Line, int]:
    """A trace of losses and gradients by autograd, without the library, and how many losses there are."""
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    trained = [name for name, p in parameters.items() if p.requires_grad]
    records = record_leaves(batch)
    given = {**{n: p.detach() for n, p in parameters.items()}, **buffers}
    given |= {f"record:{number}": leaf for number, leaf in enumerate(records)}
    names = list(given)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, batch: Any) -> Tensor:
            return loss(self.model, batch)

    def flat(*values: Tensor) -> list[Tensor]:
        held = dict(zip(names, values, strict=True))
        own = {n: held[n].detach().requires_grad_(n in trained) for n in parameters}
        state = {f"model.{n}": own[n] for n in own} | {f"model.{n}": held[n].clone() for n in buffers}
        leaves = [value for name, value in held.items() if name.startswith("record:")]
        losses = torch.func.functional_call(Loss(), state, (replace_leaves(batch, leaves),))
        if losses.shape != (len(records[0]),):
            raise ValueError(f"losses have the shape {tuple(losses.shape)}")
        upstream = torch.ones_like(losses)
        found = torch.autograd.grad(losses, [own[n] for n in trained], upstream, materialize_grads=True)
        return [losses.detach(), *found]

    state = GlobalState()
    graph = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True, record_stack_traces=True)(
        *given.values()
    )
    moved = {"NumPy", "Python"}.intersection(state.moved())
    if moved:
        raise RuntimeError(f"the model asks {' and '.join(sorted(moved))} for random numbers")
    return Line(graph, tuple(names), ("losses", *trained)), len(records[0])


def proved_plainly(model: nn.Module, loss: Callable[..., Tensor], batch: Any) -> Proof:
    line, records = plain(model, loss, batch)
    public = {name: Public() for name in line.inputs if not name.startswith("record:")}
    kinds = read(line, public, records)
    faults = [not_by_record(kinds["losses"], "the losses")]
    faults += [not_a_sum(kind, name) for name, kind in kinds.items() if name != "losses"]
    found = [fault for fault in faults if fault is not None]
    return Proof(next((fault for fault in found if fault.mixes), next(iter(found), None)))


def architectures() -> Iterator[tuple[str, Callable[[], Made]]]:
    for name, one in ARCHITECTURES.items():
        yield name, lambda one=one: (one.model(), one.loss, dict(one.records(RECORDS)))


def ways() -> Iterator[tuple[str, Callable[[], Made]]]:
    """The same small network as it is run in other ways."""

    def squared(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).flatten(1).square().sum(1)

    def half(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return squared(model, x).float()

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Sequential(nn.Linear(5, 8), nn.Tanh()), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.inner, x, use_reentrant=False))

    class Recurrent(nn.Module):
        def __init__(self, kind: type[nn.RNNBase], first: bool) -> None:
            super().__init__()
            self.body, self.head, self.first = kind(5, 4, batch_first=first), nn.Linear(4, 1), first

        def forward(self, x: Tensor) -> Tensor:
            return self.head(
                self.body(x if self.first else x.transpose(0, 1))[1 if self.body.mode == "GRU" else 0][-1]
            )

    x, long = torch.randn(RECORDS, 5), torch.randn(RECORDS, 7, 5)
    yield "linear", lambda: (nn.Linear(5, 2), squared, x)
    yield "autocast", lambda: (nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 2)), half, x)
    yield "checkpoints", lambda: (Checkpointed(), squared, x)
    yield "GRU", lambda: (Recurrent(nn.GRU, True), squared, long)
    yield "GRU, time first", lambda: (Recurrent(nn.GRU, False), squared, long)


def zoo(cases: str) -> Iterator[tuple[str, Callable[[], Made]]]:
    import zoo as table

    for name, case in getattr(table, cases).items():

        def make(case: Any = case) -> Made:
            records = dict(case.records())
            collate = case.options.get("collate")
            if collate is not None:
                count = len(next(iter(records.values())))
                records = collate([{k: v[n] for k, v in records.items()} for n in range(count)])
            return case.model(), case.loss, records

        yield name, make


LISTS: Mapping[str, Callable[[], Iterator[tuple[str, Callable[[], Made]]]]] = {
    "architectures": architectures,
    "ways": ways,
    "honest": lambda: zoo("RIGHT_CASES"),
    "wrong": lambda: zoo("REFUSED_CASES"),
    "named": lambda: zoo("NAMED_CASES"),
}


def outcome(make: Callable[[], Made]) -> tuple[str, str, str]:
    """How it was traced, what was proved, and more about it."""
    torch.manual_seed(0)
    try:
        made = make()
    except Exception as error:
        return "not made", "", f"{type(error).__name__}: {error}"
    why = ""
    try:
        began = time.process_time()
        traced = GradientEngine(*made, check=False).traced(made[2])
        took = f"engine, {time.process_time() - began:.1f} s"
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    else:
        proof = prove(traced)
        return took, proof.outcome, "" if proof.fault is None else str(proof.fault)
    try:
        torch.manual_seed(0)
        proof = proved_plainly(*make())
    except Exception as error:
        return "not traced", "", why + " | " + f"{type(error).__name__}: {error}"
    return "plain", proof.outcome, why + " | " + ("" if proof.fault is None else str(proof.fault))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lists", nargs="*", default=list(LISTS), help="of " + ", ".join(LISTS))
    parser.add_argument("--only", nargs="*", help="names of models")
    parser.add_argument("--width", type=int, default=110, help="of the last column")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for title in options.lists:
        counts: Counter[str] = Counter()
        print(f"\n| {title} | traced | proof | |\n|---|---|---|---|", flush=True)
        for name, make in LISTS[title]():
            if options.only and name not in options.only:
                continue
            how, proof, more = outcome(make)
            if title == "wrong" and proof == "proved":
                proof, more = "proved", ELSEWHERE.get(name, "WRONG: THE PROOF HAS A HOLE")
            counts[proof or how] += 1
            print(f"| {name} | {how} | {proof} | {' '.join(more.split())[: options.width]} |", flush=True)
        print("\n" + ", ".join(f"{count} {what}" for what, count in counts.most_common()), flush=True)


if __name__ == "__main__":
    main()
