"""A client whose replies leave only inside secure sums (experimental).

The answers are the client's usual ones: the noised mean square of a radius query, or the displacement y - x
of the K local steps. With noise="local" the ledger's guarantee holds whatever becomes of the masks, since
clipping, rounding and adding up are post-processing: the sum hides more, and nothing is claimed for it.

With noise="distributed" a client adds only its share of the noise. If h honest clients at least are in every
sum, with equal batches and rates, and each adds z / sqrt(h) times the bound C, then the sum has noise of

    std >= sqrt(h) (z / sqrt(h)) C = z C

whatever c colluding clients tell the server. That is exact for the scalar and for K = 1, but for the rounding
before the sum, which is no post-processing of the noised sum: a strict proof needs discrete noise. With K > 1
there is none. So the client's statement stays that of its own small noise, which is proved and large;
`sum_claim` says what the sum would have, and claims no guarantee. In this mode a client is in no sum of fewer
than h + c clients, and uploads once for each query and round: two sums, with and without one client, would
give that client away.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from contrib.secure_sum.protocol import Party, SecureSum
from equipoise import _validate
from equipoise._files import write_atomically
from equipoise.federated import Client, Refused, Reply, Request, ServerRMS
from equipoise.federated.methods.server_radius import SQUARES, SQUARES_NOISE
from equipoise.federated.round_protocol import protocol_of
from equipoise.methods import DPSGD
from equipoise.methods.base import Parameters
from equipoise.methods.thresholds import Fixed
from equipoise.privacy import PrivacyPlan, digest
from equipoise.privacy.ledger.write_ahead_log import WriteAheadLog
from equipoise.statements import Statement

__all__ = ["SecureClient", "SumClaim", "noise_share"]

HOLES = (
    "answers are rounded before they are added, which is no post-processing of the noised sum: a proof needs "
    "discrete noise",
    "masks hide single answers from a server that computes within bounds and hands public keys on unchanged",
)


def noise_share(noise_multiplier: float, honest: int) -> float:
    """z / sqrt(h), a client's share of the noise.

    Args:
        noise_multiplier: z of the sum.
        honest: h, the honest clients that are in every sum.

    Example:
        >>> noise_share(2.0, honest=4)
        1.0
    """
    _validate.count(honest=honest)
    return noise_multiplier / math.sqrt(honest)


@dataclass(frozen=True)
class SumClaim:
    """What would hold of a client's records against those who see sums alone.

    Attributes:
        guarantee: "none": not all of it is proved.
        epsilon: None, as always without a guarantee.
        epsilon_claimed: of all rounds planned, with the noise of h honest clients.
        epsilon_alone: what is proved, of the client's own noise.
        delta: of both.
        assumptions, holes: what the claim rests on, and what is not proved.
    """

    guarantee: str
    epsilon: None
    epsilon_claimed: float
    epsilon_alone: float
    delta: float
    assumptions: tuple[str, ...]
    holes: tuple[str, ...]


class SecureClient:
    """A `Client` behind secure sums; the server must reach the client only through this one.

    Args:
        client: the client; "distributed" takes `DPSGD` at a fixed clip norm or `ServerRMS`, with their noise
            given, `local_steps=1` and plain SGD.
        rule: settings of the sums, the same at all clients and at the server.
        number: the client's number, from 0.
        noise: "local", or "distributed".
        honest: h, for distributed noise.

    Raises:
        ValueError: distributed noise where even its claim does not hold.
        Refused: the client has finished.
    """

    def __init__(
        self, client: Client, rule: SecureSum, number: int, *, noise: str = "local", honest: int | None = None
    ) -> None:
        if noise not in ("local", "distributed") or (honest is not None) != (noise == "distributed"):
            raise ValueError(
                f"noise={noise!r} with honest={honest!r}: give 'local', or 'distributed' with the least "
                "number of honest clients in a sum"
            )
        if honest is not None:
            _check_distributed(client, rule, honest)
        self.client, self.rule, self.number, self.honest = client, rule, number, honest
        folder = client.training.folder
        self._place = None if folder is None else folder.private / "secure_sum.json"
        self._log = WriteAheadLog(None if folder is None else folder.private / "secure.jsonl", durable=True)
        self._party = Party(rule, number, _saved(self._place))

    # ---- what is public

    def epsilon(self) -> float:
        """As the client's: of its own noise."""
        return self.client.epsilon()

    def statement(self) -> Statement:
        """As the client's: of its own noise, whatever the sums hide."""
        return self.client.statement()

    def sum_claim(self, delta: float) -> SumClaim:
        """What would hold of the sums under distributed noise.

        Raises:
            ValueError: the noise is local; the statement says everything.
        """
        if self.honest is None:
            raise ValueError("noise='local': the statement is the whole claim")
        plan, h, c = self.client.training.plan, self.honest, self.rule.colluding
        summed = [release.scaled(math.sqrt(h)) for release in plan.releases]
        return SumClaim(
            guarantee="none",
            epsilon=None,
            epsilon_claimed=PrivacyPlan(summed, plan.sampling, plan.relation).epsilon(delta).value,
            epsilon_alone=plan.epsilon(delta).value,
            delta=delta,
            assumptions=(
                f"of every sum's clients at most {c} collude; at least {h} are honest, add their noise and "
                "tell it nobody",
                "clients have equal expected batches, rates and noise; the server is honest but curious",
                "nothing else of this client is seen: its folder holds under-noised parameters",
            ),
            holes=HOLES,
        )

    def finish(self, *, stop_fixed_beforehand: bool = False) -> Statement:
        """As the client's; the secrets of a sum under way are deleted too."""
        if self._place is not None:
            self._place.unlink(missing_ok=True)
        self._party = Party(self.rule, self.number)
        return self.client.finish(stop_fixed_beforehand=stop_fixed_beforehand)

    def close(self) -> None:
        self._log.close()
        self.client.close()

    # ---- what the server may ask

    def answer_stage(
        self, round_number: int, params: Parameters, values: Mapping[str, Any]
    ) -> dict[str, Any]:
        """One stage of a secure sum.

        Args:
            round_number: from 1.
            params: the global model, at the stage "masked"; empty elsewhere.
            values: ``stage``; at "keys" ``request``, the `Request.fingerprint` of what "masked" will ask; at
                "shares" ``key.3``, ``terms.3`` and so on, of every client; at "masked"
                ``share.3`` and so on, ``kind`` ("query" or "train") and the extras of that; at "unmask"
                ``survivors``.

        Raises:
            Refused: out of order, too few clients, or as `Client`.
        """
        stage = values.get("stage")
        if stage == "keys":
            terms = self._terms(values.get("request"))
            self._party = Party(self.rule, self.number, terms=terms)
            found: dict[str, Any] = {"key": self._party.keys(), "terms": terms}
            noise = protocol_of(self.client.method).report_noise(self.client.training.method_plan)
            if noise is not None:
                found["noise"] = noise
        elif stage == "shares":
            given = _numbered(values, "terms.", str)
            keys = _numbered(values, "key.", bytes)
            if set(given) != set(keys) or set(given.values()) != {self._party.terms}:
                raise Refused(
                    "secure sum: clients with other settings than this one's, or asked for something else; "
                    "nothing leaves"
                )
            found = _named("share.", self._party.shares(keys))
        elif stage == "masked":
            found = {"masked": self._masked(round_number, params, values)}
        elif stage == "unmask":
            survivors = values.get("survivors")
            if not isinstance(survivors, list | tuple) or not all(type(one) is int for one in survivors):
                raise Refused(f"survivors={survivors!r:.80} are no numbers of clients; nothing leaves")
            found = _named("share.", self._party.unmask(survivors, self._least()))
        else:
            raise Refused(f"stage={stage!r:.80}: a secure sum has none of that name; nothing was spent")
        if self._place is not None:
            write_atomically(self._place, json.dumps(self._party.state_dict()).encode())
        return found

    def _masked(self, round_number: int, params: Parameters, values: Mapping[str, Any]) -> bytes:
        shares = _numbered(values, "share.", bytes)
        if len({*shares, self.number}) < self._least():
            raise Refused(f"fewer than {self._least()} clients in a secure sum; nothing was spent")
        kind = values.get("kind")
        extras = {name: v for name, v in values.items() if "." not in name and name not in ("stage", "kind")}
        if type(round_number) is not int:
            raise Refused(f"round_number={round_number!r:.80}: rounds are numbered; nothing was spent")
        request = Request(round_number, params, extras, kind)  # type: ignore[arg-type]
        try:
            asked = self._terms(request.fingerprint())
        except (TypeError, ValueError, RuntimeError) as error:
            raise Refused("the request holds what no digest can be made of; nothing was spent") from error
        if asked != self._party.terms:
            raise Refused(
                "secure sum: another request than the one agreed upon with the keys; nothing leaves"
            )
        self._party.check(shares)
        if self.honest is not None:
            entry = {"type": "sum", "kind": kind, "round": round_number}
            if any(old == entry for old in self._log.read()):
                raise Refused(f"round {round_number}: this client has uploaded once; nothing more leaves")
            self._log.write(entry)  # before anything leaves
        if kind not in ("query", "train") or not set(extras) <= {"clip_norm", "square_limit"}:
            raise Refused(f"kind={kind!r:.80} with {sorted(extras)!r:.80} is not offered in a secure sum")
        reply = self.client.answer(request)
        return self._party.masked(_numbers(request, reply), shares)

    def _least(self) -> int:
        """How many clients must be in a sum: h honest ones whatever the c others are."""
        return max(self.rule.least, 0 if self.honest is None else self.honest + self.rule.colluding)

    def _terms(self, request: Any) -> str:
        """A digest of what all clients of a sum must have alike: settings, and what they are asked."""
        if not isinstance(request, str):
            raise Refused(f"request={request!r:.80} is no digest of what will be asked; nothing was spent")
        rule, training = self.rule, self.client.training
        terms: dict[str, Any] = {"clients": rule.clients, "threshold": rule.least, "limit": rule.limit}
        terms["request"] = request
        if self.honest is not None:
            noise = {release.name: release.noise_multiplier for release in training.plan.releases}
            terms |= {"honest": self.honest, "colluding": rule.colluding, "noise": noise}
            terms |= {"batch": training.sampling.expected_size, "rate": training.optimizer.defaults["lr"]}
        return digest(terms)


