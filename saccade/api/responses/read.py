"""The body of POST /v1/responses in OpenAI's chat words.

Owns its fields, what is refused by name, and the translation into the body of a chat completion,
which passes through the same checks as any other; and the way back of a refusal's words. Items are
`items.py`'s. Knows nothing of routes, of stores or of answers.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from saccade.api.body_schema import Form, Neutral
from saccade.api.chat.fields import (
    LONGEST_SALT,
    SERVICE_TIERS,
    Effort,
    SaccadeOptions,
    Sampling,
    Verbosity,
)
from saccade.api.responses.items import Id, Item, ItemWriter, ReferenceItem, read_item
from saccade.core.errors import InvalidRequest, RequestError
from saccade.core.types import MAX_LOGPROBS
from saccade.front.content import ImageLimits
from saccade.front.fields import Integer, Positive, unsupported

MOST_METADATA = 16
LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (
    LOGPROBS,
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
)
"""What `include` may name. Only logprobs change anything: images are always told, reasoning is not
encrypted, and the rest belongs to tools that are refused."""

Name = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=MOST_METADATA),
]


class TextFormat(Struct, forbid_unknown_fields=True):
    """What the answer must be."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseText(Struct, forbid_unknown_fields=True):
    """What the answer must be, and how long; verbosity is a hint to the template."""

    format: TextFormat | None = None
    verbosity: Verbosity | None = None


class ReasoningConfig(Struct):
    """How much the model thinks: effort is a hint to the template, "none" switches thinking off.
    A summary is not made: reasoning is told as it is.
    """

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(Struct, forbid_unknown_fields=True):
    """Options of a stream."""

    include_obfuscation: bool | None = None


class ResponseInput(Struct, kw_only=True):
    """What is asked. An item of `input` is a message, a function's call or output, or reasoning."""

    input: str | list[msgspec.Raw]
    instructions: str | None = None
    previous_response_id: Id | None = None
    cache_salt: Annotated[str, Meta(max_length=LONGEST_SALT)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: ImageLimits | None = None


class ResponseEnding(Struct, kw_only=True):
    """When the answer ends."""

    max_output_tokens: Positive | None = None
    min_tokens: Integer | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Integer] | None = None
    ignore_eos: bool | None = None


class ResponseForm(Struct, kw_only=True):
    """What the answer holds."""

    text: ResponseText | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Positive | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    include: list[str] | None = None
    reasoning: ReasoningConfig | None = None


class ResponseDelivery(Struct, kw_only=True):
    """How the answer comes, whether it is kept, and what is said of who asks."""

    model: str | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    metadata: Metadata | None = None
    user: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_diagnostics: bool | dict[str, Any] | None = None
    saccade: SaccadeOptions | None = None

    @property
    def compared(self) -> str | None:
        """The response that diagnostics of the cache are to compare with."""
        name = (self.prompt_cache_options or {}).get("comparison_response_id")
        return name if isinstance(name, str) else None

    @property
    def trace(self) -> bool:
        return self.saccade is not None and self.saccade.trace


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """The body of POST /v1/responses."""

    asked: ResponseInput
    sampling: Sampling
    ending: ResponseEnding
    form: ResponseForm
    delivery: ResponseDelivery


_NEUTRAL: Neutral = {
    "background": (False,),
    "context_management": ([],),
    "n": (1,),
    "priority": (0,),
    "service_tier": SERVICE_TIERS,
    "truncation": ("disabled",),
}
_IGNORED = frozenset({"request_id"})

RESPONSES: Form[ResponsesRequest] = Form(ResponsesRequest, _NEUTRAL, _IGNORED)


@dataclass(frozen=True, slots=True)
class ResponseInquiry:
    """A body that has been read. `items`: its input, as items."""

    request: ResponsesRequest
    items: tuple[Item | ReferenceItem, ...]


def read_responses(body: bytearray, context_length: int) -> ResponseInquiry:
    """What a body asks for. Raises InvalidRequest that names the field."""
    request = RESPONSES.read(body, context_length)
    _check(request)
    given = request.asked.input
    if isinstance(given, str):
        raw = msgspec.Raw(msgspec.json.encode({"role": "user", "content": given}))
        return ResponseInquiry(request, (read_item(raw, "input"),))
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


@dataclass(frozen=True, slots=True)
class ChatWords:
    """A request as the body of a chat completion, and the way back from its words."""

    body: dict[str, Any]
    places: tuple[tuple[str, str], ...]

    def theirs(self, error: RequestError) -> RequestError:
        """`error` in the words of who asked."""
        found = copy.copy(error)
        found.message = self._theirs(error.message, whole=False)
        found.param = None if error.param is None else self._theirs(error.param, whole=True)
        return found

    def place(self, chat: str) -> str:
        """Where in the client's request a part of a chat's message stands."""
        return self._theirs(chat, whole=True)

    def _theirs(self, text: str, whole: bool) -> str:
        def place(found: re.Match[str]) -> str:
            message, content = self.places[min(int(found[1]), len(self.places) - 1)]
            return content if found[2] else message

        text = _MESSAGE.sub(place, text) if self.places else text
        text = _TOOL.sub(r"\1", text)
        for chat, here in _NAMES:
            begins = text == chat or re.match(rf"{re.escape(chat)}[.:\[ ]", text)
            if begins and (whole or len(chat) < len(text)):
                return here + text[len(chat) :]
        return text


