"""Defines the items of a conversation in POST /v1/responses, and converts them to messages.

The model's text, reasoning and calls in one turn become one message.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from saccade.core.decoders import convert, json_decoder
from saccade.core.errors import InvalidRequest
from saccade.front.breakpoints import Mark, loose_mark
from saccade.front.content import (
    MAX_CALLS,
    MAX_NAME,
)
from saccade.front.conversation import Message, MessageText, Part, tool_call
from saccade.front.extras import extras_of
from saccade.front.fields import FrameCount, Positive, Reader, image_address, image_url
from saccade.front.image_parts import Corners, DigestName, InputImagePart, read_image, region_of
from saccade.front.part_defaults import PageNumber, PartDefaults
from saccade.front.unread_fields import AnyFields, IgnoredFields, UnsupportedFields
from saccade.front.video_parts import VIDEO_OPTIONS, InputVideoPart, Rate, read_video
from saccade.media.content import Detail
from saccade.media.sources.source import Address, SentFile
from saccade.plugins.computer.action_tool import PastAction, PastActions
from saccade.plugins.responses.computer import WORDS, read_actions
from saccade.plugins.responses.other_items import translate

MAX_ID = 256
"""Maximum characters of an ID that a client has chosen."""


class SparseItem(UnsupportedFields, omit_defaults=True, kw_only=True):
    """Base of items and of text contents. Fields with default values are not stored."""


class SparseMedia(IgnoredFields, omit_defaults=True, kw_only=True):
    """Base of images, videos and files. Unknown fields and default values are not stored."""


Id = Annotated[str, Meta(max_length=MAX_ID)]
Status = Literal["in_progress", "completed", "incomplete"]


class TextContent(SparseItem, tag_field="type", tag="input_text"):
    """Text for the model."""

    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = None


class PlainContent(SparseItem, tag_field="type", tag="text"):
    """Text, by its type in chats."""

    text: str


class OutputTextContent(AnyFields, tag_field="type", tag="output_text"):
    """Text that the model wrote."""

    text: str
    annotations: list[Any] = msgspec.field(default_factory=list)
    """Accepted and ignored."""


class RefusalContent(AnyFields, tag_field="type", tag="refusal"):
    """The model's text when it refuses."""

    refusal: str


class ThoughtContent(SparseItem, tag_field="type", tag="reasoning_text"):
    """Text from the model's reasoning."""

    text: str


class SummaryContent(SparseItem, tag_field="type", tag="summary_text"):
    """A summary of reasoning."""

    text: str


class ImageContent(SparseMedia, tag_field="type", tag="input_image", kw_only=True):
    """An image: a URL (also data:), an uploaded file, or the digest of bytes sent before."""

    image_url: str | None = None
    file_id: Id | None = None
    digest: DigestName | None = None
    detail: Detail | None = None
    min_pixels: Positive | None = None
    max_pixels: Positive | None = None
    region: Corners | None = None
    uuid: Id | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


class FileContent(SparseMedia, tag_field="type", tag="input_file", kw_only=True):
    """A file: a PDF, or an image."""

    file_id: Id | None = None
    file_data: str | None = None
    file_url: str | None = None
    digest: DigestName | None = None
    filename: str | None = None
    detail: Detail | None = None
    min_pixels: Positive | None = None
    max_pixels: Positive | None = None
    page: PageNumber | None = None
    region: Corners | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


class VideoContent(SparseMedia, tag_field="type", tag="input_video", kw_only=True):
    """A video: a URL (also data:), or an uploaded file. The other fields are the same as in a
    chat's `input_video`.
    """

    video_url: str | None = None
    file_id: Id | None = None
    fps: Rate | None = None
    num_frames: FrameCount | None = None
    max_frames: Positive | None = None
    min_pixels: Positive | None = None
    max_pixels: Positive | None = None
    total_pixels: Positive | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


Given = TextContent | PlainContent | ImageContent | FileContent | VideoContent
Content = Given | OutputTextContent | RefusalContent


class MessageItem(SparseItem, tag_field="type", tag="message", kw_only=True):
    """A message of any role."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Content]
    id: Id | None = None
    status: Status | None = None


class CallItem(SparseItem, tag_field="type", tag="function_call", kw_only=True):
    """A call by the model."""

    call_id: Id
    name: str
    arguments: str
    id: Id | None = None
    status: Status | None = None


class ResultItem(SparseItem, tag_field="type", tag="function_call_output", kw_only=True):
    """The output of the client's function: text, images, or both."""

    call_id: Id
    output: str | list[Given]
    """The function's output: a string, or parts with text and images."""
    id: Id | None = None
    status: Status | None = None


