"""Which models trace, which are proved, and whether a trace replays to the bits of the engine: one table.

Every model of `architectures.py` (transformers from small configurations, with padding and without, and
shapes of popular repositories), ways in which models run, the models of the command line, and the zoo of the
tests: honest cases, and wrong ones, of which none may be proved. The columns:

    traced      yes; no: it runs eagerly; refused: before anything could be traced
    proved      what `Trials.proof` says: proved, mixes, no rule (for an operation), no trace
    bits equal  losses, norms, weighted sums and rows of a replay are those of the eager engine: yes, or the
                largest error relative to the largest value, or not replayed. Norms under 1e-16 count as zero:
                a trace cannot see whether a square is zero or vanished.
    s           processor seconds of a trace
    reason      why there is no trace or proof, with the line of the model or the loss, or no replay

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
from dataclasses import dataclass
from pathlib import Path
from sys import path as import_path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from equipoise.app.model_table import MODELS, STATISTICS
from equipoise.app.models import build_model, prepare_data
from equipoise.app.tasks import loss_of
from equipoise.data.records import DataSet, Records
from equipoise.federated.local_updates import LocalUpdates
from equipoise.gradients.capture.random_numbers import random_numbers_from
from equipoise.gradients.engine import GradientEngine
from equipoise.gradients.operator import PerSampleGradients
from equipoise.gradients.provenance import Proof, prove
from equipoise.gradients.trace import why_untraced
from equipoise.training.forwards import averaged_over_views, repeat_views
from equipoise.training.owners import by_user, joined_over_users

ROOT = Path(__file__).parent.parent
import_path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests" / "gradients")]
from architectures import ARCHITECTURES, TRANSFORMERS, next_token  # noqa: E402

RECORDS = 6

#: Wrong cases whose trace is right: what is wrong with them lies elsewhere, and other checks find it.
ELSEWHERE = {
    "complex parameters": "refused for their type; nothing mixes",
    "custom function whose backward replaces what is not finite": "nothing is wrong, and it trains",
    "collated with neighbours, before a head of zeros": "records are blended before the batch",
    "collated with neighbours, behind a rare coin": "records are blended before the batch",
    "augmented with neighbours, behind a rare coin of its generator": "records are blended before the batch",
    "another scale at every call": "an attribute changes between calls",
}

#: Models of the command line that are given a row of numbers: of a table, or features that take long to fit.
NUMBERS = ("additive", "logistic", "patches-linear")

#: A model, its loss and a micro-batch.
Made = tuple[nn.Module, Callable[..., Tensor], Any]


def architectures() -> Iterator[tuple[str, Callable[[], Made]]]:
    for name, one in ARCHITECTURES.items():
        yield name, lambda one=one: (one.model(), one.loss, dict(one.records(RECORDS)))


def squared(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).flatten(1).square().sum(1)


def half(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return squared(model, x).float()


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], first: bool) -> None:
        super().__init__()
        self.body, self.head, self.first = kind(5, 4, batch_first=first), nn.Linear(4, 1), first

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0][:, -1] if self.first else self.body(x.transpose(0, 1))[0][-1])


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 2))


def adapted(**options: Any) -> nn.Module:
    import peft

    layers = {"target_modules": ["c_attn"], "fan_in_fan_out": True}
    config = peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.1, **layers, **options)
    return peft.get_peft_model(TRANSFORMERS["GPT-2"].model(), config)


def with_checkpoints(name: str) -> nn.Module:
    model = TRANSFORMERS[name].model()
    model.gradient_checkpointing_enable()
    return model


def ways() -> Iterator[tuple[str, Callable[[], Made]]]:
    """Ways in which models run, and units of privacy."""
    x, long, texts = torch.randn(RECORDS, 5), torch.randn(RECORDS, 7, 5), TRANSFORMERS["GPT-2"].records
    yield "linear layer", lambda: (nn.Linear(5, 2), squared, x)
    yield "autocast", lambda: (net(), half, x)
    yield "checkpoints", lambda: (Checkpointed(*net()), squared, x)
    for name in ("Llama", "GPT-2"):  # without dropout, and with it
        yield f"{name} with checkpoints", lambda n=name: (with_checkpoints(n), next_token, texts(RECORDS))
    for kind in (nn.LSTM, nn.GRU):
        for first in (True, False):
            order = "" if first else ", time first"
            yield f"{kind.__name__}{order}", lambda k=kind, f=first: (Recurrent(k, f), squared, long)
    for name, more in {"LoRA": {}, "rsLoRA": {"use_rslora": True}, "DoRA": {"use_dora": True}}.items():
        yield f"GPT-2 with {name}", lambda more=more: (adapted(**more), next_token, texts(RECORDS))

    views = repeat_views(x, 3, lambda x, rng: x + torch.randn(x.shape, generator=rng), torch.Generator())
    yield "three views", lambda: (net(), averaged_over_views(squared, 3), views)
    present = torch.ones(RECORDS // 2, 2, dtype=torch.bool)
    present[0, 1] = False
    for rows in ("mean", "sum"):
        users = {"records": by_user(x, present), "present": present}
        yield f"users, {rows}", lambda u=users, rows=rows: (net(), joined_over_users(squared, rows), u)
    seen = {"records": by_user(views, present), "present": present}
    of_views = joined_over_users(averaged_over_views(squared, 3), "mean")
    yield "users, mean, three views", lambda: (net(), of_views, seen)
    for steps in (1, 2):
        update = LocalUpdates(lambda model, batch: squared(model, batch["x"]), steps)
        yield f"users, update of {steps}", lambda u=update: (net(), u, {"x": by_user(x, present)})


def commands() -> Iterator[tuple[str, Callable[[], Made]]]:
    """Models of the command line, README's among them ("linear"); on fixed features all are logistic."""

    def of(inputs: Tensor, **more: Any) -> DataSet:
        rows = Records({"input": inputs, "label": torch.arange(RECORDS) % 3})
        return DataSet("made up", rows, rows, RECORDS, 3, **more)

    kinds = {
        "images": of(torch.randn(RECORDS, 3, 16, 16)),
        "numbers": of(torch.randn(RECORDS, 6), numeric_columns=(1, 4)),
        "texts": of(torch.randint(8, (RECORDS, 24)), vocabulary_size=8),
    }
    for name in sorted({*MODELS} - {*STATISTICS}):  # which have a loss of their own
        kind = "texts" if name.startswith("text-") else "numbers" if name in NUMBERS else "images"
        data = kinds[kind] if name in NUMBERS else prepare_data(name, kinds[kind])
        yield name, lambda name=name, data=data: (build_model(name, data), loss_of(data, {}), data.train[:])


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
    "command line": commands,
    "honest": lambda: zoo("RIGHT_CASES"),
    "wrong": lambda: zoo("REFUSED_CASES"),
    "named": lambda: zoo("UNSEEN_CASES"),
}


