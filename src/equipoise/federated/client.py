"""A client: one data owner, who trains for a few steps when the server asks, and accounts for what leaves.

What leaves: the parameters after K local steps, or what the method sends in their place, and the reports of
methods that release some. All of it came through the client's own ledger. The ledger's journal lies in the
client's folder, was synced to its device before the reply left, and outlives restarts. The client decides: a
request that makes no sense, comes out of order or exceeds the plan is refused and costs nothing; the same
request again gets the same reply and costs nothing.

No loss, accuracy, batch size or true number of records leaves; the sampling's population is the client's
public size.

The unit of the guarantee is one record at one client, and every client's own noise protects its records
against everybody else. A whole client can move a report by U, not U / B, and its K steps by far more than K
clipped records, so that no guarantee for clients follows. Noise that is right only in the sum over clients
would need that nobody sees a single reply; after K > 1 steps a client has moved along its own under-noised
path, which no sum hides, and there is no proof of composition.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from equipoise.federated.messages import Refused, Reply, Request, check_round, check_tensors
from equipoise.federated.round_protocol import check_passed_on, protocol_of
from equipoise.methods import Context, Method, State
from equipoise.methods.base import Parameters
from equipoise.methods.named_tensors import copied
from equipoise.privacy import Budget, Journal, PlanUsedUpError, Sampling, Secrets, digest
from equipoise.privacy.ledger.journal import CloseEntry, Entry, RunEntry, read_journal
from equipoise.privacy.ledger.run_record import book_end
from equipoise.privacy.ledger.write_ahead_log import WriteAheadLog
from equipoise.privacy.noise.secrets import delete_key
from equipoise.statements import Statement
from equipoise.statements.verify_federation import DISJOINT
from equipoise.training import PrivateTraining
from equipoise.training.checkpoint import write_atomically
from equipoise.training.input_checks import Loss
from equipoise.training.run_folder import RunFolder
from equipoise.training.run_ledger import own_ledger
from equipoise.training.setup import rebuild

__all__ = ["Client", "end_of"]


Answer = TypeVar("Answer")


class Client:
    """One data owner.

    Args:
        model: the client's own copy of the module; its trainable parameters are exchanged.
        loss: loss(model, batch) -> [B].
        data: the client's private records.
        sampling: of the local steps; `steps` is the number of rounds that the client may take part in, times
            `local_steps`.
        method: any method; one that is a `RoundProtocol` can follow the server.
        local_steps: K, steps a round.
        budget: `Budget(epsilon, delta)` for all rounds together.
        learning_rate: of plain SGD, unless `optimizer` is given.
        optimizer: parameters -> optimiser of the local steps; what it remembers lasts across rounds.
        folder: where key, journal, rounds and checkpoints lie; a client whose folder holds a run goes on with
            it, and takes the same budget, sampling, relation, `reproducible`, `hardened`, `ledger_file` and
            `local_steps` only. None keeps everything in memory.
        relation, seed, reproducible, micro_batch_size: as for `PrivateTraining`.
        hardened, allow_public_duplicates: as for `PrivateTraining`.
        ledger_file: a journal that this owner's runs over the same records share: their costs compose.
        unit, noise: of the guarantee; "record" and "local" are all that is proved.

    Raises:
        ValueError, TypeError, BudgetError: as `PrivateTraining`; nothing is spent then.
        ValueError: the folder's run has other settings than those given; each is named.
        ValueError: a method takes part in the rounds, and the one around it passes no requests on.

    Example:
        >>> import equipoise as eq
        >>> client = Client(
        ...     nn.Linear(2, 1), lambda model, batch: (model(batch["x"])[:, 0] - batch["y"]).square(),
        ...     {"x": torch.randn(20, 2), "y": torch.randn(20)}, eq.Poisson(5, 20, steps=6),
        ...     eq.DPSGD(clip_norm=0.1, noise_multiplier=1.0), local_steps=3, learning_rate=0.1)
        >>> reply = client.answer(Request(1, {"weight": torch.zeros(1, 2), "bias": torch.zeros(1)}))
        >>> sorted(reply.params)
        ['bias', 'weight']
        >>> client.rounds_left
        1
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        data: Any,
        sampling: Sampling,
        method: Method,
        *,
        local_steps: int = 1,
        budget: Budget | None = None,
        learning_rate: float | None = None,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
        folder: str | os.PathLike[str] | None = None,
        relation: str = "add_or_remove_one",
        seed: int = 0,
        reproducible: bool = False,
        micro_batch_size: int | None = None,
        ledger_file: str | os.PathLike[str] | None = None,
        hardened: bool = False,
        allow_public_duplicates: bool = False,
        unit: str = "record",
        noise: str = "local",
    ) -> None:
        if isinstance(local_steps, bool) or not isinstance(local_steps, int) or local_steps < 1:
            raise ValueError(f"local_steps={local_steps!r}: give a whole number of at least 1")
        _check_claim(unit, noise, local_steps)
        check_passed_on(method)
        protocol_of(method).check_local_steps(local_steps)
        if (learning_rate is None) == (optimizer is None):
            raise ValueError("give either learning_rate (plain SGD) or optimizer, not both and not neither")
        self.method, self.local_steps = method, local_steps
        made = (
            optimizer(model.parameters())
            if optimizer is not None
            else torch.optim.SGD(model.parameters(), lr=float(learning_rate or 0.0))
        )
        run = None if folder is None else Path(folder)
        self._training: LocalTraining | None = None
        self._end: Mapping[str, Any] | None = None
        if run is not None:
            _discard_unstarted(run)
        if run is not None and (run / "config.json").exists():
            _check_settings(
                run,
                {
                    "budget": budget,
                    "sampling": sampling,
                    "relation": relation,
                    "reproducible": reproducible,
                    "hardened": hardened,
                    "ledger_file": None if ledger_file is None else os.fspath(ledger_file),
                    "local_steps": local_steps,
                },
            )
            self._end = end_of(run)
            if self._end is None:
                self._training = LocalTraining.resume(run, model, made, loss=loss, data=data, method=method)
        else:
            self._training = LocalTraining(
                model,
                made,
                loss=loss,
                data=data,
                sampling=sampling,
                method=method,
                budget=budget,
                run_dir=run,
                relation=relation,
                seed=seed,
                reproducible=reproducible,
                micro_batch_size=micro_batch_size,
                epsilon_every=10**9,
                ledger_file=ledger_file,
                hardened=hardened,
                allow_public_duplicates=allow_public_duplicates,
            )
        self._log = WriteAheadLog(None if run is None else run / "private" / "rounds.jsonl", durable=True)
        entries = self._log.read()
        self._begun: Mapping[str, Any] | None = next(
            (entry for entry in reversed(entries) if entry["type"] == "train"), None
        )
        done = 0 if self._training is None else self._training.steps_done
        if self._training is not None and self._begun is not None and done < self._begun["step"]:
            # The checkpoint is older than the round that was under way: steps of a broken round were lost.
            self._begun = {**self._begun, "step": done}
        self._queried: Mapping[str, Any] | None = next(
            (entry for entry in reversed(entries) if entry["type"] == "query"), None
        )

    # ---- what is public

    @property
    def training(self) -> LocalTraining:
        """The client's own training.

        Raises:
            Refused: the client has finished.
        """
        if self._training is None or self._end is not None:
            raise Refused("the client has finished: nothing more is released or repeated. Nothing was spent")
        return self._training

    @property
    def rounds_left(self) -> int:
        """How many further rounds the plan has steps for."""
        if self._end is not None:
            return 0
        return (self.training.sampling.steps - self.training.steps_done) // self.local_steps

    @property
    def rounds_done(self) -> int:
        """How many rounds are complete."""
        return self.training.steps_done // self.local_steps if self._end is None else int(self._end["rounds"])

    def epsilon(self) -> float:
        """Epsilon of everything that was released so far, at the budget's delta."""
        return self.training.epsilon_so_far() if self._end is None else float(self._end["epsilon"])

    def statement(self) -> Statement:
        """What this client may claim; for a client that has finished, what it claimed then."""
        return self.training.statement() if self._end is None else Statement(**self._end["statement"])

    def finish(self) -> Statement:
        """Stop taking part: write the statement, book the end, delete the key.

        From then on every request is refused, a repeated one too, also when the folder is opened again. If
        the process is killed meanwhile, opening the client again completes what was begun. A second call
        does nothing.

        Returns:
            The statement, which lies in the folder as `statement.json`.
        """
        if self._end is None:
            training = self.training
            statement = training.statement()
            end: dict[str, Any] = {"type": "finish", "rounds": self.rounds_done, "epsilon": self.epsilon()}
            end["statement"] = asdict(statement)
            if training.folder is not None:
                content = (statement.to_json() + "\n").encode()
                write_atomically(training.folder.statement, content, mode=0o644)
            # First: once the ledger gives up what the run has left, this client must never go on.
            self._log.write(end)
            self._end = end
        if self._training is not None:
            self._training.end()
            self.close()
            self._training = None
        return self.statement()

    def close(self) -> None:
        """Release the folder, so that another process or object can open it."""
        self._log.close()
        if self._training is not None:
            own_ledger(self._training.ledger).journal.close()
            if self._training.folder is not None:
                self._training.folder.unlock()

    # ---- what the server may ask

    def answer(self, request: Request) -> Reply:
        """Train for the local steps of a round, or answer a query about the global model.

        Raises:
            Refused: parameters of wrong names or shapes or not finite, extras that the method does not take
                or that lie outside of what was agreed, a round that is over, or no steps left.
        """
        parameters, protocol = self.training.parameters, protocol_of(self.method)
        takes = protocol.takes(request.kind)
        if takes is None:
            raise Refused(
                f"method {self.method.name!r} answers no request of kind {request.kind!r:.80}; nothing was "
                "spent"
            )
        check_round(request.round)
        params = check_tensors("params", request.params, parameters)
        if not isinstance(request.extras, Mapping):
            raise Refused(f"extras is a {type(request.extras).__name__}, not a mapping; nothing was spent")
        for name in request.extras:
            if name not in takes:
                raise Refused(
                    f"extras[{name!r:.80}] is not supported by method {self.method.name!r}; nothing was spent"
                )
        extras = {}
        for name, extra in takes.items():
            if name in request.extras:
                extras[name] = extra.check(request.extras[name], parameters)
            elif extra.required:
                raise Refused(f"{name} is missing: method {self.method.name!r} needs it; nothing was spent")
        checked = Request(request.round, params, extras, request.kind)
        return self._query(checked) if request.kind == "query" else self._train(checked)

    def _query(self, request: Request) -> Reply:
        number, question, known = request.round, _question(request), self._queried
        if known is not None and known["request"] == question:
            return Reply(reports=dict(known["reports"]))
        self._check_round(number, max(self._last_round(), 0 if known is None else known["round"]))
        self._check_rounds_left()
        protocol = protocol_of(self.method)
        try:
            # A query leaves no trace in the training: one that is answered from the log after a restart
            # leaves none either, and the steps that follow must depend on the same. A round that is over
            # may be asked for again: a refused query leaves what answers it.
            with self.training.undone():
                self.training.move(request.params)
                self.training.steer(lambda state: protocol.follow(state, request.extras))
                reports = self.training.ask(protocol.query)
        except PlanUsedUpError as error:
            raise Refused(f"round {number}: the plan has no query left") from error
        self._queried = {"type": "query", "round": number, "request": question, "reports": reports}
        self._log.write(dict(self._queried))
        return Reply(reports=reports)

    def _train(self, request: Request) -> Reply:
        number, question = request.round, _question(request)
        protocol, begun = protocol_of(self.method), self._begun
        if begun is None or begun["request"] != question:
            self._check_round(number, self._last_round())
            self._check_rounds_left()
            begun = {"type": "train", "round": number, "request": question}
            begun |= {"step": self.training.steps_done, "local_steps": self.local_steps}
            self._log.write(dict(begun))
            self._begun = begun
        elif self._queried is not None and self._queried["round"] > number:
            raise Refused(
                f"round={number}: the server has gone on to round {self._queried['round']}; nothing was spent"
            )
        end = begun["step"] + self.local_steps
        if self.training.steps_done == begun["step"]:
            self.training.move(request.params)
            if protocol.takes("train"):
                self.training.steer(lambda state: protocol.follow(state, request.extras))
        if self.training.steps_done < end:
            self._finish_round(number, end)
        return protocol.reply(self.training.method_state, request.params, copied(self.training.parameters))

    def _finish_round(self, number: int, end: int) -> None:
        try:
            while self.training.steps_done < end:
                self.training.take_step()
        except PlanUsedUpError as error:  # other errors of the ledger are not for the server to read
            raise Refused(f"round {number}: the plan has no release left") from error
        protocol = protocol_of(self.method)
        ended = {name: value.detach() for name, value in self.training.parameters.items()}
        self.training.steer(lambda state: protocol.end_round(state, ended))
        if self.training.folder is not None:
            self.training.save_checkpoint()  # syncs the journal first

    def _last_round(self) -> int:
        return 0 if self._begun is None else int(self._begun["round"])

    def _check_round(self, number: int, last: int) -> None:
        if number <= last:
            raise Refused(
                f"round={number}: round {last} was asked for already, with another request; a round is "
                "answered once. Nothing was spent"
            )

    def _check_rounds_left(self) -> None:
        if self.rounds_left < 1:
            raise Refused(
                f"the {self.training.sampling.steps} planned steps leave no further round of "
                f"{self.local_steps}: the client's budget is used. Nothing was spent"
            )