def _numbers(request: Request, reply: Reply) -> Tensor:
    """[d] the displacements in the order of the names, and the mean square where there is one; float64."""
    start, ends = request.params, reply.params
    # The noise of the squares is public and was sent with the key.
    squares = [reply.reports[SQUARES]] if SQUARES in reply.reports else []
    if set(reply.reports) - {SQUARES, SQUARES_NOISE}:
        raise Refused("the client's method reports numbers that secure sums do not take")
    parts = [torch.tensor(squares, dtype=torch.float64)]
    if request.kind == "train":
        if set(ends) != set(start) or any(ends[name].shape != value.shape for name, value in start.items()):
            raise Refused("the client's method sends something else than parameters, which sums do not take")
        parts = [(ends[name].double() - start[name].double()).flatten() for name in sorted(start)] + parts
    return torch.cat(parts)


def _check_distributed(client: Client, rule: SecureSum, honest: int) -> None:
    method, optimizer = client.method, client.training.optimizer
    plain = {"momentum": 0, "weight_decay": 0, "maximize": False, "nesterov": False, "dampening": 0}
    fixed = type(method) is DPSGD and isinstance(method.threshold, Fixed)
    why = None
    if client.local_steps != 1:
        why = "later local steps follow the client's own under-noised path, which no sum hides"
    elif not (fixed or type(method) is ServerRMS):
        why = f"{method.name!r} may carry its own under-noised releases along: take DPSGD or ServerRMS"
    elif type(optimizer) is not torch.optim.SGD or any(optimizer.defaults[n] != v for n, v in plain.items()):
        why = "the optimiser must be plain SGD: a memory of under-noised steps is hidden by no sum"
    elif not 1 <= honest <= rule.clients - rule.colluding:
        why = f"honest={honest} of {rule.clients} clients with colluding={rule.colluding}"
    if why is not None:
        raise ValueError(f"noise='distributed' with local_steps={client.local_steps}: {why}")


def _saved(place: Path | None) -> Any:
    """The sum under way, for a client that is opened anew for every message.

    Raises:
        ValueError: the file is damaged.
    """
    if place is None or not place.is_file():
        return None
    try:
        state = json.loads(place.read_bytes())
        if not isinstance(state["stage"], str):
            raise TypeError("it names no stage")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{place} is damaged ({error!s:.200}). Remove it: the sum under way is lost, and nothing was "
            "spent."
        ) from None
    return state


def _numbered(values: Mapping[str, Any], prefix: str, kind: type) -> dict[int, Any]:
    """``key.3`` and its like, by number.

    Raises:
        Refused: a number or value of another kind.
    """
    found = {}
    for name, value in values.items():
        if name.startswith(prefix):
            number = name.removeprefix(prefix)
            if not (number.isascii() and number.isdigit() and isinstance(value, kind)):
                raise Refused(f"{name!r:.80} cannot be read; nothing was spent")
            found[int(number)] = value
    return found


def _named(prefix: str, values: Mapping[int, Any]) -> dict[str, Any]:
    return {f"{prefix}{number}": value for number, value in values.items()}
