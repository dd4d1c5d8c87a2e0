"""A client: one data owner, who trains for a few steps when the server asks, and accounts for what leaves.

What leaves: the parameters after K local steps, or what the method sends in their place, and the reports of
methods that release some. All of it came through the client's own ledger. The ledger's journal lies in the
client's folder, was synced to its device before the reply left, and outlives restarts. The client decides: a
request that makes no sense, comes out of order or exceeds the plan is refused and costs nothing; the same
request again gets the same reply and costs nothing.

No loss, accuracy, batch size or true number of records leaves, unless the client holds records apart for a
private score (`Data(records, score=Score(...))`): its noised number is then booked, sent, and noted in the
folder's `metrics.jsonl`. The sampling's population is the client's public size.

The unit of the guarantee is one record at one client, or one user with all of their records there
(`unit=Users(...)`: a patient of a hospital), and every client's own noise protects its records against
everybody else. A whole client can move a report by U, not U / B, and its K steps by far more than K
clipped records, so that no guarantee for clients follows. Noise that is right only in the sum over clients
would need that nobody sees a single reply; after K > 1 steps a client has moved along its own under-noised
path, which no sum hides, and there is no proof of composition.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from equipoise import _validate
from equipoise._files import PathLike, write_atomically
from equipoise.federated.messages import POPULATION, Refused, Reply, Request, check_round, check_tensors
from equipoise.federated.round_protocol import RoundProtocol, check_passed_on, protocol_of
from equipoise.gradients.engine_inputs import Loss
from equipoise.methods import Method, State
from equipoise.methods.base import Parameters
from equipoise.methods.named_tensors import copied
from equipoise.privacy import Budget, PlanUsedUpError, Sampling
from equipoise.privacy.ledger.write_ahead_log import WriteAheadLog
from equipoise.privacy.noise.secrets import delete_key
from equipoise.statements import Statement
from equipoise.statements.verify_federation import DISJOINT
from equipoise.training import PrivateTraining, Score
from equipoise.training.arguments import Record, Run, Users


class Client:
    """One data owner.

    Args:
        model: the client's own copy of the module; its trainable parameters are exchanged.
        loss: loss(model, batch) -> [B].
        data: the client's private records, or `Data`, with a `Score` if the server may ask for one.
        sampling: of the local steps; `steps` is the number of rounds that the client may take part in, times
            `local_steps`.
        method: any method; one that is a `RoundProtocol` can follow the server.
        local_steps: K, steps per round.
        budget: `Budget(epsilon, delta)` for all rounds together.
        learning_rate: of plain SGD, unless `optimizer` is given.
        optimizer: parameters -> optimiser of the local steps; what it remembers lasts across rounds.
        unit: of the guarantee; "record", `Record(relation="replace_one")` or `Users(...)`.
        run: a folder for key, journal, rounds and checkpoints, or a `Run`; None keeps everything in memory. A
            client whose folder holds a run goes on with it, and takes only the same budget, sampling,
            settings and `local_steps`. `Run(journal=...)` names a journal that this owner's runs over the
            same records share: their costs compose.
        local: patterns of parameters that stay here, such as `["head.*", "*.norm*"]`: they are trained with
            the others and never sent, and the global model is without them.

    Raises:
        ValueError, TypeError, BudgetError: as `PrivateTraining`; nothing is spent then.
        ValueError: the folder's run has other settings than those given.
        ValueError: a method takes part in the rounds, and the one around it passes no requests on; or the
            method trains on another loss (`RoundProtocol.client_loss`).

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
        unit: Record | Users | str = "record",
        run: Run | PathLike | None = None,
        local: Sequence[str] = (),
    ) -> None:
        _validate.count(local_steps=local_steps)
        check_passed_on(method)
        self.method, self.local_steps, self._protocol = method, local_steps, protocol_of(method)
        self._local = _matched(local, model, self._protocol)
        self._protocol.check_local_steps(local_steps)
        wanted = self._protocol.client_loss
        if wanted is not None and wanted is not loss:
            name = getattr(loss, "__name__", type(loss).__name__)
            raise ValueError(
                f"loss={name} is not the loss that method {method.name!r} trains on: give "
                "loss=method.client_loss. Nothing was spent"
            )
        if optimizer is None and learning_rate is not None:
            made: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=float(learning_rate))
        elif optimizer is not None and learning_rate is None:
            made = optimizer(model.parameters())
        else:
            raise ValueError("give either learning_rate (plain SGD) or optimizer, not both and not neither")
        run = Run.of(run)
        private = None if run.folder is None else Path(run.folder) / "private"
        log = None if private is None else private / "rounds.jsonl"
        begun, *_, self._end = _latest(log)
        self._settings = {"local_steps": local_steps, "local": sorted(local)}
        for name, value in self._settings.items():
            if begun is not None and (before := begun.get(name, [])) != value:
                raise ValueError(
                    f"{name}={value} differs from the {name}={before} that the run in "
                    f"folder={str(run.folder)!r} began with: give the same, or name a new folder. "
                    "Nothing was spent"
                )
        self._training: LocalTraining | None = None
        if self._end is None or run.reproducible or _is_whole(private):
            start: Any = LocalTraining if private is None else LocalTraining.start_or_resume
            self._training = start(
                model,
                made,
                loss=loss,
                data=data,
                sampling=sampling,
                method=method,
                budget=budget,
                unit=unit,
                run=run,
            )
        self._log = WriteAheadLog(log, durable=True)
        # Again, now that the training's lock keeps other processes out.
        self._begun, self._queried, self._judged, self._end = _latest(log)
        if self._end is not None:
            self.finish()  # which a process that was killed may have left half done
            if private is not None:
                delete_key(private / "key")
        elif self._training is not None and self._begun is not None:
            # A checkpoint older than the round under way: the steps of a round that broke off were lost.
            done = self._training.steps_done
            self._begun = {**self._begun, "step": min(done, self._begun["step"])}

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
        return self.training.steps_done // self.local_steps if self._end is None else int(self._end["rounds"])

    def epsilon(self) -> float:
        """Epsilon of everything that was released so far, at the budget's delta; the statement claims all
        that was planned.
        """
        return self.training.epsilon_so_far() if self._end is None else float(self._end["epsilon"])

    def statement(self) -> Statement:
        """What this client may claim; for a client that has finished, what it claimed then."""
        return self.training.statement() if self._end is None else Statement(**self._end["statement"])

    def finish(self, *, stop_fixed_beforehand: bool = False) -> Statement:
        """Stop taking part: write the statement, book the end, delete the key.

        From then on every request is refused, a repeated one too, also when the folder is opened again. If
        the process is killed meanwhile, opening the client again completes what was begun. A second call
        does nothing.

        Args:
            stop_fixed_beforehand: claim the rounds that were answered, not all that were planned; as for
                `PrivateTraining.finish`. A server that asks whom it likes may choose by earlier replies.

        Returns:
            The statement, which lies in the folder as `statement.json`.
        """
        if self._end is None:
            training = self.training
            statement = training.statement(stop_fixed_beforehand=stop_fixed_beforehand)
            end = {
                "type": "finish",
                "rounds": self.rounds_done,
                "epsilon": self.epsilon(),
                "statement": asdict(statement),
            }
            if training.folder is not None:
                content = (statement.to_json() + "\n").encode()
                write_atomically(training.folder.statement, content, mode=0o644)
            # First: once the ledger gives up what the run has left, this client must never go on.
            self._log.write(end)
            self._end = end
        if self._training is not None:
            self._training.end(self.statement().stop_fixed_beforehand)
            self.close()
            self._training = None
        return self.statement()

    def close(self) -> None:
        """Release the folder, so that another process or object can open it."""
        self._log.close()
        if self._training is not None:
            self._training.close()

    # ---- what the server may ask

    def answer(self, request: Request) -> Reply:
        """Train for the local steps of a round, or answer a query about the global model, or score it.

        Raises:
            Refused: parameters of wrong names or shapes or not finite, extras that the method does not take
                or that lie outside of what was agreed, a round that is over, no steps left, or no score
                planned.
        """
        mine, takes = self.training.parameters, self._protocol.takes(request.kind)
        if request.kind == "score" and self.training.score is not None:
            takes = {}
        parameters = {name: value for name, value in mine.items() if name not in self._local}
        if takes is None:
            raise Refused(
                f"method {self.method.name!r} answers no request of kind {request.kind!r:.80}; nothing was "
                "spent"
            )
        check_round(request.round)
        params = check_tensors("params", request.params, parameters)
        given = dict(request.extras)
        states_population = given.pop(POPULATION, None) is not None
        for name in given.keys() - takes.keys():
            raise Refused(
                f"extras[{name!r:.80}] is not supported by method {self.method.name!r}; nothing was spent"
            )
        extras = {}
        for name, extra in takes.items():
            if name in given:
                extras[name] = extra.check(given[name], parameters)
            elif extra.required:
                raise Refused(f"{name} is missing: method {self.method.name!r} needs it; nothing was spent")
        checked = Request(request.round, params, extras, request.kind)
        reply = self._train(checked) if request.kind == "train" else self._query(checked)
        if states_population:
            population = float(self.training.sampling.population)
            reply = replace(reply, reports={**reply.reports, POPULATION: population})
        return reply

    def _query(self, request: Request) -> Reply:
        number, question, is_score = request.round, request.fingerprint(), request.kind == "score"
        known = self._judged if is_score else self._queried
        if known is not None and known["request"] == question:
            return Reply(reports=known["reports"])
        last = known["round"] if known else 0
        if is_score:
            self._check_later(number, last)
        else:
            self._check_new(number, max(last, self._begun["round"] if self._begun else 0))
        try:
            # A query leaves no trace in the training: one that is answered from the log after a restart
            # leaves none either, and the steps that follow must depend on the same. A round that is over
            # may be asked for again: a refused query leaves what answers it.
            reports = self.training.ask(request, self._protocol)
        except PlanUsedUpError as error:
            raise Refused(f"round {number}: the plan has no {request.kind} left") from error
        # Remembered first: what was released is not released again where the log cannot be written.
        answered = {"type": request.kind, "round": number, "request": question, "reports": reports}
        if is_score:
            self._judged = answered
        else:
            self._queried = answered
        self._log.write(answered)
        return Reply(reports=reports)

    def _train(self, request: Request) -> Reply:
        number, question = request.round, request.fingerprint()
        training, protocol, begun = self.training, self._protocol, self._begun
        if begun is None or begun["request"] != question:
            self._check_new(number, begun["round"] if begun else 0)
            begun = {"type": "train", "round": number, "request": question, "step": training.steps_done}
            begun |= self._settings
            self._log.write(begun)  # before anything is released: a client killed now goes on with it
            self._begun = begun
        elif self._queried is not None and self._queried["round"] > number:
            raise Refused(
                f"round={number}: the server has gone on to round {self._queried['round']}; nothing was spent"
            )
        end = begun["step"] + self.local_steps
        # A round that broke off within its steps goes on where the optimiser left the parameters.
        if training.steps_done == begun["step"]:
            training.move(request.params)
            if protocol.takes("train"):
                training.state = protocol.follow(training.state, request.extras)
        if training.steps_done < end:
            try:
                while training.steps_done < end:
                    training.take_step()
            except PlanUsedUpError as error:  # other errors of the ledger are not for the server to read
                raise Refused(f"round {number}: the plan has no release left") from error
            ended = {name: value.detach() for name, value in training.parameters.items()}
            training.state = protocol.end_round(training.state, ended)
            if training.folder is not None:
                training.save_checkpoint()  # syncs the journal first: what leaves is booked on the device
        sent = {name: value for name, value in training.parameters.items() if name not in self._local}
        return protocol.reply(training.state, request.params, copied(sent))

    def _check_new(self, number: int, last: int) -> None:
        """Refuse a round that is not after the last, or that the plan has no steps for."""
        self._check_later(number, last)
        if self.rounds_left < 1:
            raise Refused(
                f"the {self.training.sampling.steps} planned steps leave no further round of "
                f"{self.local_steps}: the client's budget is used. Nothing was spent"
            )

    def _check_later(self, number: int, last: int) -> None:
        if number <= last:
            raise Refused(
                f"round={number}: round {last} was asked for already, with another request; a round is "
                "answered once. Nothing was spent"
            )