def _question(request: Request) -> str:
    """A digest of a request, by which the client knows it again."""
    named = {"kind": request.kind, "round": request.round}
    return digest({**named, "params": request.params, "extras": request.extras})


def _check_claim(unit: str, noise: str, local_steps: int) -> None:
    """Refuse a claim that no proof covers."""
    if unit != "record":
        raise ValueError(
            f"unit={unit!r}: the guarantee is one record's at one client; a whole client can move its "
            "answers by far more than the noise is made for. Give unit='record'"
        )
    if noise == "distributed" and local_steps > 1:
        raise ValueError(
            f"noise='distributed' with local_steps={local_steps}: a client's later steps follow its own "
            "under-noised path, which adding up the answers does not hide, and no proof covers it. Give "
            "noise='local'"
        )
    if noise != "local":
        raise ValueError(
            f"noise={noise!r}: a client counts the noise that it adds itself, and counts on nobody else's. "
            "Give noise='local'"
        )


# ---- the training


class LocalTraining(PrivateTraining):
    """`PrivateTraining`, with the parameters moved from outside and questions asked between steps."""

    def move(self, values: Parameters) -> None:
        """Put other parameters into the model; the method's state is rebased."""
        self._steps.move(values)

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Restore parameters and method state at the end of the block."""
        before = copied(self.parameters)
        state = self._steps.state
        try:
            yield
        finally:
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    parameter.copy_(before[name])
            self._steps.state = state

    def ask(self, question: Callable[[Context, State], Answer]) -> Answer:
        """What `question(context, state)` releases between two steps."""
        answer = self._steps.ask(question)
        self.synced_place()  # an answer that has left cannot be uncharged any more
        return answer

    def statement(self) -> Statement:
        """The statement, with the assumption that the owners are disjoint."""
        found = super().statement()
        return replace(found, assumptions=[*found.assumptions, DISJOINT])

    @property
    def method_state(self) -> State:
        """The method's state; there is one after the first step or question."""
        assert self._steps.state is not None
        return self._steps.state

    def steer(self, change: Callable[[State], State]) -> None:
        """Replace the method's state by `change(state)`, which sets public values."""
        if self._steps.state is None:
            self._steps.ask(lambda context, state: None)  # makes the first state; releases nothing
        state = self._steps.state
        assert state is not None
        self._steps.state = change(state)