class SafetyCheck(AnyFields, omit_defaults=True):
    """A safety check requested by another server. This server requests none."""

    id: Id
    code: str | None = None
    message: str | None = None


class ComputerCallItem(SparseItem, tag_field="type", tag="computer_call", kw_only=True):
    """One or several actions of the model on the client's computer."""

    call_id: Id
    actions: list[dict[str, Any]] | None = None
    """The actions, in order."""
    action: dict[str, Any] | None = None
    """The only action, in calls to computer_use_preview."""
    pending_safety_checks: list[SafetyCheck] = msgspec.field(default_factory=list)
    """Safety checks requested by another server. This server requests none."""
    id: Id | None = None
    status: Status | None = None


class ScreenshotContent(IgnoredFields, tag_field="type", tag="computer_screenshot", kw_only=True):
    """A screenshot: a URL (also data:), or an uploaded file. The other fields are the same as for
    images.
    """

    image_url: str | None = None
    file_id: Id | None = None
    digest: DigestName | None = None
    detail: Detail | None = None
    min_pixels: Positive | None = None
    max_pixels: Positive | None = None
    region: Corners | None = None
    uuid: Id | None = None


class ComputerResultItem(SparseItem, tag_field="type", tag="computer_call_output", kw_only=True):
    """The client's screen after a call."""

    call_id: Id
    output: ScreenshotContent
    """The screen after the last action of the call."""
    acknowledged_safety_checks: list[SafetyCheck] | None = None
    """Accepted and stored."""
    id: Id | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"] | None = None


class ReasoningItem(SparseItem, tag_field="type", tag="reasoning", kw_only=True):
    """The model's reasoning. The `encrypted_content` of another server is accepted, but ignored,
    since it cannot be read.
    """

    summary: list[SummaryContent] = msgspec.field(default_factory=list)
    """Summaries of the reasoning, which are used if there is no content."""
    content: list[ThoughtContent] | None = None
    """The model's reasoning."""
    id: Id | None = None
    status: Status | None = None


class ReferenceItem(SparseItem, tag_field="type", tag="item_reference", kw_only=True):
    """A reference to an item of an earlier response."""

    id: Id
    """The item's id."""


Item = MessageItem | CallItem | ResultItem | ComputerCallItem | ComputerResultItem | ReasoningItem
"""An item of a conversation that can be stored."""

_KINDS: dict[str, Reader[Any]] = {
    "message": Reader(MessageItem),
    "function_call": Reader(CallItem),
    "function_call_output": Reader(ResultItem),
    "computer_call": Reader(ComputerCallItem),
    "computer_call_output": Reader(ComputerResultItem),
    "reasoning": Reader(ReasoningItem),
    "item_reference": Reader(ReferenceItem),
}
_PREFIXES = {
    "message": "msg_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "computer_call": "cu_",
    "computer_call_output": "cuo_",
    "reasoning": "rs_",
}


class _Kind(Struct):
    type: str | None = "message"


_KIND: Reader[_Kind] = Reader(_Kind)
_OTHER: Reader[dict[str, Any]] = Reader(dict[str, Any])
_ITEM: msgspec.json.Decoder[Item] = json_decoder(Item)


def new_id(kind: str) -> str:
    return _PREFIXES[kind] + secrets.token_hex(16)


@dataclass(frozen=True, slots=True)
class PlacedItem:
    """An item of a request, or a packed item from the store.

    place: the item's path in the body.
    where: the path of its content, unless its content is one of its fields.
    """

    item: Item | ReferenceItem | bytes
    place: str
    where: str = ""


def read_items(raw: msgspec.Raw, place: str) -> list[PlacedItem]:
    """Parse an item of a request. The result may be one item, a call and its result, or none.

    Raises InvalidRequest with the path of an error, which is below `place`.
    """
    kind = _KIND.json(raw, place).type or "message"
    if (reader := _KINDS.get(kind)) is not None:
        return [PlacedItem(reader.json(raw, place), place)]
    return [
        PlacedItem(_KINDS[item["type"]].value(item, place), place, where)
        for item, where in translate(_OTHER.json(raw, place), kind, place)
    ]


def pack(item: Item) -> tuple[str, bytes]:
    """Encode an item for the store. Returns its ID, and JSON in which a message's content is a
    list.
    """
    kind = str(type(item).__struct_config__.tag)
    item_id = item.id or new_id(kind)
    return item_id, msgspec.json.encode(_whole(item, item_id))


