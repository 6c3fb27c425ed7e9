"""The body of POST /v1/responses as a conversation.

Owns the features refused by name, and the way from the fields (`fields.py`) and items (`items.py`)
to a `GenerationRequest`. Knows nothing of routes, of stores or of answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from saccade.api.chat.read import sampling_fields, silence
from saccade.api.responses.computer import is_computer, read_computer
from saccade.api.responses.fields import (
    INCLUDABLE,
    LOGPROBS,
    RESPONSES,
    ResponseForm,
    ResponsesRequest,
    ResponseText,
    TextFormat,
)
from saccade.api.responses.items import Item, ItemReader, MessageItem, ReferenceItem, read_item
from saccade.core.errors import InvalidRequest
from saccade.core.types import FieldNames
from saccade.front.answer_rules import NO_ANSWER_RULES
from saccade.front.breakpoints import read_cache_request
from saccade.front.content import check_lengths
from saccade.front.conversation import Chat
from saccade.front.fields import unsupported
from saccade.front.history_edits import DropOldest
from saccade.front.part_defaults import PartDefaults
from saccade.front.prompt_encoder import GenerationRequest
from saccade.text.actions.action_tool import ACT
from saccade.text.grammar.grammars import OutputConstraint, read_json_schema, read_response_format
from saccade.text.grammar.tools import Tool, ToolSet, read_each, read_function


@dataclass(frozen=True, slots=True)
class ResponseInquiry:
    """A body after reading. `items`: its input, as items."""

    request: ResponsesRequest
    items: tuple[Item | ReferenceItem, ...]


def read_responses(body: bytearray, context_length: int) -> ResponseInquiry:
    """Read the inquiry in a body. Raises InvalidRequest that names the field."""
    request = RESPONSES.read(body, context_length)
    _check(request)
    given = request.asked.input
    if isinstance(given, str):
        return ResponseInquiry(request, (MessageItem(role="user", content=given),))
    check_lengths(given, context_length, "input")
    items = tuple(read_item(raw, f"input[{i}]") for i, raw in enumerate(given))
    request.asked.input = []  # it lies in the body, which is let go
    return ResponseInquiry(request, items)


def _check(request: ResponsesRequest) -> None:
    delivery, form = request.delivery, request.form
    if delivery.stream_options is not None:
        if not delivery.stream:
            message = "stream_options is only allowed together with stream=true"
            raise InvalidRequest(message, "stream_options")
        if delivery.stream_options.include_obfuscation:
            raise unsupported("stream_options.include_obfuscation")
    for i, name in enumerate(form.include or ()):
        if name not in INCLUDABLE:
            message = f"include[{i}]: {name[:100]!r} is not known: {', '.join(INCLUDABLE)}"
            raise InvalidRequest(message, f"include[{i}]")
    if form.top_logprobs and LOGPROBS not in (form.include or ()):
        raise InvalidRequest(f'top_logprobs needs include ["{LOGPROBS}"]', "top_logprobs")
    if isinstance(request.asked.input, list) and not (
        request.asked.input or request.asked.previous_response_id
    ):
        raise InvalidRequest("input: the list is empty", "input")


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
    request: ResponsesRequest, before: Sequence[Item], items: Sequence[Item]
) -> GenerationRequest:
    """Build the request for an answer. `before`: the conversation so far. `items`: the new items.

    Raises InvalidRequest that names the field.
    """
    asked, form, delivery = request.asked, request.form, request.delivery
    limits, pace = asked.mm_processor_kwargs, asked.media_io_kwargs
    reader = ItemReader(PartDefaults.of(limits, pace, delivery.saccade))
    if asked.instructions is not None:
        reader.instruct(asked.instructions)
    # The conversation: kept turns, then the new items.
    for item in before:
        reader.add_item(item, "previous_response_id")
    single = isinstance(asked.input, str)
    for index, item in enumerate(items):
        reader.add_item(item, "input" if single else f"input[{index}]", "input" if single else "")
    if not (messages := reader.messages):
        raise InvalidRequest("input: there is nothing in it to answer", "input")
    text = form.text or ResponseText()
    tools, computer = _tool_set(form), read_computer(form.tools or (), reader.acted)
    if computer is not None:
        tools, computer = None, replace(computer, beside=tools or ToolSet())
    chat = Chat(
        messages,
        tools,
        effort=form.effort,
        verbosity=text.verbosity,
        variables=asked.chat_template_kwargs or {},
        action_tool=computer,
    )
    # Sampling, in the names of chats.
    sampling = sampling_fields(request.sampling, request.ending)
    if (most := sampling.pop("max_output_tokens", None)) is not None:
        sampling["max_tokens"] = most
    if LOGPROBS in (form.include or ()):
        sampling["logprobs"] = form.top_logprobs or 0
    cache = read_cache_request(
        None,
        delivery.prompt_cache_options,
        delivery.prompt_cache_retention,
        delivery.prompt_cache_diagnostics not in (None, False),
        delivery.prompt_cache_key or "",
    )
    return GenerationRequest(
        chat,
        sampling,
        cache_salt=asked.cache_salt or "",
        silent=silence(sampling, cache.prewarm),
        constraint=_constraint(text.format),
        cache=cache,
        names=_NAMES,
        rules=NO_ANSWER_RULES if request.restraint is None else request.restraint.rules(),
        edit=DropOldest() if asked.truncation == "auto" else None,
    )


def _constraint(text: TextFormat | None) -> OutputConstraint | None:
    if text is None or text.type == "text":
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
    if is_computer(tool):
        return None
    if kind != "function":
        raise InvalidRequest(
            f"{place}.type: {str(kind)[:100]!r} is a tool that this server does not run: only "
            '"function" and "computer" are supported, which your program runs',
            f"{place}.type",
            "unsupported_parameter",
        )
    if unknown := set(tool) - {"type", "name", "description", "parameters", "strict"}:
        name = f"{place}.{sorted(unknown)[0]}"
        if any(tool[key] is not None for key in unknown):
            raise unsupported(name)
    if not isinstance(tool.get("name"), str):
        raise InvalidRequest(
            f"{place}.name: this parameter is required, as a text",
            f"{place}.name",
            "missing_required_parameter",
        )
    return read_function(tool, place)


def _tool_set(form: ResponseForm) -> ToolSet | None:
    if not form.tools and form.tool_choice is None:
        return None
    tools = read_each(form.tools, _tool)
    choice = _tool_choice(form.tool_choice, form.tools or (), tools)
    return ToolSet(tools, choice, form.parallel_tool_calls is not False)


def _tool_choice(
    choice: str | dict[str, Any] | None, given: Sequence[dict[str, Any]], tools: Sequence[Tool]
) -> Any:
    """Convert OpenAI's choice to the form of chats. Raises InvalidRequest that names the field."""
    computer = any(map(is_computer, given))
    if choice is None or choice in ("none", "auto", "required"):
        return choice
    if isinstance(choice, dict):
        kind, name, allowed = choice.get("type"), choice.get("name"), choice.get("tools")
        if kind == "function" and isinstance(name, str):
            return {"type": "function", "function": {"name": name}}
        if computer and is_computer(choice):
            return ACT
        if kind == "allowed_tools" and isinstance(allowed, list):
            offered = {tool.name for tool in tools}
            return _allowed(choice.get("mode"), allowed, offered, computer)
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
        raise InvalidRequest("tool_choice.tools: the list is empty", "tool_choice.tools")
    named: list[dict[str, Any]] = []
    for index, tool in enumerate(allowed):
        match tool:
            case {"type": "function", "name": str(name)} if name in offered:
                named.append({"type": "function", "function": {"name": name}})
            case {"type": _} if computer and is_computer(tool):
                named.append(ACT)
            case _:
                where = f"tool_choice.tools[{index}]"
                raise InvalidRequest(f"{where}: no such tool is offered", where)
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
