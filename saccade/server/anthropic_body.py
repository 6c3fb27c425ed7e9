"""Anthropic's request bodies (POST /v1/messages) in OpenAI's words.

Owns the schemas and their translation into a chat body, which passes through the same checks as
any other, and the places that the client marks for caching. Knows nothing of routes, of answers or
of what a mark does.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from saccade.core.errors import InvalidRequest
from saccade.server.form import Form

_SECONDS = {"5m": 300, "30m": 1800, "1h": 3600, "12h": 43_200}
Positive = Annotated[int, Meta(ge=1)]


class CacheControl(Struct, forbid_unknown_fields=True):
    """A mark: what stands up to here will be asked about again within `ttl`."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "30m", "1h", "12h"] = "5m"


class Marked(Struct, forbid_unknown_fields=True, kw_only=True):
    """A block that may carry a mark."""

    cache_control: CacheControl | None = None


class TextBlock(Marked, tag_field="type", tag="text", kw_only=True):
    """Text."""

    text: str
    citations: list[Any] | None = None


class Base64Source(Struct, tag_field="type", tag="base64", forbid_unknown_fields=True):
    """The bytes of a picture."""

    data: str
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]


class URLSource(Struct, tag_field="type", tag="url", forbid_unknown_fields=True):
    """Where a picture is."""

    url: str


class FileSource(Struct, tag_field="type", tag="file", forbid_unknown_fields=True):
    """A picture that was uploaded."""

    file_id: str


class Transformations(Struct, forbid_unknown_fields=True):
    """What is done to a picture that is too large."""

    oversized_image: Literal["downsize"] | None = None


class ImageBlock(Marked, tag_field="type", tag="image", kw_only=True):
    """A picture."""

    source: Base64Source | URLSource | FileSource
    transformations: Transformations | None = None


class ThinkingBlock(Struct, tag_field="type", tag="thinking", forbid_unknown_fields=True):
    """Reasoning of an earlier answer."""

    thinking: str
    signature: str = ""


class RedactedBlock(Struct, tag_field="type", tag="redacted_thinking", forbid_unknown_fields=True):
    """Reasoning that nobody but its maker can read: accepted, and left out."""

    data: str


class ToolUseBlock(Marked, tag_field="type", tag="tool_use", kw_only=True):
    """A call of an earlier answer."""

    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None
    toolset_name: str | None = None


class ToolResultBlock(Marked, tag_field="type", tag="tool_result", kw_only=True):
    """What a tool answered: text, pictures, or both."""

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock] | None = None
    is_error: bool | None = None
    toolset_name: str | None = None


Block = TextBlock | ImageBlock | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock


class InputMessage(Struct, forbid_unknown_fields=True):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolDefinition(Marked, kw_only=True):
    """A tool that the client runs. eager_input_streaming: as its input comes, before it is known to
    be whole.
    """

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None


class ToolChoice(Struct, forbid_unknown_fields=True):
    """Whether tools may be called, must be, or which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Struct, forbid_unknown_fields=True):
    """Whether the model reasons before it answers. budget_tokens: a hint."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Positive | None = None
    display: Literal["summarized"] | None = None


class OutputFormat(Struct, forbid_unknown_fields=True):
    """What the answer must be."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, forbid_unknown_fields=True):
    """What the answer must be; effort: a hint."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class Metadata(Struct, forbid_unknown_fields=True):
    """Who asks."""

    user_id: str | None = None


class Diagnostics(Struct, forbid_unknown_fields=True):
    """Asks why the cache missed what the message before had."""

    previous_message_id: str | None = None


class Inquiry(Struct, kw_only=True):
    """What is asked of whom."""

    model: str
    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None


class Drawing(Struct, kw_only=True):
    """How the answer is drawn, and where it ends."""

    max_tokens: Positive
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    stream: bool | None = None


class Sender(Struct, kw_only=True):
    """Who asks, and on what terms. Nothing of it changes the answer."""

    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    diagnostics: Diagnostics | None = None


@dataclass(frozen=True, slots=True)
class CountTokensRequest:
    """The body of POST /v1/messages/count_tokens."""

    inquiry: Inquiry


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """The body of POST /v1/messages."""

    inquiry: Inquiry
    drawing: Drawing
    sender: Sender


COUNT_TOKENS = Form(CountTokensRequest, {}, frozenset())
MESSAGES = Form(MessagesRequest, {}, frozenset())


@dataclass(frozen=True, slots=True)
class CacheMark:
    """The client expects to ask again about everything up to a part.

    message, part: indices into the translated chat body; no message: up to the tools; no part: up
    to the end of the message. seconds: for how long. param: the mark, as the client wrote it.
    """

    message: int | None
    part: int | None
    seconds: int
    param: str


@dataclass(frozen=True, slots=True)
class ChatBody:
    """A request in OpenAI's words: the body of a chat completion, and what that has no word for."""

    body: dict[str, Any]
    marks: tuple[CacheMark, ...]
    eager: frozenset[str]
    """Tools whose input is to be streamed before it is known to be whole."""


