"""Anthropic's requests in OpenAI's words.

Owns the translation of a body into a chat body, which passes through the same checks as any other,
and the way back for what those refuse: the places of a chat body in the client's own. Knows nothing
of routes, of answers or of what a cache mark does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from saccade.api.messages.fields import (
    Base64Source,
    Block,
    CountTokensRequest,
    DocumentBlock,
    FileSource,
    ImageBlock,
    InputMessage,
    Inquiry,
    MessagesRequest,
    PlainSource,
    RedactedBlock,
    Shown,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolDefinition,
    ToolKind,
    ToolResultBlock,
    ToolUseBlock,
    URLSource,
)
from saccade.core.errors import InvalidRequest
from saccade.front.breakpoints import CacheControl
from saccade.front.fields import Reader
from saccade.front.intake import too_long

_ATTRIBUTION = "x-anthropic-billing-header:"
"""How a system block begins that is for Anthropic's accounts and not for the model. As it differs
from request to request, nothing behind it would ever be found in a cache.
"""

_MESSAGE: Reader[InputMessage] = Reader(InputMessage)
_TOOL: Reader[ToolDefinition] = Reader(ToolDefinition)
_KIND: Reader[ToolKind] = Reader(ToolKind)


@dataclass(frozen=True, slots=True)
class Places:
    """Where the client's body has what stands elsewhere in a chat body."""

    of: Mapping[str, str]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Whatever is refused inside is refused in the client's words."""
        try:
            yield
        except InvalidRequest as error:
            message, param = error.message, error.param
            if param is not None:
                param = self.client_place(param)
                message = message.replace(str(error.param), param)
                if param not in message:  # Anthropic's errors have no other word for the place
                    message = f"{param}: {message}"
            if error.code == "context_length_exceeded":
                message = f"prompt is too long: {message}"  # by which clients know it
            raise type(error)(message, param, error.code) from None

    def client_place(self, place: str) -> str:
        """By the longest beginning of `place` that is known."""
        at = len(place)
        while at > 0:
            if place[:at] in self.of:
                return self.of[place[:at]] + place[at:]
            at = max(place.rfind(".", 0, at), place.rfind("[", 0, at))
        return place


@dataclass(frozen=True, slots=True)
class ChatBody:
    """A request in OpenAI's words: the body of a chat completion, and what that has no word for."""

    body: dict[str, Any]
    places: Places
    eager: frozenset[str]
    """Tools whose input may be shown before it is known to be whole."""

    def encoded(self) -> bytearray:
        """As JSON; a message at a time, for nobody else runs while one is written."""
        messages = [msgspec.Raw(msgspec.json.encode(each)) for each in self.body["messages"]]
        return bytearray(msgspec.json.encode({**self.body, "messages": messages}))


def as_chat(request: CountTokensRequest | MessagesRequest, context_length: int) -> ChatBody:
    """`request` as a chat body. Raises InvalidRequest that names the field."""
    inquiry = request.inquiry
    if inquiry.thread is not None:
        raise InvalidRequest(
            "thread: this server keeps no conversation: send all of its messages",
            "thread",
            "thread_unsupported_request",  # by which the SDK knows to do so
        )
    if (count := len(inquiry.messages)) > context_length:
        raise too_long("messages", f"{count} messages, each of a token at least", context_length)
    writer = _Writer()
    if inquiry.system:
        writer.add_system(inquiry.system)
    for index, raw in enumerate(inquiry.messages):
        place = f"messages[{index}]"
        writer.add(_MESSAGE.json(raw, place), place)
    final = writer.messages[-1]
    if inquiry.cache_control is not None:
        final.setdefault("cache_control", _told(inquiry.cache_control))
    body: dict[str, Any] = {"model": inquiry.model, "messages": writer.messages}
    tools = [_read_tool(raw, f"tools[{i}]") for i, raw in enumerate(inquiry.tools or ())]
    for index in range(len(tools)):
        writer.places[f"tools[{index}].function"] = f"tools[{index}]"
        writer.places[f"tools[{index}].function.parameters"] = f"tools[{index}].input_schema"
    body |= _tool_fields(inquiry.tool_choice, tools)
    body |= _output_fields(inquiry)
    if final["role"] == "assistant" and "tool_calls" not in final:
        body["continue_final_message"] = True
        body["add_generation_prompt"] = False
    if isinstance(request, MessagesRequest):
        body |= _sampling_fields(request)
        if request.sender.diagnostics is not None:
            body["prompt_cache_diagnostics"] = True
    eager = frozenset(tool.name for tool in tools if tool.eager_input_streaming)
    return ChatBody(body, Places({**_FIELDS, **writer.places}), eager)


