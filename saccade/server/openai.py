"""OpenAI's request bodies: what is accepted, checked and refused.

Owns the schemas and their translation into an `Ask`. A field that is unknown or unsupported is a
400 that names it; nothing is accepted and ignored that would change the answer. Knows nothing of
tokens, templates or the engine.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, inspect

from saccade.core.errors import InvalidRequest
from saccade.core.types import MAX_LOGPROBS
from saccade.front.intake import Ask, Chat, Message, Part
from saccade.media.content import Budget, Detail
from saccade.media.media import FileId, ImageSource

MAX_CHOICES = 128
"""Answers that one request may ask for: prompts times `n`."""

LONGEST_SALT = 256
"""Characters of a `cache_salt`."""

Positive = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]


class Pixels(Struct, forbid_unknown_fields=True, kw_only=True):
    """How many pixels a picture may have after resizing."""

    min_pixels: Positive | None = None
    max_pixels: Positive | None = None


class ImageURL(Pixels, kw_only=True):
    """Where a picture is.

    detail: low is at most 512 x 512 pixels; auto and high are what the model takes.
    """

    url: str
    detail: Detail = "auto"


class UploadedFile(Pixels, kw_only=True):
    """A picture that was uploaded with POST /v1/files."""

    file_id: str
    detail: Detail = "auto"


class TextPart(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """Text within a message."""

    text: str


class ImagePart(Pixels, tag_field="type", tag="image_url", kw_only=True):
    """A picture within a message. Its pixels may be bounded here or beside its URL."""

    image_url: ImageURL


class ImageFilePart(Pixels, tag_field="type", tag="image_file", kw_only=True):
    """An uploaded picture within a message."""

    image_file: UploadedFile


class FilePart(Pixels, tag_field="type", tag="file", kw_only=True):
    """An uploaded picture within a message, by the name that other APIs have for it."""

    file: UploadedFile


ContentPart = TextPart | ImagePart | ImageFilePart | FilePart


class FunctionCall(Struct, forbid_unknown_fields=True):
    """A call that the assistant made; `arguments` are JSON text."""

    name: str
    arguments: str


class ToolCall(Struct, forbid_unknown_fields=True):
    """An entry of an assistant message's `tool_calls`."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None


class ChatMessage(Struct, forbid_unknown_fields=True):
    """A message of any role.

    The fields typed None are what OpenAI's own answers carry as null when they are sent back.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    annotations: list[Any] | None = None
    function_call: None = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class SaccadeOptions(Struct, forbid_unknown_fields=True):
    """What only this server knows.

    trace: say in the answer where each picture was found, why not sooner, and what it took.
    """

    trace: bool = False


class SamplingFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """How tokens are drawn. None: not given, so the checkpoint's generation_config.json or OpenAI's
    default decides.

    Only types stand here; the bounds are those of `SamplingParams`.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[int, float] | None = None