# ---- the folder


def _discard_unstarted(path: str | os.PathLike[str]) -> None:
    """Remove a run whose process ended before its first checkpoint, so that it can be started again.

    Only a run that has released nothing is removed: its journal holds at most its own first entry, and the
    client has noted no round. Anything else is left as it is. In a shared journal the run's end is booked
    first: without the run's key nobody could give back what it reserves.

    Raises:
        RuntimeError: another process is starting this run.
        JournalError: the journal is damaged.
    """
    folder = RunFolder(path)
    if not folder.config.exists() or not folder.private.is_dir() or _started(folder):
        return
    folder.lock()
    try:
        if not _started(folder):  # again, now that the lock keeps other processes out
            settings = folder.read_config()["settings"]
            run = _run_of(folder, settings)
            if run is not None and "ledger_file" in settings:
                _end_in(settings["ledger_file"], run)
            folder.discard()
    finally:
        folder.unlock()


def _started(folder: RunFolder) -> bool:
    if folder.checkpoints.steps() or (folder.private / "rounds.jsonl").exists():
        return True
    settings = folder.read_config()["settings"]
    if "ledger_file" in settings:
        run = _run_of(folder, settings)
        entries = [entry for entry in _entries(settings["ledger_file"]) if entry.run == run]
    else:
        entries = _entries(folder.journal)
    # A journal may be shared: the entries of other runs must not be discarded.
    only_heads = all(isinstance(entry, RunEntry | CloseEntry) for entry in entries)
    return not only_heads or len({entry.run for entry in entries}) > 1


