"""Whether plain values fit a JSON schema, as far as the schema of the statement goes.

The keywords of draft 2020-12 that `statement.schema.json` uses; a schema with any other is refused, so that
none is passed over. The tests hold it against a whole validator.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["misfits"]


_TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}


_WORDS = {"$schema", "$defs", "title", "description"}  # they ask for nothing


_KNOWN = _WORDS | {
    "type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "pattern",
    "properties", "required", "additionalProperties", "items", "anyOf", "oneOf", "allOf", "if", "then",
    "else", "$ref",
}  # fmt: skip


def misfits(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any] | None = None) -> Iterator[str]:
    """Where a value does not fit, each place as a phrase.

    Args:
        value: of JSON.
        schema: what it must fit.
        root: the schema that `$ref` points into; `schema` when None.

    Raises:
        ValueError: a keyword that is not known here.

    Example:
        >>> schema = {"type": "object", "properties": {"steps": {"type": "integer", "minimum": 1}}}
        >>> list(misfits({"steps": 0}, schema)), list(misfits({"steps": 2}, schema))
        (['steps: 0 is below 1'], [])
    """
    root = schema if root is None else root
    unknown = set(schema) - _KNOWN
    if unknown:
        raise ValueError(f"the schema has {sorted(unknown)}, which are not known here")
    if "$ref" in schema:
        target: Any = root
        for part in str(schema["$ref"]).removeprefix("#/").split("/"):
            target = target[part]
        yield from misfits(value, target, root)
    yield from _of_itself(value, schema)
    if isinstance(value, dict):
        yield from _of_keys(value, schema, root)
    if isinstance(value, list) and "items" in schema:
        for number, item in enumerate(value):
            yield from (f"{number}. {one}" for one in misfits(item, schema["items"], root))
    yield from _of_others(value, schema, root)


def _of_itself(value: Any, schema: Mapping[str, Any]) -> Iterator[str]:
    shown = f"{value!r:.60}"
    if "type" in schema and not _is_of(value, schema["type"]):
        yield f"{shown} is no {schema['type']}"
    if "enum" in schema and not any(_same(value, one) for one in schema["enum"]):
        yield f"{shown} is none of {schema['enum']}"
    if "const" in schema and not _same(value, schema["const"]):
        yield f"{shown} is not {schema['const']!r}"
    if isinstance(value, str) and "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{shown} is not of the form {schema['pattern']}"
    if isinstance(value, int | float) and not isinstance(value, bool):
        if "minimum" in schema and value < schema["minimum"]:
            yield f"{shown} is below {schema['minimum']}"
        if "maximum" in schema and value > schema["maximum"]:
            yield f"{shown} is above {schema['maximum']}"
        if "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
            yield f"{shown} is not above {schema['exclusiveMinimum']}"
        if "exclusiveMaximum" in schema and value >= schema["exclusiveMaximum"]:
            yield f"{shown} is not below {schema['exclusiveMaximum']}"


def _of_keys(value: Mapping[str, Any], schema: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[str]:
    own = schema.get("properties", {})
    yield from (f"{name} is missing" for name in schema.get("required", ()) if name not in value)
    rest = schema.get("additionalProperties", True)
    for name, one in value.items():
        if name in own:
            yield from (f"{name}: {found}" for found in misfits(one, own[name], root))
        elif rest is False:
            yield f"{name!r:.60} is a key too many"
        elif isinstance(rest, Mapping):
            yield from (f"{name!s:.60}: {found}" for found in misfits(one, rest, root))


def _of_others(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[str]:
    for one in schema.get("allOf", ()):
        yield from misfits(value, one, root)
    for word in {"anyOf", "oneOf"} & set(schema):
        tried = [list(misfits(value, one, root)) for one in schema[word]]
        fits = sum(not found for found in tried)
        if fits < 1 or (word == "oneOf" and fits > 1):
            yield f"{value!r:.60} fits {fits} of {len(tried)} forms"
    if "if" in schema:
        branch = "else" if any(misfits(value, schema["if"], root)) else "then"
        yield from misfits(value, schema.get(branch, {}), root)


def _is_of(value: Any, kind: str) -> bool:
    if kind in ("number", "integer"):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and (kind == "number" or isinstance(value, int) or value.is_integer())
    return isinstance(value, _TYPES[kind])


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and value == other