class EndingFields(SamplingFields, kw_only=True):
    """When an answer ends."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None


class CommonFields(EndingFields, kw_only=True):
    """What both kinds of completion share.

    user, metadata, safety_identifier and prompt_cache_key identify and do not change the answer:
    they are accepted.
    """

    model: str
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Meta(max_length=LONGEST_SALT)] | None = None
    saccade: SaccadeOptions | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def trace(self) -> bool:
        return self.saccade is not None and self.saccade.trace


class ChatCompletionRequest(CommonFields, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[Literal["text"]] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(CommonFields, kw_only=True):
    """The body of POST /v1/completions. Prompts: one or several, as text or as token ids."""

    prompt: str | list[str | int | list[Natural]]
    logprobs: int | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None


R = TypeVar("R", ChatCompletionRequest, CompletionRequest)

_DECODERS: dict[type[Any], msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind) for kind in (ChatCompletionRequest, CompletionRequest)
}
_SCHEMAS = {kind: inspect.type_info(kind) for kind in _DECODERS}
_CHOICE = re.compile(r"Invalid enum value|Invalid value '|Expected `null`,")
_PATH = re.compile(r" - at `(?:key in )?\$\.?(.*?)`$")
_FIELD = re.compile(r"Object (?:contains unknown|missing required) field `(.*?)`")


def parse(body: bytearray, kind: type[R]) -> R:
    """A request from its body, which is emptied. Raises InvalidRequest that names the field."""
    try:
        request: R = _DECODERS[kind].decode(body)
    except msgspec.ValidationError as error:
        raise _explain(str(error), _SCHEMAS[kind]) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from None
    body.clear()  # it may be large, and whoever read it still holds it
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest(
            "stream_options is only allowed together with stream=true", "stream_options"
        )
    return request


class _Sides(Struct):
    """Tells a chat from a text completion."""

    messages: msgspec.Raw | UnsetType = UNSET


def parse_either(body: bytearray) -> ChatCompletionRequest | CompletionRequest:
    """A chat if it has messages, else a text completion. Raises as `parse` does."""
    try:
        chat = msgspec.json.decode(body, type=_Sides).messages is not UNSET
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        chat = True
    return parse(body, ChatCompletionRequest) if chat else parse(body, CompletionRequest)


def _explain(message: str, schema: inspect.Type) -> InvalidRequest:
    """msgspec's words, with the field in `param`, the parameter named first, and what is allowed
    where that is a list.

    A field of which one value is allowed stands for something that this server does not do.
    """
    at = _PATH.search(message)
    text, path = (message[: at.start()], at.group(1).replace("[...]", "")) if at else (message, "")
    field = _FIELD.match(text)
    if field:
        path = f"{path}.{field.group(1)}" if path else field.group(1)
        if "unknown" in text:
            return InvalidRequest(
                f"{path}: this parameter is not supported", path, "unsupported_parameter"
            )
        return InvalidRequest(
            f"{path}: this parameter is required", path, "missing_required_parameter"
        )
    if _CHOICE.match(text):
        choices = _choices(schema, re.findall(r"\w+(?![\]\w])", path)) or [None]
        *most, last = (msgspec.json.encode(choice).decode() for choice in choices)
        allowed = f"{', '.join(most)} or {last}" if most else last
        return InvalidRequest(
            f"{path}: only {allowed} is supported", path, None if most else "unsupported_parameter"
        )
    text = text[:1].lower() + text[1:].replace("`", "")
    return InvalidRequest(f"{path}: {text}" if path else f"the body: {text}", path or None)


def _choices(kind: inspect.Type, names: list[str]) -> list[object]:
    """The values other than null that are allowed at the end of this path of fields, as far as they
    can be listed.
    """
    match kind:
        case inspect.UnionType(types):
            return [choice for each in types for choice in _choices(each, names)]
        case inspect.ListType(item):
            return _choices(item, names)
        case inspect.StructType() if names:
            if kind.tag_field == names[0]:
                return [kind.tag]
            return [
                choice
                for field in kind.fields
                if field.encode_name == names[0]
                for choice in _choices(field.type, names[1:])
            ]
        case inspect.LiteralType(values) if not names:
            return list(values)
    return []


def chat_ask(request: ChatCompletionRequest) -> Ask:
    """What a chat request asks for. Raises InvalidRequest for what the schema alone cannot tell."""
    _check_unsupported(request)
    sampling = _sampling(request)
    if request.max_completion_tokens is not None:
        if request.max_tokens not in (None, request.max_completion_tokens):
            raise InvalidRequest(
                "max_tokens and max_completion_tokens differ: give one of them",
                "max_completion_tokens",
            )
        sampling["max_tokens"] = request.max_completion_tokens
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs=true", "top_logprobs")
    if request.logprobs:
        sampling["logprobs"] = request.top_logprobs or 0
    continues = bool(request.continue_final_message)
    if continues and request.add_generation_prompt:
        raise InvalidRequest(
            "add_generation_prompt and continue_final_message exclude each other",
            "continue_final_message",
        )
    chat = Chat(
        messages=tuple(
            _message(message, f"messages[{i}]") for i, message in enumerate(request.messages)
        ),
        tools=None if request.tool_choice == "none" or not request.tools else tuple(request.tools),
        add_generation_prompt=not continues and request.add_generation_prompt is not False,
        continue_final_message=continues,
        variables=request.chat_template_kwargs or {},
    )
    return Ask(
        prompt=chat, sampling=sampling, n=request.n or 1, cache_salt=request.cache_salt or ""
    )


def completion_asks(request: CompletionRequest) -> list[Ask]:
    """What a completion request asks for, one per prompt."""
    sampling = _sampling(request)
    sampling.setdefault("max_tokens", 16)  # OpenAI's default here
    if request.logprobs is not None:
        sampling["logprobs"] = request.logprobs
    prompts = _prompts(request.prompt)
    n = request.n or 1
    if len(prompts) * n > MAX_CHOICES:
        raise InvalidRequest(
            f"prompt: {len(prompts)} prompts times n={n} are more than {MAX_CHOICES} answers",
            "prompt",
        )
    return [
        Ask(prompt=prompt, sampling=sampling, n=n, cache_salt=request.cache_salt or "")
        for prompt in prompts
    ]


def _prompts(prompt: str | list[str | int | list[int]]) -> list[str | tuple[int, ...]]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt: the list is empty", "prompt")
    tokens = tuple(each for each in prompt if isinstance(each, int))
    if tokens:
        if len(tokens) != len(prompt):
            raise InvalidRequest("prompt: token ids and texts are mixed in one list", "prompt")
        return [tokens]
    return [
        each if isinstance(each, str) else tuple(each)
        for each in prompt
        if not isinstance(each, int)
    ]


def _sampling(request: EndingFields) -> dict[str, Any]:
    """The `SamplingParams` fields that the request sets."""
    names = (
        "max_tokens",
        "min_tokens",
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    )
    given = {
        name: value
        for name in (*names, "top_k", "seed", "ignore_eos")
        if (value := getattr(request, name)) is not None
    }
    if request.logit_bias:
        given["logit_bias"] = tuple(sorted(request.logit_bias.items()))
    if request.stop_token_ids:
        given["stop_token_ids"] = tuple(request.stop_token_ids)
    if request.stop is not None:
        given["stop"] = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    return given


def _message(message: ChatMessage, path: str) -> Message:
    """A message as the intake takes it. `path` names it in errors."""
    if message.role == "tool" and message.tool_call_id is None:
        raise InvalidRequest(
            f"{path}.tool_call_id: this parameter is required",
            f"{path}.tool_call_id",
            "missing_required_parameter",
        )
    if message.tool_calls is not None and message.role != "assistant":
        raise InvalidRequest(
            f"{path}.tool_calls: only an assistant message has tool calls", f"{path}.tool_calls"
        )
    if message.content is None and not (
        message.role == "assistant" and (message.tool_calls or message.reasoning_content)
    ):
        raise InvalidRequest(
            f"{path}.content: this parameter is required",
            f"{path}.content",
            "missing_required_parameter",
        )
    fields = {
        name: value
        for name in ("name", "tool_call_id", "reasoning_content")
        if (value := getattr(message, name)) is not None
    }
    if message.tool_calls:
        fields["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    # Chat templates know the role by its older name.
    role = "system" if message.role == "developer" else message.role
    content: str | tuple[Part, ...] | None
    if isinstance(message.content, list):
        content = tuple(
            _part(part, f"{path}.content[{i}]") for i, part in enumerate(message.content)
        )
    else:
        content = message.content
    return Message(role, content, fields)


def _part(part: ContentPart, path: str) -> Part:
    match part:
        case TextPart(text=text):
            return text
        case ImagePart(image_url=image):
            return ImageSource(image.url, path, _budget(image, part, path))
        case ImageFilePart(image_file=file) | FilePart(file=file):
            return ImageSource(FileId(file.file_id), path, _budget(file, part, path))


def _budget(inside: ImageURL | UploadedFile, beside: Pixels, path: str) -> Budget:
    """A part's wishes for its size, which may stand in two places, but not differ."""

    def either(name: str, one: int | None, other: int | None) -> int | None:
        if one is not None and other is not None and one != other:
            raise InvalidRequest(
                f"{path}: {name} is given twice, as {one} and as {other}", f"{path}.{name}"
            )
        return other if one is None else one

    least = either("min_pixels", inside.min_pixels, beside.min_pixels)
    return Budget(inside.detail, least, either("max_pixels", inside.max_pixels, beside.max_pixels))


