"""Options of a method that are algorithms themselves, and every setting as plain values and back.

A clip rule, a threshold or the source of a subspace is an object: a frozen dataclass, derived from `Option`,
with a `kind`. A configuration holds it as its kind and its fields:

    DPSGD(clip_rule=PSAC(regulariser=0.1))        {"clip_rule": {"kind": "psac", "regulariser": 0.1}}

The kinds that a field may have are the subclasses of its type. A function has no plain form: what holds one
can be described, and cannot be made again from a file.

What a field may hold is said by its type, once. `Method` and `Option` refuse all else (`check_fields`):

    clip_norm: Positive = 1.0      basis: Literal["auto", "held"] = "auto"      clip_rule: ClipRule = Abadi()
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from equipoise import _validate
from equipoise.methods.public_records import PublicRecords, require_public

Positive = Annotated[float, _validate.positive]
Count = Annotated[int, _validate.count]
Share = Annotated[float, _validate.share]
FromZero = Annotated[float, functools.partial(_validate.within, "[0, inf)")]
FromOne = Annotated[float, functools.partial(_validate.within, "[1, inf)")]
BelowOne = Annotated[float, functools.partial(_validate.within, "[0, 1)")]
UpToOne = Annotated[float, functools.partial(_validate.within, "(0, 1]")]
Noise = Annotated[float | None, _validate.noise_if_given]
"""A noise multiplier; None to calibrate it to the budget."""


class Option:
    """A choice between algorithms: an abstract class whose concrete subclasses are dataclasses with a `kind`.

    Example:
        >>> from equipoise.methods.clip_rules import ClipRule
        >>> ClipRule.kinds()["psac"]
        <class 'equipoise.methods.clip_rules.PSAC'>
    """

    kind: ClassVar[str]
    word: ClassVar[str | None] = None
    """Short for its kind where its fields follow: "decay:1:0.998" is ExponentialDecay(1, 0.998)."""
    usual_kind: ClassVar[str | None] = None
    """The kind that a command line takes where a method leaves the choice open."""

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def kinds(cls) -> dict[str, type[Self]]:
        """The classes to choose from, by their kind."""
        kinds: dict[str, type[Self]] = {}
        # The library's first: no class of the user's own takes the place of one.
        for found in sorted(cls._family(), key=lambda found: _validate.author_of(found) is not None):
            if "kind" in vars(found):  # an abstract class in between has none, even where it inherits one
                kinds.setdefault(found.kind, found)
        return kinds

    @classmethod
    def said(cls) -> str:
        """Its kind; that of its class where the kind leads to another one."""
        family = next(base for base in cls.__mro__[::-1] if issubclass(base, Option) and base is not Option)
        return cls.kind if family.kinds().get(cls.kind) is cls else str(_validate.author_of(cls))

    @classmethod
    def _family(cls) -> Iterator[type[Self]]:
        yield cls
        for derived in cls.__subclasses__():
            yield from derived._family()


@functools.cache
def field_types(cls: type) -> Mapping[str, Any]:
    """The types of a dataclass's fields, by name; none for a class without arguments.

    Raises:
        TypeError: its arguments are not the fields of a dataclass.
    """
    if not dataclasses.is_dataclass(cls):
        if not inspect.signature(cls).parameters:
            return {}
        raise TypeError(
            f"{cls.__name__} has arguments that are no fields: make it a dataclass, @dataclass(frozen=True, "
            "kw_only=True), so that its configuration can be written down"
        )
    hints = typing.get_type_hints(cls)
    return {item.name: hints[item.name] for item in dataclasses.fields(cls) if item.init}


def check_fields(settings: Any) -> None:
    """Refuse values of a dataclass's fields that their types do not allow.

    Types that say so are those above, `Literal`s, options and public records. A field that may also be of
    another type is left to its class.

    Raises:
        TypeError, ValueError: naming the field.
    """
    kind: Any = type(settings)
    for name, check in _checks(kind).items():
        check(**{name: getattr(settings, name)})


@functools.cache
def _checks(cls: type) -> dict[str, Callable[..., None]]:
    """What refuses the values of a field, by its name."""
    hints = typing.get_type_hints(cls, include_extras=True)
    found = {name: _check_of(_split(hints[name])) for name in field_types(cls)}
    return {name: check for name, check in found.items() if check is not None}


def _check_of(parts: Sequence[Any]) -> Callable[..., None] | None:
    """What refuses a value that is of none of these types; None where they leave it open."""
    words: list[str] = []
    kinds: list[type] = []
    checks: list[Callable[..., None]] = []
    for part in parts:
        if typing.get_origin(part) is typing.Literal:
            words += typing.get_args(part)
        elif typing.get_origin(part) is Annotated:
            checks.append(part.__metadata__[0])
        elif isinstance(part, type) and issubclass(part, (Option, PublicRecords, types.NoneType)):
            kinds.append(part)
        else:
            return None

    def check(**named: Any) -> None:
        (value,) = named.values()
        if isinstance(value, tuple(kinds)) or (isinstance(value, str) and value in words):
            return
        if checks:
            checks[0](**named)
        elif words:
            _validate.one_of(words, **named)
        else:
            some = next(iter(kinds[0].kinds().values())) if issubclass(kinds[0], Option) else kinds[0]
            _validate.instance(kinds[0], f"{some.__name__}(...)", **named)

    return check


def families(hint: Any) -> list[type[Option]]:
    """The option classes among the types of a field."""
    return [part for part in _parts(hint) if isinstance(part, type) and issubclass(part, Option)]


def defaults(cls: type) -> dict[str, Any]:
    """The fields of a dataclass with their defaults as plain values; None where a default is missing.

    Example:
        >>> from equipoise.methods.clip_rules import PSAC
        >>> defaults(PSAC)
        {'regulariser': 0.01}
    """
    if not field_types(cls):
        return {}
    return {
        item.name: as_json(item.default if item.default is not dataclasses.MISSING else None)
        for item in dataclasses.fields(cls)
        if item.init
    }


def dotted(described: Mapping[str, Any]) -> dict[str, Any]:
    """Plain settings by dotted names, as a command line takes them.

    Example:
        >>> dotted({"clip_norm": 0.1, "clip_rule": {"kind": "psac", "regulariser": 0.1}})
        {'clip_norm': 0.1, 'clip_rule': 'psac', 'clip_rule.regulariser': 0.1}
    """
    found: dict[str, Any] = {}
    for name, value in described.items():
        if isinstance(value, Mapping):
            inner = dict(value)
            found[name] = inner.pop("kind", inner.pop("name", None))
            found |= {f"{name}.{field}": item for field, item in dotted(inner).items()}
        else:
            found[name] = value
    return found


def choices(cls: type, name: str) -> tuple[str, ...]:
    """The words that a field takes, its default first: the kinds of an option, or those of a `Literal`.

    Example:
        >>> from equipoise.methods.dp_sgd import DPSGD
        >>> choices(DPSGD, "clip_rule")[:2], choices(DPSGD, "per_layer")
        (('abadi', 'auto_s'), ())
    """
    if name not in field_types(cls):
        return ()
    hint = field_types(cls)[name]
    words = list(kinds_of(cls).get(name, {}))
    if typing.get_origin(hint) is typing.Literal:
        words += typing.get_args(hint)
    first = dotted({name: defaults(cls)[name]})[name]
    return tuple(dict.fromkeys([first, *words])) if first in words else tuple(words)


def meanings(cls: type) -> dict[str, str]:
    """What each field of a dataclass means, by dotted names: its entry under "Args" of the docstring.

    An entry that only points to another class ("as for ...") gives way to that of a base class.

    Example:
        >>> from equipoise.methods.clip_rules import PSAC
        >>> meanings(PSAC)
        {'regulariser': 'r > 0.'}
    """
    entries: dict[str, str] = {}
    for base in cls.__mro__:
        for name, text in _documented(vars(base).get("__doc__") or "").items():
            if name not in entries or entries[name].startswith(("as ", "see ")):
                entries[name] = text
    found = {}
    for name in field_types(cls):
        found[name] = entries.get(name, "").replace("`", "")
        default = next(item.default for item in dataclasses.fields(cls) if item.name == name)
        if hasattr(default, "recipe"):  # a method inside
            found[f"{name}.recipe"] = "library, or as_published for what its paper printed."
        if hasattr(default, "recipe") or isinstance(default, Option):
            found |= {f"{name}.{inner}": text for inner, text in meanings(type(default)).items()}
    return found


def _documented(docstring: str) -> dict[str, str]:
    """The entries under "Args" and "Attributes" of a docstring, by name."""
    found: dict[str, str] = {}
    names: list[str] = []
    inside = False
    for line in inspect.cleandoc(docstring).splitlines():
        if not line.startswith(" ") and line:
            inside, names = line in ("Args:", "Attributes:"), []
        elif inside and (entry := re.fullmatch(r" {4}(\w+(?:, \w+)*): +(.*)", line)):
            names = entry[1].split(", ")
            found |= dict.fromkeys(names, entry[2])
        elif inside and line:
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return found


def kinds_of(cls: type) -> dict[str, dict[str, type[Option]]]:
    """Option by option, the kinds that it may have.

    Example:
        >>> from equipoise.methods.dice_sgd import DiceSGD
        >>> list(kinds_of(DiceSGD)["variant"])
        ['joint', 'independent', 'automatic']
    """
    return {
        name: {kind: chosen for family in found for kind, chosen in family.kinds().items()}
        for name, hint in field_types(cls).items()
        if (found := families(hint))
    }


def first_paragraph(cls: type) -> str:
    """The first paragraph of a class's own docstring, on one line; empty where it has none."""
    first = inspect.cleandoc(vars(cls).get("__doc__") or "").split("\n\n")[0]
    # a dataclass without a docstring gets its signature for one
    return "" if first.startswith(f"{cls.__name__}(") else " ".join(first.split()).replace("`", "")


