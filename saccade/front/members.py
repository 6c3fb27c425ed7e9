"""Objects that stay as the client wrote them, such as tools and forms of answers: their names.

Owns these names, and their reading by the rule of `unread_fields.py`. `text/grammar/` has the
meanings. Imported only for requests with such objects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from saccade.front.fields import unknown
from saccade.front.unread_fields import INSTEAD, changes_nothing
from saccade.text.grammar.constraint import OutputConstraint, read_constraint
from saccade.text.grammar.tools import Tool, not_run, read_each, read_tool

Members = Mapping[str, Any]
"""Names, each with the `Members` of its objects, or None for a value of any form."""

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
"""Names in a tool that no model is shown, whatever their value."""
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
    """Return an object, or each of a list, without names whose values change nothing.

    A value of another form is returned unchanged. Raises InvalidRequest that names the first other
    name.
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
    """Read a chat's tools. Raises InvalidRequest that names the field, also for a tool that is no
    function.
    """
    return read_each(tools, _tool)


def _tool(tool: Any, path: str) -> Tool:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if isinstance(kind, str) and kind != "function":
        raise not_run(kind, path)
    return read_tool(read_members(tool, TOOL, path), path)


def read_choice(choice: Any) -> Any:
    """Return a chat's `tool_choice`. Raises InvalidRequest for an unknown name in it."""
    return read_members(choice, TOOL_CHOICE, "tool_choice") if isinstance(choice, dict) else choice


def read_form(fields: Mapping[str, Any]) -> OutputConstraint | None:
    """Read the form of an answer as `read_constraint` does. Raises InvalidRequest for an unknown
    name in one of the fields, too.
    """
    known = {"response_format": RESPONSE_FORMAT, "structured_outputs": STRUCTURED_OUTPUTS}
    read = {name: read_members(fields.get(name), known[name], name) for name in known}
    return read_constraint({**fields, **read})