def unpack(packed: bytes) -> Item:
    """Decode a packed item."""
    return _ITEM.decode(packed)


def pack_output(output: dict[str, Any]) -> tuple[str, bytes]:
    """Encode an item of an answer as `pack` does, without its log-probabilities."""
    return pack(convert(output, Item))


def _whole(item: Item, item_id: str) -> Item:
    found = msgspec.structs.replace(item, id=item_id, status=item.status or "completed")
    match found:
        case MessageItem(content=str(text)):
            found.content = [
                (OutputTextContent if found.role == "assistant" else TextContent)(text)
            ]
        case MessageItem(content=list(content)):
            found.content = [_as_input(each) for each in content]
        case ResultItem(output=list(output)):
            found.output = [_as_input(each) for each in output]
    return found


def _as_input(content: Any) -> Any:
    """Convert a content to the format of the API's input. Clients recognize an image by its
    `detail`.
    """
    if isinstance(content, ImageContent) and content.detail is None:
        return msgspec.structs.replace(content, detail="auto")
    return content


# ---- as messages


@dataclass(slots=True)
class _Turn:
    """Collects the text, reasoning and calls of one turn of the model, which become one message.

    place: the path of the content of the turn's first item.
    """

    place: str
    content: str | tuple[Part, ...] | None = None
    marks: tuple[Mark, ...] = ()
    thoughts: str | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)
    actions: dict[int, PastAction] = field(default_factory=dict)

    def think(self, thoughts: list[str]) -> None:
        if thoughts:
            self.thoughts = "\n".join([*([self.thoughts] if self.thoughts else []), *thoughts])

    def say(self, content: str | Sequence[Content], place: str, defaults: PartDefaults) -> None:
        before = self.content
        added, marks = _content(content, place, defaults)
        if before is None:
            self.content = added
        elif isinstance(before, str) and isinstance(added, str):
            self.content = before + added
        else:
            parts = _listed(before, self.place)
            marks = tuple(replace(each, part=(each.part or 0) + len(parts)) for each in marks)
            self.content = (*parts, *_listed(added, place))
        self.marks += marks

    def call(self, item: CallItem, place: str) -> None:
        if len(self.calls) == MAX_CALLS:
            raise InvalidRequest(f"{place}: a turn may have at most {MAX_CALLS} calls", place)
        if len(item.name) > MAX_NAME:
            where = f"{place}.name"
            raise InvalidRequest(f"{where}: expected at most {MAX_NAME} characters", where)
        self.calls.append(tool_call(item.call_id, item.name, item.arguments))

    def act(self, item: ComputerCallItem, place: str) -> None:
        """Add a call to the computer, as one tool call per action."""
        for past in read_actions(item.action, item.actions, place):
            if len(self.calls) == MAX_CALLS:
                raise InvalidRequest(f"{place}: a turn may have at most {MAX_CALLS} calls", place)
            self.actions[len(self.calls)] = past
            given = WORDS.write(past.action)
            assert given is not None  # `read_actions` has produced it with the same format
            self.calls.append(tool_call(item.call_id, *given))

    def message(self) -> Message:
        fields: dict[str, Any] = {}
        if self.thoughts is not None:
            fields["reasoning_content"] = self.thoughts
        if self.calls:
            fields["tool_calls"] = self.calls
        extras = extras_of(PastActions(self.actions) if self.actions else None)
        return Message("assistant", self.content, fields, self.marks, self.place, extras)