def _matched(patterns: Sequence[str], model: nn.Module, protocol: RoundProtocol) -> frozenset[str]:
    """The trainable parameters that stay at the client.

    Raises:
        ValueError: a pattern matches none, all are matched, or the method sends something else than
            parameters.
    """
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if isinstance(patterns, str):
        raise ValueError(f"local={patterns!r} is one text: give a list, such as local=[{patterns!r}]")
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            near = _validate.suggestion(pattern, names)
            raise ValueError(f"local names {pattern!r}, which matches no trainable parameter.{near}")
    found = frozenset(name for pattern in patterns for name in fnmatch.filter(names, pattern))
    if len(found) == len(names):
        raise ValueError("local names every trainable parameter: nothing would be left to share")
    if found and type(protocol).reply is not RoundProtocol.reply:
        raise ValueError(
            f"local={list(patterns)!r}: method {type(protocol).__name__} sends something else than "
            "parameters; take one that sends them, such as DPSGD, or leave local out"
        )
    return found


def _latest(path: Path | None) -> tuple[dict[str, Any] | None, ...]:
    """The last round that was begun, the last query and score that were answered, and the end, of the log.

    A line has `type`, "train", "query", "score" or "finish". Those of requests have `round` and `request`, a
    digest by which the request is known again; a round has the `step` before it and `local_steps`, a query or
    score the `reports` that answer it again. The end has `rounds`, `epsilon` and `statement`.
    """
    found: dict[str, dict[str, Any]] = {}
    if path is not None and path.exists():
        with closing(WriteAheadLog(path, read_only=True)) as log:
            found = {row["type"]: row for row in log.read()}
    return tuple(found.get(kind) for kind in ("train", "query", "score", "finish"))


