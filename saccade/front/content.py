"""Converts messages and content parts in OpenAI's format, given as JSON or as Python objects.

This module has the schemas of messages and texts, and converts them to `conversation.Message`.
`image_parts.py` and `video_parts.py` have the other parts. `unread_fields.py` has the fields that
are not used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from saccade.core.decoders import json_decoder
from saccade.core.errors import InvalidRequest
from saccade.front.breakpoints import Mark, Marked, MarkedMedia, read_mark
from saccade.front.conversation import Message, MessageText, Part, tool_call
from saccade.front.fields import UNSEEN, Integer, Reader, missing, too_long
from saccade.front.image_parts import (
    FilePart,
    ImageFilePart,
    ImageObjectPart,
    ImagePart,
    InputImagePart,
    read_image,
)
from saccade.front.part_defaults import NO_DEFAULTS, PartDefaults
from saccade.front.unread_fields import AnyFields, Unread
from saccade.front.video_parts import InputVideoPart, VideoPart, VideoURLPart, read_video

MAX_NAME = 512
MAX_CALLS = 256
"""Maximum number of tool calls in one message."""


# ---- schemas


class TextPart(Marked, tag_field="type", tag="text", kw_only=True):
    """A part of a message that contains text."""

    text: str


class InputTextPart(Marked, tag_field="type", tag="input_text", kw_only=True):
    """A text part with the type name of the Responses API."""

    text: str


class RefusalPart(Marked, tag_field="type", tag="refusal", kw_only=True):
    """A part with an earlier refusal of the model, which the model reads as text."""

    refusal: str


ContentPart = (
    VideoURLPart
    | VideoPart
    | InputVideoPart
    | TextPart
    | RefusalPart
    | ImagePart
    | ImageFilePart
    | FilePart
    | ImageObjectPart
    | InputTextPart
    | InputImagePart
)


Name = Annotated[str, Meta(max_length=MAX_NAME)]


class FunctionCall(AnyFields):
    """The function that the assistant has called, and its arguments."""

    name: Name
    arguments: str | dict[str, Any] = ""
    """The function's arguments, as JSON text or as an object."""


class ToolCall(AnyFields):
    """A tool call in an assistant message."""

    function: FunctionCall
    id: Name | None = None
    type: Literal["function"] = "function"
    index: Integer | None = None


class ChatMessage(Marked, kw_only=True):
    """A message of a chat, in any role."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[str | ContentPart] | None = None
    name: Name | None = None
    """The speaker, if several share a role. Templates may show it."""
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_CALLS)] | None = None
    tool_call_id: Name | None = None
    """The call that this message answers."""
    reasoning_content: str | None = None
    reasoning: Any = None
    """reasoning_content under another name, if it is a text."""
    images: (
        list[str | ImagePart]
        | Annotated[str, Meta(max_length=0)]
        | Annotated[dict[str, Any], Meta(max_length=0)]
        | None
    ) = None
    """Images before the content. Each is a URL, base64, or an image_url part."""
    refusal: Any = None  # the text of an answer that has no content
    function_call: Unread = None
    """Must be empty. Use tool_calls."""
    functions: Unread = None
    """Must be empty. Use the request's tools."""
    tools: Unread = None
    """Must be empty. Use the request's tools."""
    partial: Literal[False] | None = None
    """Must be false. Use continue_final_message."""
    prefix: Literal[False] | None = None
    """Must be false. Use continue_final_message."""


_MESSAGE: Reader[ChatMessage] = Reader(ChatMessage)
_PART: Reader[ContentPart] = Reader(ContentPart)


class _Content(Struct):
    content: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()
    reasoning_content: msgspec.Raw = msgspec.Raw()
    reasoning: msgspec.Raw = msgspec.Raw()
    tool_calls: msgspec.Raw = msgspec.Raw()


_CONTENT = json_decoder(_Content)
_PARTS = json_decoder(list[_Content])


_BYTES_PER_TOKEN = 256
"""A message with more bytes of text than this for each token of the context is rejected before it
is decoded.
"""


# ---- messages


def check_lengths(raws: Sequence[msgspec.Raw], context_length: int, param: str) -> None:
    """Raise InvalidRequest if messages (or items) are certain to exceed the context.

    This is checked before any message is decoded. param: the field with the messages.
    """
    if len(raws) > context_length:
        has = f"{len(raws)} entries of {param}, each of a token at least"
        raise too_long(param, has, context_length, True)
    for raw in raws:
        most = _BYTES_PER_TOKEN * context_length
        if len(memoryview(raw)) > most and (size := text_bytes(raw)) > most:
            raise too_long(param, f"{size} bytes of text", context_length, True)


def message_from_json(raw: msgspec.Raw, place: str, defaults: PartDefaults) -> Message:
    """Parse one message of a request. Raises InvalidRequest that names the field below `place`."""
    try:
        message = _MESSAGE.json(raw, place)
    except InvalidRequest as error:
        given = None
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            given = msgspec.json.decode(raw)
        _reject_audio(given, place)
        raise error
    return _message(message, place, defaults)


def text_bytes(raw: msgspec.Raw) -> int:
    """Return the number of bytes of JSON text in a message, without images and without decoding all
    of it.

    Returns 0 for a message of an unexpected form.
    """
    try:
        message = _CONTENT.decode(raw)
        others = (message.reasoning_content, message.reasoning, message.tool_calls)
        size = sum(len(memoryview(each)) for each in others)
        if bytes(memoryview(message.content)[:1]) == b"[":
            parts = _PARTS.decode(message.content)
            return size + sum(len(memoryview(part.text)) for part in parts)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return 0
    return size + len(memoryview(message.content))


