"""The parts of `/openapi.json`: each API has a `Description` of its operations.

This module also has helpers for schemas that several APIs use. It is imported only to build
`/openapi.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from saccade.api.body_schema import BodySchema

Schema = dict[str, Any]
"""A JSON schema."""
Components = dict[str, Schema]
"""JSON schemas by name."""


@dataclass(frozen=True, slots=True)
class ApiOperation:
    """One method of one path, with the names of its schemas."""

    method: Literal["get", "post", "delete"]
    path: str
    summary: str
    body: str = ""  # schema of the JSON in the request; "" if it has none
    answer: str = ""  # schema of the response; "" if it has none
    example: object = None  # a body
    streams: bool = False  # the answer may be server-sent events
    form: str = ""  # schema of the multipart form in the request
    error: str = "ErrorResponse"


@dataclass(frozen=True, slots=True)
class Description:
    """The operations of one API, and the schemas that they use."""

    operations: tuple[ApiOperation, ...]
    bodies: Mapping[str, tuple[BodySchema[Any], ...]] = field(default_factory=dict)
    """Request bodies by schema name. If there are several, a body matches one of them."""
    types: tuple[type[Any], ...] = ()
    """Classes that become schemas, together with the classes of their fields."""
    items: Mapping[tuple[str, str], tuple[type[Any], ...]] = field(default_factory=dict)
    """By (schema, field): the classes of list items that are decoded separately."""
    sampling: tuple[type[Any], ...] = ()
    """Classes with sampling options, whose bounds are added to the schemas."""
    complete: Callable[[Components], None] = lambda _: None
    """Adds schemas that no class defines. Called before fields get their descriptions."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Descriptions by field, for fields without one in a class that only this API has."""
    own_words: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """Descriptions by (schema, field), which override all others."""


def reference(name: str) -> Schema:
    """Return a reference to the schema with this name."""
    return {"$ref": f"#/components/schemas/{name}"}


def one_of(*types: type[Any]) -> Schema:
    """Return the schema of a value that has one of these types."""
    kinds = [reference(each.__name__) for each in types]
    return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}


def record(properties: Schema) -> Schema:
    """Return the schema of an object with these properties, all of them required."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def list_of(field: Schema) -> Schema:
    """Return the array schema among the alternatives of a field's schema."""
    lists = [each for each in field.get("anyOf", [field]) if each.get("type") == "array"]
    found: Schema = lists[0]
    return found
