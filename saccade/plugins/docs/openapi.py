"""Builds the response of GET /openapi.json from the API's schemas, in a form that client generators
accept. Operations have names, groups and summaries, lists have item types, and enum values have
distinct names.

The core and each plugin provide a `Description` of their operations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pkgutil import resolve_name
from typing import Any

import msgspec
from msgspec import inspect

from saccade import __version__
from saccade.api.body_schema import BodySchema
from saccade.api.chat.fields import NO_LIMIT
from saccade.api.description import (
    ApiOperation,
    Components,
    Description,
    Schema,
    list_of,
    one_of,
    reference,
)
from saccade.api.field_words import COMMON
from saccade.api.operations import OPERATIONS
from saccade.core.decoders import json_decoder
from saccade.core.field_docs import field_docs
from saccade.core.types import SAMPLING_BOUNDS
from saccade.front.unread_fields import IgnoredFields, SpokenAnswer, UnsupportedFields
from saccade.plugin import Plugin

_ABOUT = (
    "A server for models that read text, images, PDFs and videos. It has the APIs of OpenAI and "
    "Anthropic. A repeated image costs only a hash."
)
_EVENTS = "Server-sent events, if the request sets stream: each is `data:` and a JSON text."


@cache
def descriptions(plugins: tuple[Plugin, ...]) -> tuple[Description, ...]:
    """Return the descriptions of the core's and of these plugins' operations."""
    named = (name for plugin in plugins if (name := plugin.http.operations))
    return (OPERATIONS, *map(resolve_name, named))


@cache
def describe(plugins: tuple[Plugin, ...]) -> dict[str, Any]:
    """Build the OpenAPI 3.1 document of a server with these plugins."""
    described = descriptions(plugins)
    components = _components(described)
    paths: dict[str, Any] = {}
    for description in described:
        for operation in description.operations:
            paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    document = {
        "openapi": "3.1.0",
        "info": {"title": "Saccade", "version": __version__, "description": _ABOUT},
        "security": [{"key": []}, {}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "servers": [{"url": "/", "description": "The server that this document describes"}],
    }
    _complete(document["components"])
    return document


def _components(described: Sequence[Description]) -> Components:
    bodies = {name: forms for each in described for name, forms in each.bodies.items()}
    groups = {group for forms in bodies.values() for form in forms for group in form.groups}
    types = sorted(groups.union(*(each.types for each in described)), key=str)
    types += [UnsupportedFields, IgnoredFields]
    for kind in types:
        json_decoder(kind)  # resolves the types of fields, which is not thread-safe in msgspec
    _, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}", schema_hook=_raw
    )
    _leave_out_unread(components)
    for each in described:
        for (group, field), items in each.items.items():
            list_of(components[group]["properties"][field])["items"] = one_of(*items)
        each.complete(components)
        for kind in each.sampling:
            _add_bounds(components[kind.__name__])
    _add_words(components, described, classes_in(types))
    for name, forms in bodies.items():
        for form in forms:
            components[form.kind.__name__] = _merged(form, components)
        if len(forms) > 1:
            components[name] = one_of(*(form.kind for form in forms))
    return components


def _leave_out_unread(components: Components) -> None:
    """Remove fields that must be empty and fields that are ignored from the schemas."""
    unread = [components.pop(kind.__name__) for kind in (UnsupportedFields, IgnoredFields)]
    del components[SpokenAnswer.__name__]
    for shape in components.values():
        fields = shape.get("properties", {})
        for name in list(fields):
            if any(fields[name] == each["properties"].get(name) for each in unread):
                del fields[name]


def _raw(kind: type[Any]) -> dict[str, Any]:
    if kind is msgspec.Raw:
        return {}
    raise NotImplementedError


def _add_bounds(group: Schema) -> None:
    bounds = {name: (least, most) for name, (_, least, most) in SAMPLING_BOUNDS.items()}
    bounds["max_tokens"] = (NO_LIMIT, bounds["max_tokens"][1])
    for name, (low, high) in bounds.items():
        for option in _options(group, name):
            option.update(minimum=low, maximum=high)


def _options(group: Schema, name: str) -> list[Schema]:
    field = group["properties"].get(name, {})
    options: list[Schema] = field.get("anyOf", [field])
    return [option for option in options if option.get("type") in ("integer", "number")]


def _add_words(
    components: Components, described: Sequence[Description], kinds: Mapping[str, type]
) -> None:
    """Add a description to each field: the string below it in its class, or the description for its
    name.

    kinds: the classes by the names of their schemas.

    Schemas share the objects of fields, so these are replaced with new ones.
    """
    own = {place: words for each in described for place, words in each.own_words.items()}
    common = {name: words for each in described for name, words in each.words.items()} | COMMON
    for schema, shape in components.items():
        fields = shape.get("properties", {})
        below = field_docs(kinds[schema]) if schema in kinds else {}
        for name, field in fields.items():
            words = own.get((schema, name)) or below.get(name) or common.get(name)
            if words and "description" not in field:
                fields[name] = {**field, "description": words}


def _merged(form: BodySchema[Any], components: Components) -> Schema:
    found = [components[group.__name__] for group in form.groups]
    return {
        "type": "object",
        "title": form.kind.__name__,
        "description": (form.kind.__doc__ or "").strip(),
        "properties": {key: value for group in found for key, value in group["properties"].items()},
        "required": [key for group in found for key in group.get("required", [])],
    }


def _operation(operation: ApiOperation) -> Schema:
    words = re.sub(r"\{(\w+)\}", r"by_\1", operation.path).strip("/").removeprefix("v1/")
    described: Schema = {
        "operationId": f"{operation.method}_{re.sub(r'[^a-z0-9]+', '_', words.lower())}",
        "tags": [_tag(operation.path)],
        "summary": operation.summary,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in re.findall(r"\{(\w+)\}", operation.path)
        ],
        "responses": _responses(operation),
    }
    content: Schema = {}
    if operation.body:
        json = {"schema": reference(operation.body), "example": operation.example}
        content["application/json"] = json
    if operation.form:
        content["multipart/form-data"] = {"schema": reference(operation.form)}
    if content:
        described["requestBody"] = {"required": True, "content": content}
    return described


def _responses(operation: ApiOperation) -> Schema:
    done: Schema = {"description": "Done."}
    if operation.answer:
        done["content"] = {"application/json": {"schema": reference(operation.answer)}}
    if operation.streams:
        events = {"schema": {"type": "string", "description": _EVENTS}}
        done["content"]["text/event-stream"] = events
    refusal = {"application/json": {"schema": reference(operation.error)}}
    refused = {"description": "Rejected. The error has the reason.", "content": refusal}
    return {"200": done, "default": refused}


def _tag(path: str) -> str:
    parts = path.strip("/").split("/")
    return parts[1] if parts[0] == "v1" else "server"


def _complete(value: Any) -> None:
    """Add item types to lists. Remove enum values to which generators would give the same name as
    an earlier one.
    """
    if isinstance(value, list):
        for each in value:
            _complete(each)
    if not isinstance(value, dict):
        return
    if value.get("type") == "array":
        value.setdefault("items", {})
    if isinstance(value.get("enum"), list):
        names = {re.sub(r"\W", "_", str(each)).lower(): each for each in reversed(value["enum"])}
        value["enum"] = list(reversed(names.values()))
        if all(isinstance(each, bool) for each in value["enum"]):
            value["type"] = "boolean"
            value["const"] = value.pop("enum")[0]
    for each in value.values():
        _complete(each)


def classes_in(types: Sequence[type]) -> dict[str, type]:
    """Return the classes that `types` refer to, by name."""
    found: dict[str, type] = {}
    ahead = [*inspect.multi_type_info(types)]
    while ahead:
        match ahead.pop():
            case inspect.StructType(cls=kind, fields=fields) if kind.__name__ not in found:
                found[kind.__name__] = kind
                ahead += [field.type for field in fields]
            case inspect.UnionType(types=inner) | inspect.TupleType(item_types=inner):
                ahead += inner
            case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
                ahead.append(item)
            case inspect.DictType(value_type=item) | inspect.Metadata(type=item):
                ahead.append(item)
    return found
