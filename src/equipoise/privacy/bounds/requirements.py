"""What a bound asks of its ingredients: a public threshold, one value per record, whole groups."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from equipoise import _validate
from equipoise.privacy.private import Private, PrivateError, noted, unwrap

#: How many norms a clip rule sees at a time. Any constant would do: large enough for most draws to be one
#: block, small enough to cost nothing for a single record.
BLOCK = 1024


def public_threshold(name: str, value: Any) -> float:
    """A public positive bound as a float.

    Raises:
        PrivateError: for a `Private` value: a bound computed from private rows has no sensitivity proof.
    """
    if isinstance(value, Private):
        raise PrivateError(
            f"{name} is a Private value; a raw private number cannot set a bound. Use a public constant, a "
            "public schedule, or a value that the ledger released"
        )
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} must be one number, got shape {tuple(value.shape)}")
        value = float(value)
    _validate.positive(**{name: value})
    return float(value)


def check_groups(groups: Sequence[Sequence[str]], names: Sequence[str]) -> list[tuple[str, ...]]:
    """The groups of parameter names, if they hold every name exactly once.

    Raises:
        ValueError: naming what is missing, repeated or unknown.
    """
    checked = [tuple(group) for group in groups]
    flat = [name for group in checked for name in group]
    if sorted(flat) != sorted(names):
        missing = sorted(set(names) - set(flat))
        twice = sorted({name for name in flat if flat.count(name) > 1})
        unknown = sorted(set(flat) - set(names))
        raise ValueError(
            f"groups must hold every parameter exactly once; missing {missing}, repeated {twice}, unknown "
            f"{unknown}"
        )
    return checked


def one_value_a_record(name: str, values: torch.Tensor) -> torch.Tensor:
    """The raw values [B] of a `Private` tensor, after a look at where they come from.

    Raises:
        TypeError: not `Private`.
        ValueError: not one value per record.
        PrivateError: an entry may depend on other records, so that no bound would hold.
    """
    if not isinstance(values, Private):
        raise TypeError(
            f"{name} must be a Private tensor with one value per record, got {type(values).__name__}"
        )
    if values.ndim != 1:
        raise ValueError(
            f"{name} must have one value per record (shape [B]), got shape {tuple(values.shape)}"
        )
    return require_by_record(name, values)


def require_by_record(name: str, values: Private) -> torch.Tensor:
    """The raw values, if entry i is known to come only from record i; see `provenance`."""
    if not values.by_record:
        raise PrivateError(
            f"{name} must look at each record on its own: an entry that depends on other records (a median, "
            "a sort, a mean, a position in the batch) moves when one of them enters or leaves, and the sum "
            "has no bound. Compute it from the rows' own statistics with elementwise operations and public "
            "numbers; a quantile of the batch goes through a release first"
        )
    return unwrap(values)


def answers_by_record(
    name: str,
    rule: object,
    ask: Callable[[torch.Tensor], torch.Tensor],
    norms: torch.Tensor,
    question: Hashable = None,
) -> torch.Tensor:
    """The raw answers [B] or [B, m] of a rule for records of these norms, each only for its own record.

    The rule computes on `Private` norms: its operations must keep records apart, and it can hold no other
    private number. It sees blocks of norms of one length, so that it cannot tell how many there are.

    Args:
        name: of the rule, for messages.
        rule: the object that stands behind `ask`.
        ask: from norms to one answer per record.
        norms: raw norms [B].
        question: what the answers follow from, beside rule and norms.

    Raises:
        PrivateError: the rule looks at other records, or its answers differ from call to call.
        ValueError: it does not return one answer per record.
    """
    known = known_answers(name, rule, ask, norms.dtype, norms.device, question)
    if known is not None:
        return known(norms)
    whole = torch.cat([norms, norms.new_ones(-len(norms) % BLOCK if len(norms) else BLOCK)])
    return torch.cat([_answer(name, ask, block)[0] for block in torch.split(whole, BLOCK)])[: len(norms)]


def known_answers(
    name: str,
    rule: object,
    ask: Callable[[torch.Tensor], torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
    question: Hashable,
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What computes a rule's raw answers from raw norms of any number, by operations that were noted.

    They are those of a rule with a value of its own (a frozen dataclass): it is asked each question once,
    for public norms. None for another rule, or one that does more than elementwise operations. A rule that
    answers a question in two ways is refused at its first use.

    Args:
        name, rule, ask, question: as for `answers_by_record`.
        dtype, device: of the norms.

    Raises:
        As `answers_by_record`.
    """
    asked = _question(rule, question, dtype, device)
    is_pure = _PURE.get(id(rule)) is rule
    if asked in _NOTED or (is_pure and asked is None):
        return _NOTED.get(asked)
    public = torch.logspace(-6, 6, BLOCK, dtype=dtype, device=device)
    # Three times: a counter or a random number inside the rule shows.
    (first, again), *others = (_answer(name, ask, public) for _ in range(1 if is_pure else 3))
    if any(not torch.equal(first.nan_to_num(), other.nan_to_num()) for other, _ in others):
        raise PrivateError(
            f"{name} gave other answers when it was asked the same again; it must follow from norm "
            "and threshold only. Random numbers and counters differ between the micro-batches of a "
            "draw, and a record that enters moves others into the next one"
        )
    with contextlib.suppress(TypeError):  # what cannot be remembered is asked at every use
        _PURE[id(rule)] = rule
    if asked is None:
        return None
    if again is not None and not torch.equal(again(public).nan_to_num(), first.nan_to_num()):
        again = None  # it writes to what it holds

    def known(norms: torch.Tensor) -> torch.Tensor:
        assert again is not None  # whole blocks: kernels may compute the end of a vector in another way
        return again(torch.cat([norms, norms.new_ones(-len(norms) % BLOCK)]))[: len(norms)]

    _NOTED[asked] = None if again is None else known
    if len(_NOTED) > _MOST:
        del _NOTED[next(iter(_NOTED))]
    return _NOTED[asked]