class ItemReader:
    """Converts items to messages. Raises InvalidRequest with the path of an item."""

    def __init__(self, defaults: PartDefaults) -> None:
        """Start without messages.

        defaults: the options of images that do not set them.
        """
        self._messages: list[Message] = []
        self._limits = defaults
        self._turn: _Turn | None = None
        self._thoughts: list[str] = []
        # whether a computer has been called
        self.acted = False

    @property
    def messages(self) -> tuple[Message, ...]:
        turn = () if self._turn is None else (self._turn.message(),)
        return (*self._messages, *turn)

    def instruct(self, instructions: str) -> None:
        """Add the system prompt, which must be first."""
        self._add(Message("system", instructions, place="instructions"))

    def add_item(self, item: Item, place: str, where: str = "") -> None:
        """Add the next item.

        place: the item's path in the body.
        where: the path of its content, unless its content is one of its fields.
        """
        match item:
            case ReasoningItem():
                self._thoughts += [each.text for each in item.content or item.summary]
            case CallItem():
                self._answering(place).call(item, place)
            case ComputerCallItem():
                self.acted = True
                self._answering(place).act(item, place)
            case MessageItem(role="assistant"):
                if self._turn is not None and not self._turn.calls:
                    self._close()
                where = where or f"{place}.content"
                self._answering(place).say(item.content, where, self._limits)
            case MessageItem(role=role):
                where = where or f"{place}.content"
                content, marks = _content(item.content, where, self._limits)
                # Chat templates support only the role's older name.
                role = "system" if role == "developer" else role
                self._add(Message(role, content, marks=marks, place=where))
            case ResultItem():
                where = where or f"{place}.output"
                content, marks = _content(item.output, where, self._limits)
                self._add(Message("tool", content, {"tool_call_id": item.call_id}, marks, where))

            case ComputerResultItem(output=shot):
                where = f"{place}.output"
                of_sizes = ("detail", "min_pixels", "max_pixels", "region")
                names = ("image_url", "file_id", "digest", *of_sizes)
                given = {name: getattr(shot, name) for name in names}
                image = read_image(
                    InputImagePart(**given, uuid=shot.uuid or None), where, self._limits
                )
                fields = {"tool_call_id": item.call_id}
                self._add(Message("tool", (image,), fields, place=where))

    def _add(self, message: Message) -> None:
        self._close()
        self._thoughts = []  # reasoning of a turn that has nothing else is dropped
        self._messages.append(message)

    def _close(self) -> None:
        if self._turn is not None:
            self._messages.append(self._turn.message())
            self._turn = None

    def _answering(self, place: str) -> _Turn:
        if self._turn is None:
            self._turn = _Turn(f"{place}.content")
        self._turn.think(self._thoughts)
        self._thoughts = []
        return self._turn


def _listed(content: str | tuple[Part, ...], place: str) -> tuple[Part, ...]:
    return (MessageText(content, place),) if isinstance(content, str) else content


def _content(
    content: str | Sequence[Content], where: str, defaults: PartDefaults
) -> tuple[str | tuple[Part, ...], tuple[Mark, ...]]:
    """Convert a content, and return it with its cache breakpoints. Text that only the model has
    written becomes one string, as in the original turn.
    """
    if isinstance(content, str):
        return content, ()
    if content and all(isinstance(each, OutputTextContent | RefusalContent) for each in content):
        said = (
            each.text if isinstance(each, OutputTextContent) else each.refusal
            for each in content
            if isinstance(each, OutputTextContent | RefusalContent)
        )
        return "".join(said), ()
    parts = tuple(_part(each, f"{where}[{i}]", defaults) for i, each in enumerate(content))
    marks = (
        loose_mark({"prompt_cache_breakpoint": each.prompt_cache_breakpoint}, f"{where}[{i}]", i)
        for i, each in enumerate(content)
        if isinstance(each, TextContent | ImageContent | VideoContent | FileContent)
        and each.prompt_cache_breakpoint is not None
    )
    return parts, tuple(mark for mark in marks if mark is not None)


def _part(content: Content, place: str, defaults: PartDefaults) -> Part:
    match content:
        case RefusalContent(refusal=text):
            return MessageText(text, place)
        case PlainContent(text=text) | OutputTextContent(text=text) | TextContent(text=text):
            return MessageText(text, place)
        case VideoContent():
            fields = {
                name: getattr(content, name) for name in (*VIDEO_OPTIONS, "video_url", "file_id")
            }
            return read_video(InputVideoPart(**fields), place, defaults.video)
        case FileContent():
            budget = defaults.budget(content.detail, content.min_pixels, content.max_pixels)
            heading = f"{content.filename}\n" if content.filename else ""
            region = None if content.region is None else region_of(content.region, place)
            if content.file_url is not None:
                found: Address = image_url(content.file_url)
            else:
                given = content.digest, content.file_id, content.file_data
                found = image_address(*given, place, "file_id", "file_data")
            return SentFile(found, place, budget, heading, defaults.view, content.page, region)
        case ImageContent():
            image = InputImagePart(
                image_url=content.image_url,
                file_id=content.file_id,
                digest=content.digest,
                region=content.region,
                uuid=content.uuid or None,
                detail=content.detail,
                min_pixels=content.min_pixels,
                max_pixels=content.max_pixels,
            )
            return read_image(image, place, defaults)