def as_chat(request: CountTokensRequest | MessagesRequest) -> ChatBody:
    """`request` as a chat body. Raises InvalidRequest that names the field."""
    inquiry = request.inquiry
    writer = _Writer()
    for index, tool in enumerate(inquiry.tools or ()):
        writer.mark(tool.cache_control, None, None, f"tools[{index}]")
    if inquiry.system:
        writer.add_system(inquiry.system)
    for index, message in enumerate(inquiry.messages):
        writer.add(message, f"messages[{index}]")
    last = len(writer.messages) - 1
    writer.mark(inquiry.cache_control, last, None, "")
    body: dict[str, Any] = {"model": inquiry.model, "messages": writer.messages}
    body |= _tool_fields(inquiry)
    if inquiry.thinking is not None:
        thinks = inquiry.thinking.type != "disabled"
        body["chat_template_kwargs"] = {"enable_thinking": thinks}
    if inquiry.output_config is not None and inquiry.output_config.format is not None:
        schema = {"name": "output", "schema": inquiry.output_config.format.schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    final = writer.messages[-1]
    if final["role"] == "assistant" and "tool_calls" not in final:
        body["continue_final_message"] = True
        body["add_generation_prompt"] = False
    if isinstance(request, MessagesRequest):
        body |= _sampling_fields(request)
    eager = frozenset(tool.name for tool in inquiry.tools or () if tool.eager_input_streaming)
    return ChatBody(body, tuple(writer.marks), eager)


def _sampling_fields(request: MessagesRequest) -> dict[str, Any]:
    drawing, metadata = request.drawing, request.sender.metadata
    given: dict[str, Any] = {
        "max_completion_tokens": drawing.max_tokens,
        "stop": drawing.stop_sequences or None,
        "temperature": drawing.temperature,
        "top_k": drawing.top_k,
        "top_p": drawing.top_p,
        "stream": drawing.stream,
        "stream_options": {"include_usage": True} if drawing.stream else None,
    }
    if metadata is not None:
        given["user"] = metadata.user_id
    return {name: value for name, value in given.items() if value is not None}


def _tool_fields(inquiry: Inquiry) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if inquiry.tools:
        fields["tools"] = [_tool(tool) for tool in inquiry.tools]
    choice = inquiry.tool_choice
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
    return {"type": "function", "function": function}


class _Writer:
    """Chat messages being written, and the marks in them."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.marks: list[CacheMark] = []

    def mark(
        self, control: CacheControl | None, message: int | None, part: int | None, where: str
    ) -> None:
        """Keep a mark of the block at `where`."""
        if control is not None:
            param = f"{where}.cache_control" if where else "cache_control"
            self.marks.append(CacheMark(message, part, _SECONDS[control.ttl], param))

    def add_system(self, system: str | list[TextBlock]) -> None:
        """The system prompt, which comes first."""
        content: Any = system
        if not isinstance(system, str):
            content = [_part(block) for block in system]
            for index, block in enumerate(system):
                self.mark(block.cache_control, 0, index, f"system[{index}]")
        self.messages.append({"role": "system", "content": content})

    def add(self, message: InputMessage, where: str) -> None:
        """A message; results of tools become messages of their own."""
        if isinstance(message.content, str):
            self.messages.append({"role": message.role, "content": message.content})
        elif not message.content:
            raise InvalidRequest(f"{where}.content: the list is empty", f"{where}.content")
        elif message.role == "assistant":
            self._add_answer(message.content, where)
        else:
            self._add_blocks(message.role, message.content, where)

    def _add_blocks(self, role: str, blocks: list[Block], where: str) -> None:
        parts: list[dict[str, Any]] | None = None
        for index, block in enumerate(blocks):
            place = f"{where}.content[{index}]"
            match block:
                case TextBlock() | ImageBlock():
                    if parts is None:
                        parts = []
                        self.messages.append({"role": role, "content": parts})
                    parts.append(_part(block))
                    at = len(self.messages) - 1, len(parts) - 1
                    self.mark(block.cache_control, *at, place)
                case ToolResultBlock() if role == "user":
                    parts = None
                    self._add_result(block, place)
                case _:
                    raise _misplaced(block, place, role)

    def _add_result(self, block: ToolResultBlock, where: str) -> None:
        content = block.content
        parts = (
            [{"type": "text", "text": content}]
            if isinstance(content, str)
            else [_part(part) for part in content or ()]
        )
        if block.is_error:  # templates have no other word for it
            parts.insert(0, {"type": "text", "text": "Error: "})
        index = len(self.messages)
        self.messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": parts})
        for number, part in enumerate(content if isinstance(content, list) else ()):
            at = number + bool(block.is_error)
            self.mark(part.cache_control, index, at, f"{where}.content[{number}]")
        self.mark(block.cache_control, index, None, where)

    def _add_answer(self, blocks: list[Block], where: str) -> None:
        parts: list[dict[str, Any]] = []
        calls: list[dict[str, Any]] = []
        thoughts: list[str] = []
        for index, block in enumerate(blocks):
            place = f"{where}.content[{index}]"
            match block:
                case TextBlock():
                    parts.append(_part(block))
                    self.mark(block.cache_control, len(self.messages), len(parts) - 1, place)
                case ToolUseBlock():
                    calls.append(_call(block))
                    self.mark(block.cache_control, len(self.messages), None, place)
                case ThinkingBlock():
                    thoughts.append(block.thinking)
                case RedactedBlock():
                    pass
                case _:
                    raise _misplaced(block, place, "assistant")
        message: dict[str, Any] = {
            "role": "assistant",
            "content": parts or ("" if not calls else None),
        }
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        self.messages.append(message)


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


def _part(block: TextBlock | ImageBlock) -> dict[str, Any]:
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    match block.source:
        case Base64Source(data=data, media_type=kind):
            url = f"data:{kind};base64,{data}"
        case URLSource(url=url):
            pass
        case FileSource(file_id=file_id):
            return {"type": "file", "file": {"file_id": file_id}}
    return {"type": "image_url", "image_url": {"url": url}}
