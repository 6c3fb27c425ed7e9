"""Checks objects that are passed on as the client wrote them, such as tools and response formats.

This module checks the names of their fields by the rules of `unread_fields.py`. `text/grammar/`
interprets them. Imported only for requests with such objects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from saccade.front.fields import unknown
from saccade.front.unread_fields import INSTEAD, changes_nothing
from saccade.text.grammar.constraint import OutputConstraint, read_constraint
from saccade.text.grammar.tools import Tool, not_run, read_each, read_tool

Members = Mapping[str, Any]
"""Names of fields, each with the `Members` of the object in the field, or None if any value is
accepted.
"""

JSON_SCHEMA: Members = dict.fromkeys(("description", "name", "schema", "strict"))
RESPONSE_FORMAT: Members = {"type": None, "schema": None, "json_schema": JSON_SCHEMA}
STRUCTURED_OUTPUTS: Members = dict.fromkeys(
    (
        "choice",
        "disable_any_whitespace",
        "grammar",
        "json",
        "json_object",
        "regex",
        "whitespace_pattern",
    )
)
_UNSEEN: Members = dict.fromkeys(
    (
        "cache_control",
        "defer_loading",
        "eager_input_streaming",
        "examples",
        "id",
        "input_examples",
        "output_schema",
        "prompt_cache_breakpoint",
        "response",
        "return",
        "returns",
        "title",
    )
)
"""Fields of a tool that the model never sees."""
FUNCTION: Members = {
    **_UNSEEN,
    **dict.fromkeys(("description", "name", "parameters", "strict")),
}
TOOL: Members = {
    **_UNSEEN,
    "type": None,
    "function": FUNCTION,
}
_NAMED: Members = {"type": None, "function": {"name": None}}
TOOL_CHOICE: Members = {**_NAMED, "allowed_tools": {"mode": None, "tools": _NAMED}}


def read_members(value: Any, members: Members, path: str) -> Any:
    """Return an object, or a list of objects, without unknown fields that have no effect.

    Any other value is returned unchanged. Raises InvalidRequest for the first unknown field that
    may have an effect.
    """
    if isinstance(value, list | tuple):
        return [read_members(each, members, f"{path}[{i}]") for i, each in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    kept: dict[str, Any] = {}
    for name, each in value.items():
        if each is None:
            continue
        if name in members:
            inner = members[name]
            kept[name] = each if inner is None else read_members(each, inner, f"{path}.{name}")
        elif not changes_nothing(name, each):
            raise unknown(f"{path}.{name}", INSTEAD.get(name, ""))
    return kept


def read_tools(tools: Sequence[Any] | None) -> tuple[Tool, ...]:
    """Convert the tools of a chat. Raises InvalidRequest that names the field, also for tools that
    are not functions.
    """
    return read_each(tools, _tool)


def _tool(tool: Any, path: str) -> Tool:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if isinstance(kind, str) and kind != "function":
        raise not_run(kind, path)
    return read_tool(read_members(tool, TOOL, path), path)


def read_choice(choice: Any) -> Any:
    """Return the `tool_choice` of a chat without unknown fields. Raises InvalidRequest if one may
    have an effect.
    """
    return read_members(choice, TOOL_CHOICE, "tool_choice") if isinstance(choice, dict) else choice


def read_form(fields: Mapping[str, Any]) -> OutputConstraint | None:
    """Return the output format that a request requires, or None if any text is allowed.

    Raises InvalidRequest for an invalid or unknown field.
    """
    known = {"response_format": RESPONSE_FORMAT, "structured_outputs": STRUCTURED_OUTPUTS}
    read = {name: read_members(fields.get(name), known[name], name) for name in known}
    return read_constraint({**fields, **read})