def _is_whole(private: Path | None) -> bool:
    """Whether the key is there. One of zeros was being deleted when the process was killed."""
    key = None if private is None else private / "key"
    return key is not None and key.exists() and any(key.read_bytes())


# ---- the training


class LocalTraining(PrivateTraining):
    """`PrivateTraining`, with the parameters moved from outside and questions asked between steps."""

    def move(self, values: Parameters) -> None:
        """Put other parameters into the model; those that are not given stay. The state is rebased."""
        self._steps.move({**self.parameters, **values})

    @property
    def state(self) -> State:
        """The method's state, begun where it is missing; a server's public values are set through it."""
        if self._steps.state is None:
            self._steps.ask(lambda context, state: None)  # makes the first state; releases nothing
        assert self._steps.state is not None
        return self._steps.state

    @state.setter
    def state(self, state: State) -> None:
        self._steps.state = state

    @property
    def score(self) -> Score | None:
        """The private score that is planned."""
        return None if self._setup.score is None else self._setup.score.score

    def ask(self, request: Request, protocol: RoundProtocol) -> dict[str, float]:
        """What a query or score releases at the parameters of the request; nothing is changed then."""
        before, state = copied(self.parameters), self._steps.state
        try:
            self.move(request.params)
            if request.kind == "score":
                assert self.score is not None
                reports = self.evaluate(self.score)
            else:
                self.state = protocol.follow(self.state, request.extras)
                reports = self._steps.ask(protocol.query)
        finally:
            self.move(before)
            self._steps.state = state
        self.synced_place()  # an answer that has left cannot be uncharged any more
        return reports

    def statement(self, *, stop_fixed_beforehand: bool = False) -> Statement:
        """The statement, with the assumption that the owners are disjoint."""
        found = super().statement(stop_fixed_beforehand=stop_fixed_beforehand)
        return replace(found, assumptions=[*found.assumptions, DISJOINT])
