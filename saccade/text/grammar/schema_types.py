"""JSON schemas in requests: their limits, paths in them, and the types that they allow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

MAX_SCHEMA_BYTES = 131_072
MAX_SCHEMA_DEPTH = 64
"""Maximum nesting depth of schemas."""
Place = tuple[str | int, ...]
"""A path in a schema, as the keys and indices from its root."""


def allowed_types(schema: Any, root: Any) -> set[str]:
    """Return the JSON types that `schema` allows, or only "string" if it does not specify types.

    root: the schema that contains the targets of `$ref`.
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
    """Return the JSON types that a schema specifies itself, or the schemas that it refers to
    instead.
    """
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
    """Return the target of a `$ref`, or `None` if it is missing."""
    found = root
    for part in reference.removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def types_of(value: Any) -> set[str]:
    """Return the JSON types that match a value, such as integer and number for 1."""
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


def place_name(param: str, place: Place) -> str:
    """Return a path in a schema for error messages, such as `param`.properties.x.anyOf[0]."""
    return param + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place)


def as_root(schema: Any, place: Place) -> Any:
    """Return the schema at `place` in `schema` as a standalone schema, which includes the targets
    of its references.
    """

    def moved(node: Any) -> Any:
        if isinstance(node, dict):
            return {
                key: f"#/$defs/whole{value[1:]}"
                if key == "$ref" and isinstance(value, str)
                else moved(value)
                for key, value in node.items()
            }
        return [moved(each) for each in node] if isinstance(node, list) else node

    steps = (str(key).replace("~", "~0").replace("/", "~1") for key in place)
    pointer = "".join(f"/{quote(step)}" for step in steps)
    return {"$defs": {"whole": moved(schema)}, "$ref": f"#/$defs/whole{pointer}"}