def _tool_call(call: ToolCall) -> dict[str, Any]:
    """As templates read it: the arguments as an object, where their text is one."""
    arguments: Any = call.function.arguments
    try:
        parsed = msgspec.json.decode(call.function.arguments)
        arguments = parsed if isinstance(parsed, dict) else arguments
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass  # a model's own broken call, sent back: the template prints the text
    named = {"id": call.id} if call.id is not None else {}
    return {
        **named,
        "type": call.type,
        "function": {"name": call.function.name, "arguments": arguments},
    }


def _check_unsupported(request: ChatCompletionRequest) -> None:
    """Refuse what is well-formed but not supported, or only in part."""
    kind = (request.response_format or {"type": "text"}).get("type")
    if kind != "text":
        raise InvalidRequest(
            f'response_format: type {kind!r} is not supported, only "text"',
            "response_format",
            "unsupported_parameter",
        )
    if request.tool_choice not in (None, "none", "auto"):
        message = 'tool_choice: forced tool calls are not supported; use "auto" or "none"'
        raise InvalidRequest(message, "tool_choice", "unsupported_parameter")
    for i, tool in enumerate(request.tools or ()):
        function = tool.get("function")
        if (
            tool.get("type") != "function"
            or not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
        ):
            raise InvalidRequest(
                f'tools[{i}]: expected {{"type": "function", "function": {{"name": ...}}}}',
                f"tools[{i}]",
            )