def _question(rule: object, question: Hashable, dtype: torch.dtype, device: torch.device) -> Hashable:
    """What answers are noted by; None where rule or question have no value of their own."""
    if question is not None and type(rule).__hash__ is not object.__hash__:
        with contextlib.suppress(TypeError):  # a field of it may have none
            key = rule, question, dtype, device
            hash(key)
            return key
    return None


#: Rules that gave one answer to one question, by identity; a rule that is gone leaves.
_PURE: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()

_NOTED: dict[Hashable, Callable[[torch.Tensor], torch.Tensor] | None] = {}
"""What gives the raw answers to a question once more, of the latest questions."""
_MOST = 64  # a choice: a rule and its thresholds of a run are a few; each further one holds a short graph


def _answer(
    name: str, ask: Callable[[torch.Tensor], torch.Tensor], whole: torch.Tensor
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor] | None]:
    """The rule's raw answers for `BLOCK` norms, and what computes them from others (`noted`)."""
    try:
        answer, again = noted(ask, Private(whole))
    except PrivateError as error:
        raise PrivateError(
            f"{name} reads norms as numbers, or branches on them. It sees all of them at once: let it use "
            "elementwise operations (torch.where, clamp, minimum) and return one weight per record"
        ) from error
    if answer.shape[:1] != whole.shape:
        raise ValueError(
            f"{name} returned shape {tuple(answer.shape)} for norms of shape {tuple(whole.shape)}; it must "
            "return one weight per record"
        )
    # The norms were wrapped without a draw: an answer that has one looked at other private numbers.
    if not (isinstance(answer, Private) and answer.by_record and answer.draw is None):
        raise PrivateError(
            f"{name} must look at each norm on its own, with elementwise operations and public numbers. A "
            "sort, a mean, an index, a number of its own from private records: each may give a record "
            "another weight when other records are there, and the sum has no bound then"
        )
    return unwrap(answer), again


def require_length(name: str, values: torch.Tensor, norms: torch.Tensor) -> None:
    """Refuse values that are not one per row."""
    if values.shape[0] != norms.shape[0]:
        raise ValueError(
            f"{name} has {values.shape[0]} entries for {norms.shape[0]} rows; give one per record"
        )
