"""The JSON types that a schema allows a value.

Knows nothing about what else a schema asks for (`schema.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def allowed_types(schema: Any, root: Any) -> set[str]:
    """Return the types that `schema` allows. A schema that leaves them open allows a string.

    root: the schema that references lead into.
    """
    kinds: set[str] = set()
    pending, seen = [schema], set[int]()
    while pending:
        each = pending.pop()
        if id(each) not in seen:
            seen.add(id(each))
            own, others = _own_types(each, root)
            kinds |= own
            pending += others
    return kinds or {"string"}


def _own_types(schema: Any, root: Any) -> tuple[set[str], list[Any]]:
    """Return the types that a schema itself names, or else the schemas that decide."""
    if not isinstance(schema, Mapping):
        return {"string"}, []
    kinds = schema.get("type")
    if isinstance(kinds, str | list):
        names = [kinds] if isinstance(kinds, str) else kinds
        return {kind for kind in names if isinstance(kind, str)}, []
    if "const" in schema:
        return types_of(schema["const"]), []
    if isinstance(schema.get("enum"), list):
        return {kind for value in schema["enum"] for kind in types_of(value)}, []
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list) and schema[key]:
            return set(), schema[key]
    if isinstance(schema.get("$ref"), str):
        return set(), [follow(schema["$ref"], root)]
    for kind, key in (("object", "properties"), ("array", "items")):
        if key in schema:
            return {kind}, []
    return {"string"}, []


def follow(reference: str, root: Any) -> Any:
    """Return the schema that `$ref` means, or `None` if it is missing."""
    found = root
    for part in reference.removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def types_of(value: Any) -> set[str]:
    """Return the types that a value has."""
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
    return {"object"}
