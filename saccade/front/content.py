"""What a message is, and what a content part is: OpenAI's, as JSON over HTTP or as Python objects.

Owns the schemas of messages and parts and what becomes of them: `Message`s of texts and
`ImageSource`s. Unknown keys of messages and parts are ignored, for other servers' and SDKs' own
answers carry many when they are sent back; what stands inside `image_url` and `file` decides the
image, and unknown keys there are refused. Knows nothing of templates or of how images are fetched.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from saccade.core.errors import InvalidRequest
from saccade.front.breakpoints import Mark, Marked, read_mark
from saccade.front.fields import UNSEEN, Integer, Positive, Reader
from saccade.media.content import Budget, Detail
from saccade.media.media import FileId, ImageSource, KnownImage, source_from_object
from saccade.text.extent import extent
from saccade.text.offer import NO_TOOLS, Offer

Part = str | ImageSource
"""A piece of a message: text, or an image."""

_LONGEST_NAME = 512
_MOST_CALLS = 256
"""Tool calls of one message."""
_BASE64 = re.compile(r"[A-Za-z0-9+/_-][A-Za-z0-9+/_=\s-]{31,511}")
_BASE64_SEEN = 512
"""Characters from the start of a URL that are looked at to tell bare base64 from a URL."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    `fields` are passed to the template as they are: tool_calls, tool_call_id, name,
    reasoning_content. marks: where its client wants the prompt kept up to. `num_characters`: of its
    text and of its fields.
    """

    role: str
    content: str | tuple[Part, ...] | None
    fields: Mapping[str, Any] = field(default_factory=dict)
    marks: tuple[Mark, ...] = ()
    num_characters: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        texts = (self.content,) if isinstance(self.content, str) else self.content or ()
        size = sum(len(part) for part in texts if isinstance(part, str))
        fields = extent(self.fields).characters if self.fields else 0
        object.__setattr__(self, "num_characters", size + fields)

    @property
    def sources(self) -> tuple[ImageSource, ...]:
        parts = self.content if isinstance(self.content, tuple) else ()
        return tuple(part for part in parts if isinstance(part, ImageSource))

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it; what is None is left out, as they expect."""
        message: dict[str, Any] = {"role": self.role, **self.fields}
        if isinstance(self.content, tuple):
            message["content"] = [
                {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
                for part in self.content
            ]
        elif self.content is not None:
            message["content"] = self.content
        return message


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation to be rendered by the chat template.

    `variables` are the client's own for the template. effort, verbosity, thinks:
    `reasoning_effort`, `verbosity` and `enable_thinking`, which mean what the template makes of
    them. `num_characters`: of all that the template is given; it takes a while to count, so a large
    chat is built beside the event loop.
    """

    messages: tuple[Message, ...]
    offer: Offer = NO_TOOLS
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    effort: str | None = None
    verbosity: str | None = None
    thinks: bool | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    tool_marks: tuple[Mark, ...] = ()
    num_characters: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        messages = sum(message.num_characters for message in self.messages)
        tools = sum(tool.num_characters for tool in self.offer.tools)
        variables = extent(self.variables).characters
        object.__setattr__(self, "num_characters", messages + tools + variables)

    @property
    def sources(self) -> tuple[ImageSource, ...]:
        """In the order in which the template mentions them."""
        return tuple(source for message in self.messages for source in message.sources)

    @property
    def marks(self) -> tuple[Mark, ...]:
        """In order, those of tools first."""
        marks = (
            replace(mark, message=index)
            for index, message in enumerate(self.messages)
            for mark in message.marks
        )
        return (*self.tool_marks, *marks)


# ---- schemas


ImageName = Annotated[str, Meta(min_length=1, max_length=256)]


class Pixels(Struct, kw_only=True):
    """How many pixels an image may have after resizing."""

    min_pixels: Positive | None = None
    max_pixels: Positive | None = None


class ImageWishes(Marked, kw_only=True):
    """The same, beside an image."""

    min_pixels: Positive | None = None
    max_pixels: Positive | None = None


class ImageURL(Pixels, forbid_unknown_fields=True, kw_only=True):
    """Where an image is: a URL, or its bytes in base64.

    detail: low is at most 512 x 512 = 262144 pixels (`LOW_DETAIL_PIXELS`), unless `max_pixels` says
    otherwise; auto, high and original are as many as the model takes.
    format: what the client says of the type, which the bytes themselves decide.
    """

    url: str
    detail: Detail | None = None
    format: str | None = None


class UploadedFile(Pixels, forbid_unknown_fields=True, kw_only=True):
    """An image that was uploaded with POST /v1/files, or one that is inline: `file_data` is a data:
    URL or base64.
    """

    file_id: str | None = None
    file_data: str | None = None
    filename: str | None = None
    detail: Detail | None = None
    format: str | None = None


class TextPart(Marked, tag_field="type", tag="text", kw_only=True):
    """Text within a message."""

    text: str


class InputTextPart(Marked, tag_field="type", tag="input_text", kw_only=True):
    """Text, by its name in the Responses API."""

    text: str


class RefusalPart(Marked, tag_field="type", tag="refusal", kw_only=True):
    """An earlier answer that refused: text to this model."""

    refusal: str


class ImagePart(ImageWishes, tag_field="type", tag="image_url", kw_only=True):
    """An image within a message. Its pixels may be bounded here or beside its URL.

    uuid: a name of the client's for it, under which alone it may come again while it is cached.
    """

    image_url: str | ImageURL | None = None
    uuid: ImageName | None = None


class InputImagePart(ImageWishes, tag_field="type", tag="input_image", kw_only=True):
    """An image, by its name in the Responses API. uuid: as in `ImagePart`."""

    image_url: str | None = None
    file_id: str | None = None
    detail: Detail | None = None
    uuid: ImageName | None = None


class ImageObjectPart(ImageWishes, tag_field="type", tag="image", kw_only=True):
    """An image by URL, or in Python as an object: bytes, a Pillow image, an array, a path."""

    image: Any


class ImageFilePart(ImageWishes, tag_field="type", tag="image_file", kw_only=True):
    """An uploaded image within a message."""

    image_file: UploadedFile


class FilePart(ImageWishes, tag_field="type", tag="file", kw_only=True):
    """An uploaded or inline image within a message, by the name that other APIs have for it."""

    file: UploadedFile


ContentPart = (
    TextPart
    | RefusalPart
    | ImagePart
    | ImageFilePart
    | FilePart
    | ImageObjectPart
    | InputTextPart
    | InputImagePart
)


Name = Annotated[str, Meta(max_length=_LONGEST_NAME)]


class FunctionCall(Struct):
    """A call that the assistant made; `arguments` are JSON text, or the object itself."""

    name: Name
    arguments: str | dict[str, Any] = ""


class ToolCall(Struct):
    """An entry of an assistant message's `tool_calls`."""

    function: FunctionCall
    id: Name | None = None
    type: Literal["function"] = "function"
    index: Integer | None = None


class ChatMessage(Marked, kw_only=True):
    """A message of any role. reasoning: `reasoning_content` by another name, where it is a text."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[str | ContentPart] | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=_MOST_CALLS)] | None = None
    tool_call_id: Name | None = None
    reasoning_content: str | None = None
    reasoning: Any = None


_MESSAGE: Reader[ChatMessage] = Reader(ChatMessage)


class _Content(Struct):
    """A message's or a part's text, still as JSON."""

    content: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()
    reasoning_content: msgspec.Raw = msgspec.Raw()
    reasoning: msgspec.Raw = msgspec.Raw()
    tool_calls: msgspec.Raw = msgspec.Raw()


_CONTENT = msgspec.json.Decoder(_Content)
_PARTS = msgspec.json.Decoder(list[_Content])


class ImageLimits(Struct, forbid_unknown_fields=True, kw_only=True):
    """Bounds for all images of a request that have none of their own (`mm_processor_kwargs`)."""

    min_pixels: Positive | None = None
    max_pixels: Positive | None = None


# ---- messages


def message_from_json(raw: msgspec.Raw, place: str, limits: ImageLimits) -> Message:
    """A message of a request. Raises InvalidRequest that names what is wrong below `place`."""
    try:
        message = _MESSAGE.json(raw, place)
    except InvalidRequest:
        with suppress(msgspec.MsgspecError):  # no JSON, or an integer of thousands of digits
            _name_kinds(msgspec.json.decode(raw), place)
        raise
    return _message(message, place, limits)


def text_bytes(raw: msgspec.Raw) -> int:
    """Bytes of JSON text in a message, images left out. Nothing of it is built. 0 where the message
    is not of the usual form.
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
    """A message as Python has it.

    Parts may also be images themselves (`source_from_object`). Raises as `message_from_json`, and
    ImageError for what is no image.
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
    _name_kinds(fields, place)
    return _message(_MESSAGE.value(fields, place), place, ImageLimits())


def _name_kinds(message: object, place: str) -> None:
    """Raises InvalidRequest that says what to do for the first part that is heard or moves."""
    content = message.get("content") if isinstance(message, dict) else None
    for number, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and (instead := UNSEEN.get(kind)) is not None:
            where = f"{place}.content[{number}]"
            raise InvalidRequest(f"{where}: {instead}", f"{where}.type", "unsupported_parameter")


def _message(message: ChatMessage, place: str, limits: ImageLimits) -> Message:
    if message.role == "tool" and message.tool_call_id is None:
        raise _missing(f"{place}.tool_call_id")
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequest(
            f"{place}.tool_calls: only an assistant message has tool calls", f"{place}.tool_calls"
        )
    reasoning = message.reasoning_content
    if reasoning is None and isinstance(message.reasoning, str):
        reasoning = message.reasoning
    if message.content is None and not (
        message.role == "assistant" and (message.tool_calls or reasoning)
    ):
        raise _missing(f"{place}.content")
    fields = {
        name: value
        for name, value in (
            ("name", message.name),
            ("tool_call_id", message.tool_call_id),
            ("reasoning_content", reasoning),
            ("tool_calls", [_tool_call(call) for call in message.tool_calls or ()] or None),
        )
        if value is not None
    }
    # Chat templates know the role by its older name.
    role = "system" if message.role == "developer" else message.role
    marks = tuple(_marks(message, place))
    if not isinstance(message.content, list):
        return Message(role, message.content, fields, marks)
    parts = enumerate(message.content)
    content = tuple(_part(part, f"{place}.content[{i}]", limits) for i, part in parts)
    return Message(role, content, fields, marks)


def _marks(message: ChatMessage, place: str) -> Iterator[Mark]:
    """Those of the parts, then the message's own."""
    for number, part in enumerate(message.content if isinstance(message.content, list) else ()):
        if not isinstance(part, str):
            mark = read_mark(part, f"{place}.content[{number}]", number)
            if mark is not None:
                yield mark
    if (own := read_mark(message, place)) is not None:
        yield own


def _part(part: str | ContentPart, place: str, limits: ImageLimits) -> Part:
    match part:
        case str():
            return part
        case TextPart(text=text) | InputTextPart(text=text) | RefusalPart(refusal=text):
            return text
        case ImagePart(image_url=str(url)):
            budget = _budget(None, part, place, limits)
            return ImageSource(_url(url), place, budget, part.uuid or "")
        case ImagePart(image_url=ImageURL() as image):
            budget = _budget(image, part, place, limits)
            return ImageSource(_url(image.url), place, budget, part.uuid or "")
        case ImagePart(image_url=None, uuid=str(uuid)):
            return ImageSource(KnownImage(uuid), place, _budget(None, part, place, limits))
        case ImagePart():
            raise _missing(f"{place}.image_url")
        case ImageObjectPart(image=str(url)):
            return ImageSource(_url(url), place, _budget(None, part, place, limits))
        case ImageObjectPart(image=image):
            source = source_from_object(image, place)
            return ImageSource(source.url, place, _budget(None, part, place, limits))
        case InputImagePart():
            budget = _budget(UploadedFile(detail=part.detail), part, place, limits)
            if part.uuid is not None and part.file_id is None and part.image_url is None:
                return ImageSource(KnownImage(part.uuid), place, budget)
            source_of = _either(part.file_id, part.image_url, place, "file_id", "image_url")
            return ImageSource(source_of, place, budget, part.uuid or "")
        case ImageFilePart(image_file=file):
            path = f"{place}.image_file"
        case FilePart(file=file):
            path = f"{place}.file"
    source_of = _either(file.file_id, file.file_data, path, "file_id", "file_data")
    return ImageSource(source_of, place, _budget(file, part, place, limits))


def _either(file_id: str | None, url: str | None, place: str, *names: str) -> str | FileId:
    if file_id is not None and url is not None:
        raise InvalidRequest(f"{place}: {names[0]} and {names[1]} exclude each other", place)
    if file_id is not None:
        return FileId(file_id)
    if url is not None:
        return _url(url)
    raise _missing(f"{place}.{names[0]}")


def _url(given: str) -> str:
    """A URL, without the spaces around it; base64 without one becomes a data: URL."""
    given = given.strip()
    bare = _BASE64.fullmatch(given[:_BASE64_SEEN]) is not None
    return f"data:;base64,{given}" if bare else given


def _budget(
    inside: ImageURL | UploadedFile | None, beside: ImageWishes, place: str, limits: ImageLimits
) -> Budget:
    """A part's wishes for its size, which may stand in two places, but not differ; else the
    request's.
    """

    def either(name: str, one: int | None, other: int | None, default: int | None) -> int | None:
        if one is not None and other is not None and one != other:
            raise InvalidRequest(
                f"{place}: {name} is given twice, as {one} and as {other}", f"{place}.{name}"
            )
        own = other if one is None else one
        return default if own is None else own

    within = inside or UploadedFile()
    least = either("min_pixels", within.min_pixels, beside.min_pixels, limits.min_pixels)
    most = either("max_pixels", within.max_pixels, beside.max_pixels, limits.max_pixels)
    return Budget(within.detail or "auto", least, most)


def _tool_call(call: ToolCall) -> dict[str, Any]:
    """As templates read it: the arguments as an object, where their text is one."""
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            parsed = msgspec.json.decode(arguments)
            arguments = parsed if isinstance(parsed, dict) else arguments
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass  # a model's own broken call, sent back: the template prints the text
    named = {"id": call.id} if call.id is not None else {}
    return {
        **named,
        "type": call.type,
        "function": {"name": call.function.name, "arguments": arguments},
    }


def _missing(path: str) -> InvalidRequest:
    return InvalidRequest(f"{path}: this parameter is required", path, "missing_required_parameter")
