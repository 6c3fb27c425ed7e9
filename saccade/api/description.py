"""A dialect's entries in `/openapi.json`: a `Description`.

Owns its form, and the schemas of what several dialects have. Knows no dialect. Imported by those
that describe the API alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from saccade.api.body_schema import BodySchema

Schema = dict[str, Any]
"""A JSON schema."""
Components = dict[str, Schema]
"""Schemas by name."""


@dataclass(frozen=True, slots=True)
class ApiOperation:
    """One method of one path."""

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
    """The operations of a dialect, and the schemas that they name."""

    operations: tuple[ApiOperation, ...]
    bodies: Mapping[str, tuple[BodySchema[Any], ...]] = field(default_factory=dict)
    """By the name of the schema. One of several may fit."""
    types: tuple[type[Any], ...] = ()
    """Classes whose schemas are named, with those that they hold."""
    items: Mapping[tuple[str, str], tuple[type[Any], ...]] = field(default_factory=dict)
    """By schema and field: the classes of a list's items that are read separately."""
    sampling: tuple[type[Any], ...] = ()
    """Classes with options of sampling, which have its bounds."""
    complete: Callable[[Components], None] = lambda _: None
    """Adds the schemas that no class has. Called before fields get their words."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Sentences by field, for those that no class describes and only this dialect has."""
    own_words: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """Sentences by schema and field, which go before all others."""


def reference(name: str) -> Schema:
    """Return a reference to the schema of this name."""
    return {"$ref": f"#/components/schemas/{name}"}


def one_of(*types: type[Any]) -> Schema:
    """Return the schema of what has one of these types."""
    kinds = [reference(each.__name__) for each in types]
    return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}


def record(properties: Schema) -> Schema:
    """Return the schema of an object that has all these properties."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def list_of(field: Schema) -> Schema:
    """Return the schema for a list among those of a field."""
    lists = [each for each in field.get("anyOf", [field]) if each.get("type") == "array"]
    found: Schema = lists[0]
    return found
