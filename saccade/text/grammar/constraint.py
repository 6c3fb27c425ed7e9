"""Reads the output format that a request requires, from OpenAI's `response_format`, or vLLM's
`structured_outputs` and `guided_*`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from saccade.core.errors import InvalidRequest

MAX_BREAKS_CHARACTERS = 200
"""Maximum length of a regular expression for white space, which may match between any two tokens of
JSON.
"""
MAX_CHOICES = 1_000
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_MODES = ("json", "regex", "choice", "grammar", "json_object")
_ANY_OBJECT = {"type": "object"}
_BREAKS = r"[ \t\n\r]{0,40}"
"""Default white space between tokens of JSON. It is bounded, so that a model cannot write white
space until the maximum length.
"""


@dataclass(frozen=True, slots=True)
class Spacing:
    """The white space that a model may write in JSON."""

    separators: tuple[str, str] = (", ", ": ")  # after an item, and after a key
    breaks: str | None = None  # a regular expression for other white space between tokens

    def options(self) -> dict[str, Any]:
        item, key = self.separators
        return {
            "item_separator": item,
            "key_separator": key,
            "whitespace_flexible": False,
            "whitespace_pattern": self.breaks,
            "coerce_one_of": False,
            "lenient": False,
        }


AS_DUMPED = Spacing()
"""The spacing of Python's json.dumps, which is common in training data. The model then samples only
values.
"""
COMPACT = Spacing((",", ":"))
FREE = Spacing((",", ":"), _BREAKS)


@dataclass(frozen=True, slots=True)
class OutputConstraint:
    """The format that a response must have."""

    kind: Literal["json", "regex", "lark", "choice", "parts"]
    # json: the schema. regex, lark: the pattern or grammar. choice: the list of possible responses.
    # parts: compiled by the server from `inner`; the first part is the response's grammar.
    value: Any
    param: str  # the request's field that requires the format, as the client wrote it
    spacing: Spacing = AS_DUMPED
    inner: tuple[OutputConstraint, ...] = ()


def read_constraint(fields: Mapping[str, Any]) -> OutputConstraint | None:
    """Return the output format that a request requires, or `None` if any text is allowed.

    It is in `response_format`, `structured_outputs` or `guided_*`. Raises InvalidRequest that names
    the field if one is invalid or if several are set.
    """
    structured = fields.get("structured_outputs")
    constraints = [
        constraint
        for constraint in (
            read_response_format(fields.get("response_format") or None),
            read_structured_outputs(structured, "structured_outputs") if structured else None,
            read_guided(fields),
        )
        if constraint is not None
    ]
    if len(constraints) > 1:
        first, second = constraints[0].param, constraints[1].param
        raise InvalidRequest(
            f"{second} and {first} are mutually exclusive: send one of them", second
        )
    return constraints[0] if constraints else None


def read_response_format(
    value: Mapping[str, Any] | None, param: str = "response_format"
) -> OutputConstraint | None:
    """Convert OpenAI's `response_format`. Returns `None` if any text is allowed.

    param: the path of the field in the client's request. Raises InvalidRequest.
    """
    if value is None:
        return None
    kind, taken = value.get("type"), {"json_object": "schema", "json_schema": "json_schema"}
    if kind not in ("text", *taken):
        raise InvalidRequest(
            f"{param}.type: only text, json_object or json_schema is supported", f"{param}.type"
        )
    for name in taken.values():
        if value.get(name) is not None and name != taken.get(kind):
            where = f"{param}.{name}"
            raise InvalidRequest(f"{where}: not allowed with type {kind!r}", where)
    if kind == "text":
        return None
    if kind == "json_object":
        schema = value.get("schema")
        if schema is None:
            return OutputConstraint("json", _ANY_OBJECT, param)
        return OutputConstraint("json", schema, f"{param}.schema")
    inner, param = value.get("json_schema"), f"{param}.json_schema"
    if not isinstance(inner, Mapping):
        raise InvalidRequest(f"{param}: expected an object with name and schema", param)
    return read_json_schema(inner, param)


def read_json_schema(value: Mapping[str, Any], param: str) -> OutputConstraint:
    """Convert the named schema in `response_format.json_schema`, or in `text.format` of the
    Responses API.

    `strict` has no effect, because schemas are always enforced. Raises InvalidRequest.
    """
    name = value.get("name")
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        where = f"{param}.name"
        raise InvalidRequest(f"{where}: expected 1 to 64 letters, digits, _ or -", where)
    if not isinstance(value.get("schema"), Mapping):
        where = f"{param}.schema"
        raise InvalidRequest(f"{where}: expected a JSON schema, an object", where)
    return OutputConstraint("json", value["schema"], f"{param}.schema")


def read_structured_outputs(value: Mapping[str, Any], param: str) -> OutputConstraint | None:
    """Convert vLLM's `structured_outputs`.

    It has one of json, regex, choice, grammar (Lark) and json_object, and options for the white
    space in JSON. Raises InvalidRequest.
    """
    given = [mode for mode in _MODES if value.get(mode) is not None]
    if len(given) != 1:
        raise InvalidRequest(
            f"{param}: expected one of {', '.join(_MODES)}, got {' and '.join(given) or 'none'}",
            param,
        )
    spacing = _spacing(
        value.get("disable_any_whitespace"),
        value.get("whitespace_pattern"),
        f"{param}.whitespace_pattern",
    )
    return _read_mode(given[0], value[given[0]], f"{param}.{given[0]}", spacing)


def read_guided(fields: Mapping[str, Any]) -> OutputConstraint | None:
    """Convert vLLM's older fields: guided_json, guided_regex, guided_choice, guided_grammar,
    guided_json_object and guided_whitespace_pattern.

    Returns `None` if none is set. Raises InvalidRequest.
    """
    given = [mode for mode in _MODES if fields.get(f"guided_{mode}") is not None]
    if not given:
        return None
    if len(given) > 1:
        raise InvalidRequest(
            f"guided_{given[1]} and guided_{given[0]} are mutually exclusive: send one of them",
            f"guided_{given[1]}",
        )
    where = "guided_whitespace_pattern"
    spacing = _spacing(None, fields.get(where), where)
    param = f"guided_{given[0]}"
    return _read_mode(given[0], fields[param], param, spacing)


def _read_mode(mode: str, value: Any, param: str, spacing: Spacing) -> OutputConstraint | None:
    match mode:
        case "json":
            if isinstance(value, str):
                try:
                    value = json.loads(value)
                except (ValueError, RecursionError) as error:
                    raise InvalidRequest(f"{param} is not valid JSON: {error}", param) from None
            return OutputConstraint("json", value, param, spacing)
        case "json_object":
            if not isinstance(value, bool):
                raise InvalidRequest(f"{param}: expected true or false", param)
            return OutputConstraint("json", _ANY_OBJECT, param, spacing) if value else None
        case "choice":
            whole = isinstance(value, list | tuple) and 0 < len(value) <= MAX_CHOICES
            if not whole or not all(isinstance(each, str) for each in value):
                raise InvalidRequest(
                    f"{param}: expected a list of 1 to {MAX_CHOICES} strings", param
                )
            return OutputConstraint("choice", list(value), param)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{param}: expected a non-empty string", param)
    return OutputConstraint("regex" if mode == "regex" else "lark", value, param)


def _spacing(compact: Any, breaks: Any, where: str) -> Spacing:
    """Return the white space that is allowed in JSON. where: the client's name for `breaks`."""
    if breaks is not None:
        if not isinstance(breaks, str):
            raise InvalidRequest(f"{where}: expected a regular expression", where)
        if len(breaks) > MAX_BREAKS_CHARACTERS:
            raise InvalidRequest(
                f"{where} has {len(breaks)} characters; the limit is {MAX_BREAKS_CHARACTERS}", where
            )
        return Spacing((",", ":"), breaks)
    return {True: COMPACT, False: FREE}.get(compact, AS_DUMPED)