def _run_of(folder: RunFolder, settings: Mapping[str, Any]) -> str | None:
    """The name of the folder's run in a journal; None if it has no whole key, not yet or no longer."""
    if settings["reproducible"]:
        return Secrets(reproducible_seed=settings["seed"]).identity
    if not (folder.private / "key").exists():
        return None
    try:
        return Secrets(folder.path).identity
    except RuntimeError:  # killed while it wrote or deleted the key
        return None


def _end_in(place: str | os.PathLike[str], run: str) -> None:
    """Book the end of a run in the journal at `place`, if that holds the run."""
    if any(isinstance(entry, RunEntry) and entry.run == run for entry in _entries(place)):
        journal = Journal(place, existing=True)
        try:
            book_end(journal, run)
        finally:
            journal.close()


def _check_settings(path: str | os.PathLike[str], given: Mapping[str, Any]) -> None:
    """See that a client is opened again with the settings that its run was started with.

    Args:
        path: the run's folder.
        given: budget, sampling, relation, reproducible, hardened, ledger_file and local_steps, as given now.

    Raises:
        ValueError: some differ; all of them are named with both values.
    """
    folder = RunFolder(path)
    sampling, budget, settings = rebuild(folder.read_config())
    kept = {
        "budget": budget,
        "sampling": sampling,
        "relation": settings.relation,
        "reproducible": settings.reproducible,
        "hardened": settings.hardened,
        "ledger_file": settings.ledger_file,
    }
    steps = [entry["local_steps"] for entry in _rounds(folder) if "local_steps" in entry]
    if steps:
        kept["local_steps"] = steps[-1]
    plain = {name: value.describe() for name, value in given.items() if isinstance(value, Sampling)}
    differing = [
        f"{name}={given[name]!r}, and the run has {value!r}"
        for name, value in kept.items()
        if (value.describe() if isinstance(value, Sampling) else value) != plain.get(name, given[name])
    ]
    if differing:
        raise ValueError(
            f"folder={str(path)!r} holds a run of this client with other settings: "
            f"{'; '.join(differing)}. The run's noise was calibrated for its own settings: give those to go "
            "on with it, or another folder to start anew; what this run spent stays spent. Nothing was spent "
            "now."
        )


def end_of(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The last log entry of a client that has finished: statement, epsilon and number of rounds; or None.

    A process can be killed between that entry and the key's deletion. So the end is booked now if it is
    missing in the ledger, and a key that is still there is deleted.

    Raises:
        JournalError: the run's journal is damaged, or cannot be written.
    """
    folder = RunFolder(path)
    end = next((entry for entry in _rounds(folder) if entry["type"] == "finish"), None)
    if end is None:
        return None
    settings = folder.read_config()["settings"]
    run = _run_of(folder, settings)
    if run is not None:  # the key goes last: where it is gone the end is booked
        _end_in(settings.get("ledger_file") or folder.journal, run)
    delete_key(folder.private / "key")
    return end


def _rounds(folder: RunFolder) -> list[dict[str, Any]]:
    """The client's log of rounds; empty if there is no file."""
    place = folder.private / "rounds.jsonl"
    if not place.exists():
        return []
    log = WriteAheadLog(place, read_only=True)
    try:
        return log.read()
    finally:
        log.close()


def _entries(place: str | os.PathLike[str]) -> list[Entry]:
    """The entries of a journal; none if there is no file."""
    if not os.path.exists(place):
        return []
    return read_journal(place)