def as_json(value: Any) -> Any:
    """A value as JSON can hold it: an option becomes its kind and fields, a function only its name.

    Example:
        >>> from equipoise.methods.thresholds import Fixed
        >>> as_json(Fixed(0.5))
        {'kind': 'fixed', 'clip_norm': 0.5}
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, PublicRecords):
        return value.describe()
    if hasattr(value, "config"):
        return value.config()
    if isinstance(value, Option) and dataclasses.is_dataclass(value) and hasattr(value, "kind"):
        fields = {item.name: as_json(getattr(value, item.name)) for item in dataclasses.fields(value)}
        return {"kind": value.said()} | fields
    return {"opaque": getattr(value, "__qualname__", type(value).__name__)}


class NotInFileError(ValueError):
    """A file describes something that it cannot hold: the object has to be given again."""


class UnknownSettingsError(ValueError):
    """Settings that a class does not have.

    Attributes:
        names: of these settings, dotted.
    """

    def __init__(self, names: Sequence[str], cls: type, known: str) -> None:
        super().__init__(
            f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} unknown: {cls.__name__} has {known}"
        )
        self.names = names


def read_settings(
    cls: type, words: Mapping[str, Any], public: PublicRecords | None = None, where: str = ""
) -> dict[str, Any]:
    """The arguments of a dataclass from plain values: what `as_json` gave, or the words of a command line.

    An option may be given by its kind alone, and its fields by dotted names; those that are not given are the
    default's where the kind is.

    Args:
        cls: the dataclass.
        words: by name; "clip_rule" or "clip_rule.regulariser".
        public: public records, which no file holds; they go where the class or one of its options takes some.
        where: stands before the names in messages.

    Raises:
        NeedsPublicRecords: public records are missing.
        UnknownSettingsError: names that the class does not have.
        ValueError: an unknown kind, or an opaque value.

    Example:
        >>> from equipoise.methods.dp_sgd import DPSGD
        >>> read_settings(DPSGD, {"clip_rule": "psac", "clip_rule.regulariser": 0.1})
        {'clip_rule': PSAC(regulariser=0.1)}
    """
    hints, usual = field_types(cls), defaults(cls)
    given: dict[str, dict[str, Any]] = {}  # of a field: its own value under "", others by dotted names
    for name, value in words.items():
        field, _, inside = name.partition(".")
        given.setdefault(field, {})[inside] = value
    if unknown := given.keys() - hints.keys():
        known = ", ".join(where + known for known in hints) or "no settings"
        raise UnknownSettingsError([where + name for name in sorted(unknown)], cls, known)
    found: dict[str, Any] = {}
    for field, hint in hints.items():
        allowed, options = _parts(hint), families(hint)
        nested = given.get(field, {})
        is_given = "" in nested
        value = nested.pop("", usual[field])
        if isinstance(value, Mapping) and "opaque" in value and is_given:
            raise NotInFileError(
                f"{where}{field}={dict(value)!r} cannot be rebuilt from a file: {value['opaque']} is a "
                "function of yours; give the object again, for instance method=... to PrivateTraining.resume"
            )
        if PublicRecords in allowed:
            is_there = isinstance(value, PublicRecords)
            found[field] = value if is_there else require_public(f"{where}{field}", value, public)
        # Without a default an option that has a usual kind is made, though nobody asked for it.
        elif options and (is_given or nested or (value is None and any(o.usual_kind for o in options))):
            found[field] = _option(f"{where}{field}", value, options, nested, public)
        elif nested:
            found[field] = {**(value if isinstance(value, Mapping) else {}), **nested}
        elif is_given:
            if isinstance(value, str) and not {str, typing.Literal} & set(allowed):
                raise ValueError(f"{where}{field}={value!r} is a word; it must be a {_names(hint)}")
            if isinstance(value, str) and str not in allowed:
                value = _word(value)
            # JSON has no tuples; a frozen field holds one, so that two methods can be compared.
            found[field] = tuple(value) if isinstance(value, list) and tuple in allowed else value
    return found


def _word(text: str) -> str:
    """A word as kinds and choices are spelt: "Top-Share" and "top_share" are the same."""
    return text.lower().replace("-", "_")


def _option(
    where: str,
    value: Any,
    options: list[type[Option]],
    fields: Mapping[str, Any],
    public: PublicRecords | None,
) -> Any:
    """The option that a kind, a described option or an object stands for, with further fields by name."""
    if value is None:
        value = next((option.usual_kind for option in options if option.usual_kind), None)
        if value is None and not fields:
            return None
    numbers: list[str] = []
    if isinstance(value, str):
        kind, *numbers = value.split(":")
        value = {"kind": kind}
    if not isinstance(value, Mapping):  # a number, a function or the object itself
        if fields:
            raise ValueError(f"{where}.{next(iter(fields))} is unknown: {where}={value!r} has no such field")
        return value
    kinds = {kind: found for option in options for kind, found in option.kinds().items()}
    kinds |= {found.word: found for found in kinds.values() if found.word}
    chosen: Any = kinds.get(_word(str(value.get("kind"))))
    if chosen is None:
        raise NotInFileError(
            f"{where}={value.get('kind')!r} is no kind known here; give one of {', '.join(sorted(kinds))}. "
            "Of a run with a class of your own, give the method again, method=..."
        )
    given = {name: item for name, item in value.items() if name != "kind"} | dict(fields)
    names = list(field_types(chosen))[: len(numbers)]
    try:
        given |= dict(zip(names, map(json.loads, numbers), strict=True))
    except ValueError as error:
        raise ValueError(
            f"{where}={':'.join([chosen.kind, *numbers])}: after the kind follow its numbers, "
            f"{':'.join(field_types(chosen))}"
        ) from error
    settings = read_settings(chosen, given, public, f"{where}.")
    try:
        return chosen(**settings)
    except (TypeError, ValueError) as error:
        # An option checks its own fields by their own names; who wrote "clip_rule.gamma" reads that name.
        named = any(str(error).startswith(f"{name}=") for name in settings)
        raise type(error)(f"{where}{'.' if named else ': '}{error}") from error


def _split(hint: Any) -> list[Any]:
    """The types of a union, or the type itself."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return [part for one in typing.get_args(hint) for part in _split(one)]
    return [hint]


def _parts(hint: Any) -> list[Any]:
    """As `_split`, without the arguments of types."""
    return [typing.get_origin(part) or part for part in _split(hint)]


def _names(hint: Any) -> str:
    words = {"int": "number", "float": "number", "bool": "true or false", "NoneType": "null"}
    names = [getattr(part, "__name__", str(part)) for part in _parts(hint)]
    return " or ".join(dict.fromkeys(words.get(name, name) for name in names))
