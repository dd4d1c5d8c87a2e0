"""A client: one data owner, who trains for a few steps where the server asks, and keeps count of what leaves.

What leaves: the parameters after K local steps, or what the method makes of them, and, where the method has a
query, counts or squares, one noised number a round. All came through the client's own ledger, whose journal
lies in the client's folder, was synced to its device before the answer left, and outlives restarts. The
client decides: a request that makes no sense, comes out of order or exceeds the plan is refused and costs
nothing; the same request again gets the same answer and costs nothing.

No loss, accuracy, batch size or true number of records leaves; the sampling's population is the client's
public size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.federated.checks import check_number, checked
from equipoise.federated.claims import check_claim
from equipoise.federated.errors import Refused
from equipoise.federated.local_training import LocalTraining, check_settings, discard_unstarted, end_of
from equipoise.federated.methods.round_wrapper import Wrapped, check_passed_on, innermost
from equipoise.federated.methods.server_radius import ServerRMS
from equipoise.federated.round_protocol import RoundProtocol
from equipoise.methods import Method, State
from equipoise.methods.base import Parameters
from equipoise.methods.named_tensors import copied
from equipoise.privacy import Budget, PlanUsedUpError, Sampling, digest
from equipoise.privacy.ledger.write_ahead_log import WriteAheadLog
from equipoise.statements import Statement
from equipoise.training.checkpoint import write_atomically
from equipoise.training.input_checks import Loss

__all__ = ["Client"]


class Client:
    """One data owner.

    Args:
        model: the client's own copy of the module; its trainable parameters are exchanged.
        loss: loss(model, batch) -> [B].
        data: the client's private records.
        sampling: of the local steps; `steps` is the number of rounds that the client may take part in, times
            `local_steps`.
        method: any method; `ServerRMS` follows a radius that the server sets.
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
        unit, noise: of the guarantee; "record" and "local" are all that is proved: see `check_claim`.

    Raises:
        ValueError, TypeError, BudgetError: as `PrivateTraining`; nothing is spent then.
        ValueError: the folder's run has other settings than those given; each is named.
        ValueError: a method inside takes part in the rounds, and the one around it keeps them from it.

    Example:
        >>> import equipoise as eq
        >>> client = Client(
        ...     nn.Linear(2, 1), lambda model, batch: (model(batch["x"])[:, 0] - batch["y"]).square(),
        ...     {"x": torch.randn(20, 2), "y": torch.randn(20)}, eq.Poisson(5, 20, steps=6),
        ...     eq.DPSGD(0.1, noise_multiplier=1.0), local_steps=3, learning_rate=0.1)
        >>> sorted(client.train(1, {"weight": torch.zeros(1, 2), "bias": torch.zeros(1)}))
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
        check_claim(unit, noise, local_steps)
        check_passed_on(method)
        inner = innermost(method)
        if isinstance(inner, ServerRMS) and inner.round_length != local_steps:
            raise ValueError(
                f"local_steps={local_steps} differs from the method's round_length={inner.round_length}: "
                "its plan or its answers count on the steps of a round; give both the same"
            )
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
            discard_unstarted(run)
        if run is not None and (run / "config.json").exists():
            check_settings(
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
        self._asked: Mapping[str, Any] | None = next(
            (entry for entry in reversed(entries) if entry["type"] == "ask"), None
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
    def radius_noise(self) -> float:
        """Standard deviation of an answer of `ask`.

        Raises:
            Refused: the client's method has no query.
        """
        return float(self._steered().radius_noise(self.training.method_plan))

    @property
    def rounds_left(self) -> int:
        """How many further rounds the plan has steps for."""
        if self._end is not None:
            return 0
        return (self.training.sampling.steps - self.training.steps_done) // self.local_steps

    @property
    def rounds_done(self) -> int:
        """How many rounds it took all steps of."""
        return self.training.steps_done // self.local_steps if self._end is None else int(self._end["rounds"])

    def epsilon(self) -> float:
        """Epsilon of all that has left so far, at the budget's delta."""
        return self.training.epsilon_so_far() if self._end is None else float(self._end["epsilon"])

    def statement(self) -> Statement:
        """What this client may claim; of one that has finished, as it was then."""
        return self.training.statement() if self._end is None else Statement(**self._end["statement"])

    def finish(self) -> Statement:
        """Take part no more: write the statement, book the end, delete the key.

        Every later request is refused, an old one's repetition too, also when the folder is opened again; a
        process that is killed meanwhile leaves a client that has finished or one that can. The next opening
        does what is missing of its end. Finished again, nothing happens.

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
            self._training.desk.close()
            self.close()
            self._training = None
        return self.statement()

    def close(self) -> None:
        """Let go of the folder, so that another process, or another object, can go on with it."""
        self._log.close()
        if self._training is not None:
            self._training.desk.ledger.journal.close()
            if self._training.folder is not None:
                self._training.folder.unlock()

    # ---- what the server may ask

    def ask(self, round_number: int, params: Parameters, square_limit: float) -> float:
        """The released mean of min(|g|^2 / U, 1) over the client's records, at the global model.

        Args:
            round_number: from 1, rising; one query a round.
            params: the global model.
            square_limit: U.

        Raises:
            Refused: see there.
        """
        method = self._steered()
        check_number(round_number)
        values = checked(self.training.parameters, params)
        method.with_limit({}, square_limit)  # refuses before anything moves
        request = digest({"round": round_number, "params": values, "limit": square_limit})
        if self._asked is not None and self._asked["request"] == request:
            return float(self._asked["answer"])
        last = max(self._last_round(), 0 if self._asked is None else self._asked["round"])
        self._check_round(round_number, last)
        self._check_rounds_left()
        try:
            # A query leaves no trace in the training: one that is answered from the log after a restart
            # leaves none either, and the steps that follow must depend on the same. A round that is over
            # may be asked for again: a refused query leaves what answers it.
            with self.training.undone():
                self.training.move(values)
                self.training.steer(lambda state: method.with_limit(state, square_limit))
                answer = self.training.ask(method.ask)
        except PlanUsedUpError as error:
            raise Refused(f"round {round_number}: the plan has no query left") from error
        self._asked = {"type": "ask", "round": round_number, "request": request, "answer": answer}
        self._log.write(dict(self._asked))
        return answer

    def train(
        self,
        round_number: int,
        params: Parameters,
        clip_norm: float | None = None,
        control: Parameters | None = None,
        square_limit: float | None = None,
    ) -> dict[str, Tensor]:
        """The parameters after K local steps from the global model, or what the method sends in their place.

        Args:
            round_number: from 1, rising; rounds may be left out.
            params: the global model.
            clip_norm: the radius of the round, for a method that follows the server's.
            control: the server's control variate, for a method that takes one; None is zero.
            square_limit: U of the round, for a method that sends squared norms beside its answer.

        Raises:
            Refused: parameters of wrong names or shapes or not finite, a radius that is no finite number
                above zero or above the agreed limit, a round that is over, or no steps left.
        """
        check_number(round_number)
        values = checked(self.training.parameters, params)
        steer = self._steering(clip_norm, control, square_limit)
        request = digest(
            {"round": round_number, "params": values, "clip_norm": clip_norm}
            | ({} if control is None else {"control": dict(control)})
            | ({} if square_limit is None else {"limit": square_limit})
        )
        begun = self._begun
        again = begun is not None and begun["request"] == request
        if not again:
            self._check_round(round_number, self._last_round())
            self._check_rounds_left()
            begun = {"type": "train", "round": round_number, "request": request}
            begun |= {"step": self.training.steps_done, "local_steps": self.local_steps}
            self._log.write(dict(begun))
            self._begun = begun
        elif self._asked is not None and self._asked["round"] > round_number:
            raise Refused(
                f"round_number={round_number}: the server has gone on to round {self._asked['round']}; "
                "nothing was spent"
            )
        assert begun is not None
        end = begun["step"] + self.local_steps
        if self.training.steps_done == begun["step"]:
            self.training.move(values)
            if steer is not None:
                self.training.steer(steer)
        if self.training.steps_done < end:
            self._finish_round(round_number, end)
        found = copied(self.training.parameters)
        if isinstance(self.method, RoundProtocol):
            return self.method.answer(self.training.method_state, values, found)
        return found

    def _finish_round(self, round_number: int, end: int) -> None:
        try:
            while self.training.steps_done < end:
                self.training.take_step()
        except PlanUsedUpError as error:  # other errors of the ledger are no words for the server
            raise Refused(f"round {round_number}: the plan has no release left") from error
        if isinstance(self.method, RoundProtocol):
            method = self.method
            ended = {name: value.detach() for name, value in self.training.parameters.items()}
            self.training.steer(lambda state: method.end_round(state, ended))
        if self.training.folder is not None:
            self.training.save_checkpoint()  # syncs the journal first

    # ---- checks

    def _steered(self) -> ServerRMS | Wrapped:
        method = self.method
        if not isinstance(method, ServerRMS | Wrapped) or not method.answers_query:
            raise Refused(f"the client's method {method.name!r} answers no radius query")
        return method

    def _steering(
        self, clip_norm: float | None, control: Parameters | None, square_limit: float | None
    ) -> Callable[[State], State] | None:
        """What the server sets in the method's state; refuses before anything moves."""
        method = self.method
        follower = method if isinstance(method, RoundProtocol) else RoundProtocol()
        if clip_norm is None and follower.follows_clip_norm:
            raise Refused("clip_norm is missing: the client's method follows the server's radius")
        if clip_norm is not None:
            if not follower.follows_clip_norm:
                raise Refused(f"the client's method {method.name!r} has no radius that a server could set")
            follower.with_radius({}, clip_norm)
        if (square_limit is not None) != follower.follows_limit:
            found = "is missing" if square_limit is None else "is none that this client's method takes"
            raise Refused(f"square_limit {found}; nothing was spent")
        if square_limit is not None:
            follower.with_limit({}, square_limit)
        if control is not None and not follower.follows_control:
            raise Refused(f"the client's method {method.name!r} takes no control variate")
        steered = None if control is None else checked(self.training.parameters, control, "control")
        if not (follower.follows_clip_norm or follower.follows_control):
            return None

        def steer(state: State) -> State:
            if clip_norm is not None:
                state = follower.with_radius(state, clip_norm)
            if square_limit is not None:
                state = follower.with_limit(state, square_limit)
            return follower.with_control(state, steered)

        return steer

    def _last_round(self) -> int:
        return 0 if self._begun is None else int(self._begun["round"])

    def _check_round(self, round_number: int, last: int) -> None:
        if round_number <= last:
            raise Refused(
                f"round_number={round_number}: round {last} was asked for already, with another request; a "
                "round is answered once. Nothing was spent"
            )

    def _check_rounds_left(self) -> None:
        if self.rounds_left < 1:
            raise Refused(
                f"the {self.training.sampling.steps} planned steps leave no further round of "
                f"{self.local_steps}: the client's budget is used. Nothing was spent"
            )