def message_from_object(given: Mapping[str, Any], place: str) -> Message:
    """Convert a message that consists of Python objects.

    A part may also be an image itself (see `source_from_object`). Raises InvalidRequest that names
    the field below `place`, and ImageError for an object that is not an image.
    """
    fields = dict(given)
    content = fields.get("content")
    if isinstance(content, list | tuple):
        fields["content"] = [
            part
            if isinstance(part, str)
            else dict(part)
            if isinstance(part, Mapping)
            else {"type": "image", "image": part}
            for part in content
        ]
    _reject_audio(fields, place)
    return _message(_MESSAGE.value(fields, place), place, NO_DEFAULTS)


def image_part(given: object) -> ContentPart:
    """Convert a content part or an image that a Python caller passed. Raises InvalidRequest."""
    if isinstance(given, Mapping):
        return _PART.value(dict(given), "content")
    return ImageObjectPart(image=given)


def read_parts(
    content: str | Sequence[str | ContentPart], place: str, defaults: PartDefaults
) -> tuple[Part, ...]:
    """Convert content that is not in a message, such as an input to embed. Raises InvalidRequest
    that names the field.
    """
    if isinstance(content, str):
        return (MessageText(content, place),)
    return tuple(_part(part, f"{place}[{i}]", defaults) for i, part in enumerate(content))


def _reject_audio(message: object, place: str) -> None:
    """Raise InvalidRequest for the first part with audio, with advice on what to send instead."""
    content = message.get("content") if isinstance(message, dict) else None
    for number, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and (instead := UNSEEN.get(kind)) is not None:
            where = f"{place}.content[{number}]"
            raise InvalidRequest(f"{where}: {instead}", f"{where}.type", "unsupported_parameter")


def _message(message: ChatMessage, place: str, defaults: PartDefaults) -> Message:
    if message.role == "tool" and message.tool_call_id is None:
        raise missing(f"{place}.tool_call_id")
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequest(
            f"{place}.tool_calls: only assistant messages may have tool calls",
            f"{place}.tool_calls",
        )
    reasoning = message.reasoning_content
    if reasoning is None and isinstance(message.reasoning, str):
        reasoning = message.reasoning
    said = message.content
    if said is None and message.role in ("assistant", "tool"):
        said = _missing_content(message, reasoning)
    elif said is None and not message.images:
        raise missing(f"{place}.content")
    fields: dict[str, Any] = {}
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if reasoning is not None:
        fields["reasoning_content"] = reasoning
    if message.tool_calls:
        fields["tool_calls"] = _tool_calls(message.tool_calls)
    # Chat templates use the older name of this role.
    role = "system" if message.role == "developer" else message.role
    where = f"{place}.content"
    images = message.images if isinstance(message.images, list) else ()
    shown = _shown(images, place, defaults) if images else ()
    marks = tuple(_marks(message, place, len(shown)))
    if isinstance(said, list):
        content = [_part(part, f"{where}[{i}]", defaults) for i, part in enumerate(said)]
    elif not shown:
        return Message(role, said, fields, marks, where)
    else:
        content = [MessageText(said, where)] if said else []
    return Message(role, (*shown, *content), fields, marks, where)


def _missing_content(message: ChatMessage, reasoning: str | None) -> str | None:
    """Return the content of a message that has none: its refusal, or "".

    Returns None if the message has tool calls or reasoning instead.
    """
    if message.role == "assistant" and isinstance(message.refusal, str) and message.refusal:
        return message.refusal
    return None if message.tool_calls or reasoning else ""


def _shown(
    images: Sequence[str | ImagePart], place: str, defaults: PartDefaults
) -> tuple[Part, ...]:
    """Convert the field `images` of a message to parts. Each image is a URL, base64, or an
    image_url part.
    """
    parts = (ImagePart(image_url=each) if isinstance(each, str) else each for each in images)
    return tuple(read_image(part, f"{place}.images[{i}]", defaults) for i, part in enumerate(parts))


def _tool_calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    return [tool_call(call.id, call.function.name, call.function.arguments) for call in calls]


def _marks(message: ChatMessage, place: str, before: int) -> Iterator[Mark]:
    """Yield the breakpoints on the parts of a message, then the one on the message itself.

    before: the number of other parts that precede these.
    """
    for number, part in enumerate(message.content if isinstance(message.content, list) else ()):
        if not isinstance(part, str) and _is_marked(part):
            yield read_mark(part, f"{place}.content[{number}]", before + number)
    if _is_marked(message):
        yield read_mark(message, place)


def _is_marked(holder: Marked | MarkedMedia) -> bool:
    return holder.cache_control is not None or holder.prompt_cache_breakpoint is not None


def _part(part: str | ContentPart, place: str, defaults: PartDefaults) -> Part:
    match part:
        case str():
            return MessageText(part, place)
        case VideoURLPart() | VideoPart() | InputVideoPart():
            return read_video(part, place, defaults.video)
        case TextPart(text=text) | InputTextPart(text=text) | RefusalPart(refusal=text):
            return MessageText(text, place)
    return read_image(part, place, defaults)
