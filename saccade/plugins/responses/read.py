"""Converts the body of POST /v1/responses to a conversation.

This module rejects unsupported features, and converts the fields (`fields.py`) and items
(`items.py`) to a `GenerationRequest`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from saccade.api.chat.fields import check_stream, count_likeliest
from saccade.api.chat.read import read_rules, sampling_fields, silence
from saccade.core.errors import InvalidRequest
from saccade.core.types import FieldNames
from saccade.front.content import check_lengths
from saccade.front.conversation import Chat
from saccade.front.extras import extras_of
from saccade.front.fields import missing
from saccade.front.members import FUNCTION, Members, read_members
from saccade.front.prompt_encoder import GenerationRequest
from saccade.plugins.agents.history_edits import AskedEdit, DropOldest
from saccade.plugins.computer.action_tool import ACT
from saccade.plugins.responses.computer import is_computer, read_computer
from saccade.plugins.responses.fields import (
    INCLUDABLE,
    LOGPROBS,
    RESPONSES,
    ResponseForm,
    ResponsesRequest,
    ResponseText,
    TextFormat,
)
from saccade.plugins.responses.items import (
    Item,
    ItemReader,
    MessageItem,
    PlacedItem,
    ReferenceItem,
    read_items,
)
from saccade.text.grammar.constraint import OutputConstraint, read_json_schema, read_response_format
from saccade.text.grammar.tools import Tool, ToolSet, not_run, read_each, read_function


@dataclass(frozen=True, slots=True)
class ResponseInquiry:
    """A parsed body.

    items: its input, as items.
    """

    request: ResponsesRequest
    items: tuple[PlacedItem, ...]


def read_responses(
    body: bytearray, context_length: int, refuse_tools: bool = False
) -> ResponseInquiry:
    """Parse a body. Raises InvalidRequest with the field.

    refuse_tools: whether to reject tools that this server does not run.
    """
    request = RESPONSES.read(body, context_length)
    _check(request)
    if refuse_tools and (ignored := ignored_tools(request.form)):
        run = '"function" and "computer" are'
        raise not_run(ignored[0]["type"], ignored[0]["param"], run)
    given = request.asked.input
    if isinstance(given, str):
        return ResponseInquiry(request, (_said(given),))
    check_lengths(given, context_length, "input")
    items = tuple(item for i, raw in enumerate(given) for item in read_items(raw, f"input[{i}]"))
    request.asked.input = []  # its items are views of the body, which can now be freed
    if not (items or request.asked.previous_response_id):
        items = (_said(""),)
    return ResponseInquiry(request, items)


def _said(text: str) -> PlacedItem:
    return PlacedItem(MessageItem(role="user", content=text), "input", "input")


def ignored_tools(form: ResponseForm) -> list[dict[str, str]]:
    """Return the path and the type of each tool that is ignored."""
    return [
        {"param": f"tools[{index}]", "type": str(tool.get("type"))}
        for index, tool in enumerate(form.tools or ())
        if not is_run(tool)
    ]


def is_run(tool: dict[str, Any]) -> bool:
    """Return True if the client runs this tool."""
    return is_computer(tool) or tool.get("type") == "function"


def _check(request: ResponsesRequest) -> None:
    delivery, form = request.delivery, request.form
    check_stream(delivery)
    for i, name in enumerate(form.include or ()):
        if name not in INCLUDABLE:
            message = f"include[{i}]: {name[:100]!r} is not known: {', '.join(INCLUDABLE)}"
            raise InvalidRequest(message, f"include[{i}]")
    count_likeliest(form, LOGPROBS in (form.include or ()), f'include ["{LOGPROBS}"]')


_NAMES = FieldNames(
    {
        "messages": "input",
        "prompt": "input",
        "max_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
        "verbosity": "text.verbosity",
    }
)


def response_request(
    request: ResponsesRequest, before: Sequence[Item], items: Sequence[PlacedItem]
) -> GenerationRequest:
    """Build the request for an answer.

    before: the conversation so far.
    items: the new items.

    Raises InvalidRequest with the field.
    """
    asked, form, delivery = request.asked, request.form, request.delivery
    reader = ItemReader(request.prompt.defaults(delivery.saccade))
    if asked.instructions is not None:
        reader.instruct(asked.instructions)
    # The conversation: stored turns, then the new items.
    for item in before:
        reader.add_item(item, "previous_response_id")
    for placed in items:
        assert not isinstance(placed.item, ReferenceItem | bytes)  # references have been resolved
        reader.add_item(placed.item, placed.place, placed.where)
    if not (messages := reader.messages):
        raise InvalidRequest("input: at least one message with content is required", "input")
    text = form.text or ResponseText()
    tools, computer = _tool_set(form), read_computer(form.tools or (), reader.acted)
    if computer is not None:
        tools, computer = None, replace(computer, beside=tools or ToolSet())
    chat = Chat(
        messages,
        tools,
        effort=form.effort,
        thinks=None if form.reasoning is None else form.reasoning.enabled,
        verbosity=text.verbosity,
        variables=request.prompt.variables,
    )
    # Sampling fields, by their names in chats.
    sampling = sampling_fields(request.sampling, request.ending)
    if (most := sampling.pop("max_output_tokens", None)) is not None:
        sampling["max_tokens"] = most
    if LOGPROBS in (form.include or ()):
        sampling["logprobs"] = count_likeliest(form, True, LOGPROBS)
    cache = request.caching.cache_request
    budget = None if form.reasoning is None else form.reasoning.max_tokens
    return GenerationRequest(
        chat,
        sampling,
        cache_salt=request.scope.salt,
        silent=silence(sampling, cache.prewarm),
        constraint=_constraint(text.format),
        cache=cache,
        names=_NAMES,
        rules=read_rules(request.restraint, budget),
        extras=extras_of(computer, AskedEdit(DropOldest()) if asked.truncation == "auto" else None),
    )


def _constraint(text: TextFormat | None) -> OutputConstraint | None:
    if text is None:
        return None
    if text.type != "json_schema" and text.schema is not None:
        where = "text.format.schema"
        raise InvalidRequest(f"{where}: not allowed with type {text.type!r}", where)
    if text.type == "text":
        return None
    if text.type == "json_object":
        return read_response_format({"type": "json_object"}, "text.format")
    if text.schema is None:
        raise InvalidRequest(
            "text.format.schema: this parameter is required",
            "text.format.schema",
            "missing_required_parameter",
        )
    given = msgspec.structs.asdict(text)
    return read_json_schema(
        {name: each for name, each in given.items() if each is not None}, "text.format"
    )


def _tool(tool: dict[str, Any], place: str) -> Tool | None:
    kind = tool.get("type")
    if not (isinstance(kind, str) and kind):
        raise missing(f"{place}.type")
    if kind != "function":
        return None  # a computer, or a tool that is ignored
    tool = read_members(tool, _TOOL, place)
    if not isinstance(tool.get("name"), str):
        raise InvalidRequest(
            f"{place}.name: this parameter is required, and must be a string",
            f"{place}.name",
            "missing_required_parameter",
        )
    return read_function(tool, place)


_TOOL: Members = {"type": None, **FUNCTION}
_NAMED: Members = dict.fromkeys(("type", "name"))
_ALLOWED: Members = {"type": None, "mode": None, "tools": None}


def _tool_set(form: ResponseForm) -> ToolSet | None:
    tools = read_each(form.tools, _tool)
    choice = _tool_choice(form.tool_choice, form.tools or (), tools)
    if choice is None and not any(map(is_run, form.tools or ())):
        return None
    return ToolSet(tools, choice, form.parallel)


def _tool_choice(
    choice: str | dict[str, Any] | None, given: Sequence[dict[str, Any]], tools: Sequence[Tool]
) -> Any:
    computer = any(map(is_computer, given))
    if choice is None or choice in ("none", "auto", "required"):
        return choice
    if isinstance(choice, dict):
        kind, name, allowed = choice.get("type"), choice.get("name"), choice.get("tools")
        if kind == "function" and isinstance(name, str):
            read_members(choice, _NAMED, "tool_choice")
            return {"type": "function", "function": {"name": name}}
        if computer and is_computer(choice):
            return ACT
        if kind == "allowed_tools" and isinstance(allowed, list):
            read_members(choice, _ALLOWED, "tool_choice")
            offered = {tool.name for tool in tools}
            return _allowed(choice.get("mode"), allowed, offered, computer)
        if any(kind == tool.get("type") for tool in given if not is_run(tool)):
            raise InvalidRequest(
                f"tool_choice: {str(kind)[:100]!r} is a tool that this server does not run",
                "tool_choice",
                "unsupported_parameter",
            )
    raise InvalidRequest(
        'tool_choice: expected "none", "auto", "required", {"type": "function", "name": ...} or '
        '{"type": "allowed_tools", "mode": ..., "tools": [...]}',
        "tool_choice",
        "unsupported_parameter",
    )


def _allowed(mode: Any, allowed: list[Any], offered: set[str], computer: bool) -> dict[str, Any]:
    if mode not in ("auto", "required"):
        where = "tool_choice.mode"
        raise InvalidRequest(f'{where}: expected "auto" or "required"', where)
    if not allowed:
        raise InvalidRequest(
            "tool_choice.tools: the list must name at least one tool", "tool_choice.tools"
        )
    named: list[dict[str, Any]] = []
    for index, tool in enumerate(allowed):
        match tool:
            case {"type": "function", "name": str(name)} if name in offered:
                named.append({"type": "function", "function": {"name": name}})
            case {"type": _} if computer and is_computer(tool):
                named.append(ACT)
            case _:
                where = f"tool_choice.tools[{index}]"
                raise InvalidRequest(f"{where}: tools has no tool with this name", where)
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