_FIELDS = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "chat_template_kwargs": "thinking",
    "tool_choice.function": "tool_choice",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
}
"""What is called otherwise in a chat body."""


def _output_fields(inquiry: Inquiry) -> dict[str, Any]:
    """How the model is to answer."""
    fields: dict[str, Any] = {}
    if inquiry.thinking is not None:
        thinks = inquiry.thinking.type != "disabled"
        fields["chat_template_kwargs"] = {"enable_thinking": thinks}
    config = inquiry.output_config
    wanted = inquiry.output_format if config is None or config.format is None else config.format
    if wanted is not None:
        schema = {"name": "output", "schema": wanted.schema, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def _sampling_fields(request: MessagesRequest) -> dict[str, Any]:
    drawing, metadata = request.drawing, request.sender.metadata
    given: dict[str, Any] = {
        "max_completion_tokens": max(1, drawing.max_tokens),
        "stop": drawing.stop_sequences or None,
        "temperature": drawing.temperature,
        "top_k": drawing.top_k,
        "top_p": drawing.top_p,
        "stream": drawing.stream,
    }
    if metadata is not None:
        given["user"] = metadata.user_id
    return {name: value for name, value in given.items() if value is not None}


def _read_tool(raw: msgspec.Raw, place: str) -> ToolDefinition:
    kind = _KIND.json(raw, place).type
    if kind not in (None, "custom"):
        path = f"{place}.type"
        raise InvalidRequest(
            f"{path}: {kind[:100]} is a tool of Anthropic's own; this server knows tools with an "
            'input_schema, of type "custom"',
            path,
            "unsupported_parameter",
        )
    return _TOOL.json(raw, place)


def _tool_fields(choice: ToolChoice | None, tools: list[ToolDefinition]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if tools:
        fields["tools"] = [_tool(tool) for tool in tools]
    if choice is None:
        return fields
    if (choice.type == "tool") != (choice.name is not None):
        raise InvalidRequest(
            'tool_choice.name: stands with type "tool", and only there', "tool_choice.name"
        )
    named = {"type": "function", "function": {"name": choice.name}}
    fields["tool_choice"] = {"any": "required", "tool": named}.get(choice.type, choice.type)
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


def _tool(tool: ToolDefinition) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function, **_mark(tool.cache_control)}


class _Writer:
    """Chat messages being written, and where the client has them."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: dict[str, str] = {}

    def _begin(self, message: dict[str, Any], place: str) -> dict[str, Any]:
        self.places[f"messages[{len(self.messages)}]"] = place
        self.messages.append(message)
        return message

    def _show(self, block: Shown, parts: list[dict[str, Any]], place: str) -> None:
        """A block as parts of the message begun last."""
        message = f"messages[{len(self.messages) - 1}]"
        for part, below in _parts(block):
            at = f"{message}.content[{len(parts)}]"
            self.places[at] = place + below
            self.places[f"{at}.image_url"] = self.places[f"{at}.file"] = f"{place}{below}.source"
            parts.append(part)
        parts[-1] |= _mark(block.cache_control)

    def add_system(self, system: str | list[TextBlock]) -> None:
        """The system prompt, which comes first."""
        if isinstance(system, str):
            self._begin({"role": "system", "content": system}, "system")
            return
        parts: list[dict[str, Any]] = []
        self._begin({"role": "system", "content": parts}, "system")
        for index, block in enumerate(system):
            if not block.text.startswith(_ATTRIBUTION):
                self._show(block, parts, f"system[{index}]")
        if not parts:
            self.messages.pop()

    def add(self, message: InputMessage, place: str) -> None:
        """A message; results of tools become messages of their own."""
        if isinstance(message.content, str):
            self._begin({"role": message.role, "content": message.content}, place)
        elif message.role == "assistant":
            self._add_answer(message.content, place)
        elif not message.content:
            raise InvalidRequest(f"{place}.content: the list is empty", f"{place}.content")
        else:
            self._add_blocks(message.role, message.content, place)

    def _add_blocks(self, role: str, blocks: list[Block], where: str) -> None:
        parts: list[dict[str, Any]] | None = None
        for index, block in enumerate(blocks):
            place = f"{where}.content[{index}]"
            match block:
                case TextBlock() | ImageBlock() | DocumentBlock():
                    if parts is None:
                        parts = []
                        self._begin({"role": role, "content": parts}, where)
                    self._show(block, parts, place)
                case ToolResultBlock() if role == "user":
                    parts = None
                    self._add_result(block, place)
                case _:
                    raise _misplaced(block, place, role)

    def _add_result(self, block: ToolResultBlock, where: str) -> None:
        parts: list[dict[str, Any]] = []
        message = {"role": "tool", "tool_call_id": block.tool_use_id, "content": parts}
        self._begin(message | _mark(block.cache_control), where)
        if block.is_error:  # templates have no other word for it
            parts.append({"type": "text", "text": "Error: "})
        if isinstance(block.content, str):
            parts.append({"type": "text", "text": block.content})
            return
        for number, part in enumerate(block.content or ()):
            self._show(part, parts, f"{where}.content[{number}]")

    def _add_answer(self, blocks: list[Block], where: str) -> None:
        parts: list[dict[str, Any]] = []
        calls: list[dict[str, Any]] = []
        thoughts: list[str] = []
        message = self._begin({"role": "assistant"}, where)
        for index, block in enumerate(blocks):
            place = f"{where}.content[{index}]"
            match block:
                case TextBlock():
                    self._show(block, parts, place)
                case ToolUseBlock():
                    call = f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}]"
                    self.places[call] = self.places[f"{call}.function"] = place
                    calls.append(_call(block))
                    message |= _mark(block.cache_control)
                case ThinkingBlock():
                    thoughts += [block.thinking] if block.thinking else []
                case RedactedBlock():
                    pass
                case _:
                    raise _misplaced(block, place, "assistant")
        message["content"] = parts or ("" if not calls else None)
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        if calls:
            message["tool_calls"] = calls


def _misplaced(block: Block, where: str, role: str) -> InvalidRequest:
    kind = type(block).__struct_config__.tag
    return InvalidRequest(f"{where}: {kind} does not stand in a message of the {role}", where)


def _call(block: ToolUseBlock) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {
        "id": block.id,
        "type": "function",
        "function": {"name": block.name, "arguments": arguments},
    }


def _told(control: CacheControl) -> dict[str, Any]:
    return {"type": control.type} | ({} if control.ttl is None else {"ttl": control.ttl})


def _mark(control: CacheControl | None) -> dict[str, Any]:
    """The mark, by the same name on parts, messages and tools of a chat."""
    return {} if control is None else {"cache_control": _told(control)}


def _parts(block: Shown) -> list[tuple[dict[str, Any], str]]:
    """The parts that show a block, and where each stands below it."""
    if isinstance(block, TextBlock):
        return [({"type": "text", "text": block.text}, "")]
    if isinstance(block, ImageBlock):
        return [(_image(block), "")]
    heading = "".join(f"{line}\n" for line in (block.title, block.context) if line)
    if isinstance(block.source, PlainSource):
        return [({"type": "text", "text": heading + block.source.data}, ".source.data")]
    content = block.source.content
    if isinstance(content, str):
        return [({"type": "text", "text": heading + content}, ".source.content")]
    parts = [({"type": "text", "text": heading}, ".title")] if heading or not content else []
    for index, each in enumerate(content):
        parts += [(part, f".source.content[{index}]") for part, _ in _parts(each)]
    return parts


def _image(block: ImageBlock) -> dict[str, Any]:
    match block.source:
        case Base64Source(data=data, media_type=kind):
            url = f"data:{kind};base64,{data}"
        case URLSource(url=url):
            pass
        case FileSource(file_id=file_id):
            return {"type": "file", "file": {"file_id": file_id}}
    return {"type": "image_url", "image_url": {"url": url}}