@dataclass(frozen=True)
class Row:
    """A line of the table; see the module."""

    traced: str
    proved: str = ""
    bits: str = ""
    seconds: str = ""
    reason: str = ""


def outcome(make: Callable[[], Made]) -> Row:
    """What comes of a model."""
    torch.manual_seed(0)
    try:
        model, loss, batch = make()
        engine = GradientEngine(model, loss, batch, check=False)
        engine.never_replay("to be compared with replays")
    except Exception as error:
        return Row("refused", reason=f"{type(error).__name__}: {error}")
    began = time.process_time()
    try:
        traced = engine.line(batch)
    except Exception as error:
        return Row("no", "no trace", "not replayed", reason=why_untraced(error))
    took = f"{time.process_time() - began:.2f}"
    proof = prove(traced)
    why = "" if proof.fault is None else str(engine.trials.proof(batch).fault)  # with its line of the source
    bits, lost = "not replayed", ""
    try:
        with random_numbers_from(1):
            if (other := engine.trials.replayable(batch, Proof())[1]).untraced is not None:
                raise RuntimeError(other.untraced)
            found, _ = traced.gradients(*engine.values(None), batch)
        with random_numbers_from(1):
            error = difference(found, engine.by_plan(batch))
        bits = f"{error:.0e}" if error else "yes"
    except Exception as error:
        lost = str(error)
    return Row("yes", proof.outcome, bits, took, f"{why} {lost}".strip())


def difference(found: PerSampleGradients, exact: PerSampleGradients) -> float:
    """The largest error of what methods ask of rows, relative to the largest value of each tensor."""
    weights = 1 / (1 + exact.row_norms())

    def asked(rows: PerSampleGradients) -> list[Tensor]:
        norms = [rows.row_norms(groups) for groups in (None, [(name,) for name in rows.names])]
        sums = rows.weighted_sums(weights).values()
        return [rows.losses, *(n.where(n >= 1e-16, 0.0) for n in norms), *sums, rows.materialise().matrix()]

    pairs = zip(asked(found), asked(exact), strict=True)
    errors = [0.0 if a.equal(b) else float((a - b).abs().max() / b.abs().max()) for a, b in pairs]
    return float(torch.tensor(errors).max())  # NaN if one is


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lists", nargs="*", default=list(LISTS), help="of " + ", ".join(LISTS))
    parser.add_argument("--only", nargs="*", help="names of models")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    outcome(next(ways())[1])  # PyTorch loads modules for its first trace
    print("| list | model | traced | proved | bits equal | s | reason |\n|---|---|---|---|---|--:|---|")
    counts: Counter[tuple[str, ...]] = Counter()
    for title in options.lists:
        for name, make in LISTS[title]():
            if options.only and name not in options.only:
                continue
            row = outcome(make)
            wrong = title == "wrong" and row.proved == "proved"
            reason = ELSEWHERE.get(name, "WRONG: THE PROOF HAS A HOLE") if wrong else row.reason
            counts[title, row.traced, row.proved, row.bits] += 1
            line = (title, name, row.traced, row.proved, row.bits, row.seconds, " ".join(reason.split()))
            print(f"| {' | '.join(part.replace('|', '/') for part in line)} |", flush=True)
    print("\n| list | traced | proved | bits equal | models |\n|---|---|---|---|--:|")
    for kind, count in counts.items():
        print(f"| {' | '.join(kind)} | {count} |")


if __name__ == "__main__":
    main()