_MESSAGE = re.compile(r"messages\[(\d{1,9})\](\.content)?")
_TOOL = re.compile(r"(tools\[\d+\])\.function\b")
_NAMES = (
    ("messages", "input"),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("max_completion_tokens", "max_output_tokens"),
    ("max_tokens", "max_output_tokens"),
    ("reasoning_effort", "reasoning.effort"),
    ("verbosity", "text.verbosity"),
    ("logprobs", "include"),
)


def as_chat(request: ResponsesRequest, before: Sequence[Item], items: Sequence[Item]) -> ChatWords:
    """`request` as a chat body. `before`: the conversation so far; `items`: what this request adds.

    Raises InvalidRequest that names the field.
    """
    asked, form, delivery = request.asked, request.form, request.delivery
    written = ItemWriter()
    if asked.instructions is not None:
        written.instruct(asked.instructions)
    for item in before:
        written.add(item, "previous_response_id")
    single = isinstance(asked.input, str)
    for index, item in enumerate(items):
        written.add(item, "input" if single else f"input[{index}]")
    if not written.messages:
        raise InvalidRequest("input: there is nothing in it to answer", "input")
    body: dict[str, Any] = {
        "messages": written.messages,
        "model": delivery.model,
        "stream": delivery.stream,
        "saccade": _plain(delivery.saccade),
        "chat_template_kwargs": asked.chat_template_kwargs,
        "mm_processor_kwargs": _plain(asked.mm_processor_kwargs),
        "cache_salt": asked.cache_salt,
        "prompt_cache_key": delivery.prompt_cache_key,
        "prompt_cache_retention": delivery.prompt_cache_retention,
        "prompt_cache_options": delivery.prompt_cache_options,
        "prompt_cache_diagnostics": delivery.prompt_cache_diagnostics,
        **msgspec.structs.asdict(request.sampling),
        **msgspec.structs.asdict(request.ending),
        **_form_fields(form),
    }
    body["max_completion_tokens"] = body.pop("max_output_tokens")
    if LOGPROBS in (form.include or ()):
        body |= {"logprobs": True, "top_logprobs": form.top_logprobs or 0}
    given = {name: value for name, value in body.items() if value is not None}
    return ChatWords(given, tuple(written.places))


def _plain(value: Struct | None) -> dict[str, Any] | None:
    return None if value is None else msgspec.structs.asdict(value)


def _form_fields(form: ResponseForm) -> dict[str, Any]:
    fields: dict[str, Any] = {"parallel_tool_calls": form.parallel_tool_calls}
    if form.tools:
        fields["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(form.tools)]
    if form.tool_choice is not None:
        fields["tool_choice"] = _tool_choice(form.tool_choice)
    if form.text is not None:
        fields["verbosity"] = form.text.verbosity
        fields["response_format"] = _format(form.text.format)
    if form.reasoning is not None:
        fields["reasoning_effort"] = form.reasoning.effort
    return fields


def _format(text: TextFormat | None) -> dict[str, Any] | None:
    if text is None or text.type == "text":
        return None
    if text.type == "json_object":
        return {"type": "json_object"}
    if text.schema is None:
        raise InvalidRequest(
            "text.format.schema: this parameter is required",
            "text.format.schema",
            "missing_required_parameter",
        )
    schema = {name: getattr(text, name) for name in ("name", "description", "schema", "strict")}
    given = {name: value for name, value in schema.items() if value is not None}
    return {"type": "json_schema", "json_schema": given}


def _tool(tool: dict[str, Any], place: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind != "function":
        raise InvalidRequest(
            f"{place}.type: {str(kind)[:100]!r} is a tool that this server does not run: only "
            '"function" is supported, which your program runs',
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
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: str | dict[str, Any]) -> str | dict[str, Any]:
    if isinstance(choice, str):
        return choice
    kind, name = choice.get("type"), choice.get("name")
    if kind == "function" and isinstance(name, str):
        return {"type": "function", "function": {"name": name}}
    tools = choice.get("tools")
    if kind == "allowed_tools" and isinstance(tools, list):
        allowed = [_tool_choice(tool) if isinstance(tool, dict) else tool for tool in tools]
        return {
            "type": "allowed_tools",
            "allowed_tools": {"mode": choice.get("mode"), "tools": allowed},
        }
    raise InvalidRequest(
        'tool_choice: expected "none", "auto", "required", {"type": "function", "name": ...} or '
        '{"type": "allowed_tools", "mode": ..., "tools": [...]}',
        "tool_choice",
        "unsupported_parameter",
    )
