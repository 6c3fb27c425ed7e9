"""Converts items of conversations that started on another server: calls of tools that this server
does not run.

A call is converted to a `function_call`, and its result to a `function_call_output`. Items without
content for a model are omitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from saccade.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class _Call:
    name: str  # of the tool, if the item has no name
    arguments: str  # the field with its arguments
    result: tuple[str, ...] = ()  # the fields that may have its result, if that is in the same item


_CALLS = {
    "apply_patch_call": _Call("apply_patch", "operation"),
    "code_interpreter_call": _Call("code_interpreter", "code", ("outputs", "status")),
    "custom_tool_call": _Call("custom", "input"),
    "file_search_call": _Call("file_search", "queries", ("results", "status")),
    "image_generation_call": _Call("image_generation", "revised_prompt", ("result", "status")),
    "local_shell_call": _Call("local_shell", "action"),
    "mcp_call": _Call("mcp", "arguments", ("output", "error", "status")),
    "program": _Call("program", "code"),
    "shell_call": _Call("shell", "action"),
    "tool_search_call": _Call("tool_search", "arguments"),
    "web_search_call": _Call("web_search", "action", ("status",)),
}
_RESULTS = {
    "apply_patch_call_output": ("output", "status"),
    "custom_tool_call_output": ("output",),
    "local_shell_call_output": ("output",),
    "program_output": ("result",),
    "shell_call_output": ("output",),
    "tool_search_output": ("tools",),
}
"""For each type of item, the fields that may have the result."""
LEFT_OUT = frozenset(
    {
        "additional_tools",
        "compaction",
        "compaction_trigger",
        "configuration_update",
        "context_compaction",
        "ghost_snapshot",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_list_tools",
    }
)
"""Types of items without content for this model: encrypted text, notes of clients, and tools."""
_CALL, _OUTPUT = "_call", "_output"
"""Suffixes of the types of calls and results that are not listed."""
_ARGUMENTS = ("arguments", "input", "action", "operation", "code", "queries")
_ANY_RESULT = ("output", "result", "outputs", "results", "tools", "error", "status")


def translate(item: Mapping[str, Any], kind: str, place: str) -> list[tuple[dict[str, Any], str]]:
    """Convert an item to items that this server supports. Each is returned with the path of its
    content.

    Raises InvalidRequest if the type is neither a call nor a result, and is not omitted.
    """
    if kind in LEFT_OUT:
        return []
    if (call := _CALLS.get(kind) or _later_call(item, kind)) is not None:
        return _call(item, call, place)
    if fields := _RESULTS.get(kind) or (_ANY_RESULT if kind.endswith(_OUTPUT) else ()):
        return [_result(item, fields, kind.removesuffix(_OUTPUT).removesuffix(_CALL), place)]
    raise InvalidRequest(
        f"{place}.type: {kind[:100]!r} is not supported: items are message, function_call, "
        "function_call_output, computer_call, computer_call_output, reasoning, item_reference, "
        f"{', '.join((*_CALLS, *_RESULTS))}",
        f"{place}.type",
        "unsupported_parameter",
    )


def _later_call(item: Mapping[str, Any], kind: str) -> _Call | None:
    """Return how to read a call of an unknown type, or None if the item is not a call."""
    if not kind.endswith(_CALL):
        return None
    field = next((name for name in _ARGUMENTS if item.get(name) is not None), "arguments")
    inner = any(item.get(name) is not None for name in _ANY_RESULT[:-2])
    return _Call(kind.removesuffix(_CALL), field, _ANY_RESULT if inner else ())


def _call(item: Mapping[str, Any], call: _Call, place: str) -> list[tuple[dict[str, Any], str]]:
    name, given = item.get("name"), item.get(call.arguments)
    name = call.name if name is None else name
    if given is None:
        given = {}
    elif not isinstance(given, dict) and call.arguments != "arguments":
        given = {call.arguments: given}
    called = {
        "type": "function_call",
        "call_id": _id(item, name),
        "name": name,
        "arguments": given if isinstance(given, str) else msgspec.json.encode(given).decode(),
    }
    if not call.result:
        return [(called, place)]
    return [(called, place), _result(item, call.result, name, place)]


def _result(
    item: Mapping[str, Any], fields: tuple[str, ...], name: str, place: str
) -> tuple[dict[str, Any], str]:
    # An empty text means the same as none: clients empty the results that they remove.
    field = next((each for each in fields if item.get(each) not in (None, "")), fields[0])
    output = _output(item, field)
    call_id = _id(item, name)
    return {
        "type": "function_call_output",
        "call_id": call_id,
        "output": output,
    }, f"{place}.{field}"


def _id(item: Mapping[str, Any], name: Any) -> Any:
    return next((item[key] for key in ("call_id", "id") if item.get(key) is not None), name)


def _output(item: Mapping[str, Any], field: str) -> Any:
    """Return a result as the output of a function: a string, or a list of parts with text and
    images.
    """
    value = item.get(field)
    if item.get("type") == "image_generation_call" and field == "result" and value:
        form = item.get("output_format") or "png"
        if form == "svg":
            return "an SVG image"
        return [{"type": "input_image", "image_url": f"data:image/{form};base64,{value}"}]
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list) and value and all(map(_is_content, value)):
        return [_content(each) for each in value]
    return msgspec.json.encode(value).decode()


def _is_content(value: Any) -> bool:
    kinds = ("input_text", "input_image", "input_file", "input_video", "text", "logs", "image")
    return isinstance(value, dict) and value.get("type") in kinds


def _content(value: dict[str, Any]) -> dict[str, Any]:
    """Convert a content of a result. The contents of a code interpreter's result have other
    types.
    """
    match value:
        case {"type": "logs", "logs": logs}:
            return {"type": "input_text", "text": logs}
        case {"type": "image", "url": url}:
            return {"type": "input_image", "image_url": url}
    return value
