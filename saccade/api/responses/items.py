"""The items of a conversation as POST /v1/responses has them, and what they are in OpenAI's chat
words.

Owns their schemas, and how items become chat messages: what the model said, thought and called in
one turn is one message. Unknown keys are ignored, for answers carry many when they are sent back.
Knows nothing of the rest of a body, of stores or of HTTP.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from saccade.core.errors import InvalidRequest
from saccade.front.fields import Positive, Reader
from saccade.media.content import Detail

LONGEST_ID = 256
"""Characters of an id that a client gives."""

Id = Annotated[str, Meta(max_length=LONGEST_ID)]
Status = Literal["in_progress", "completed", "incomplete"]


class TextContent(Struct, tag_field="type", tag="input_text", omit_defaults=True):
    """Text to the model."""

    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = None


class PlainContent(Struct, tag_field="type", tag="text"):
    """Text, by its name in chats."""

    text: str


class SaidContent(Struct, tag_field="type", tag="output_text"):
    """Text of the model."""

    text: str
    annotations: list[Any] = []


class RefusalContent(Struct, tag_field="type", tag="refusal"):
    """Words with which a model refused."""

    refusal: str


class ThoughtContent(Struct, tag_field="type", tag="reasoning_text"):
    """Text of the model's reasoning."""

    text: str


class SummaryContent(Struct, tag_field="type", tag="summary_text"):
    """What the reasoning came to."""

    text: str


class ImageContent(Struct, tag_field="type", tag="input_image", omit_defaults=True, kw_only=True):
    """An image: a URL (data: too), or an uploaded file."""

    image_url: str | None = None
    file_id: Id | None = None
    detail: Detail | None = None
    min_pixels: Positive | None = None
    max_pixels: Positive | None = None
    uuid: Id | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


class FileContent(Struct, tag_field="type", tag="input_file", omit_defaults=True, kw_only=True):
    """A file, which must be an image."""

    file_id: Id | None = None
    file_data: str | None = None
    file_url: str | None = None
    filename: str | None = None
    detail: Detail | None = None


Given = TextContent | PlainContent | ImageContent | FileContent
Content = Given | SaidContent | RefusalContent


class MessageItem(Struct, tag_field="type", tag="message", omit_defaults=True, kw_only=True):
    """A message of any role."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Content]
    id: Id | None = None
    status: Status | None = None


class CallItem(Struct, tag_field="type", tag="function_call", omit_defaults=True, kw_only=True):
    """A call that the model made."""

    call_id: Id
    name: str
    arguments: str
    id: Id | None = None
    status: Status | None = None


class ResultItem(
    Struct, tag_field="type", tag="function_call_output", omit_defaults=True, kw_only=True
):
    """What the client's function answered: text, images, or both."""

    call_id: Id
    output: str | list[Given]
    id: Id | None = None
    status: Status | None = None


class ReasoningItem(Struct, tag_field="type", tag="reasoning", omit_defaults=True, kw_only=True):
    """What the model thought. `encrypted_content` is another server's, which nobody here can read:
    accepted, and left out.
    """

    summary: list[SummaryContent] = []
    content: list[ThoughtContent] | None = None
    id: Id | None = None
    status: Status | None = None


class ReferenceItem(Struct, tag_field="type", tag="item_reference", kw_only=True):
    """An item of an earlier response, by its id."""

    id: Id


Item = MessageItem | CallItem | ResultItem | ReasoningItem
"""What is kept of a conversation."""

_KINDS: dict[str, Reader[Any]] = {
    "message": Reader(MessageItem),
    "function_call": Reader(CallItem),
    "function_call_output": Reader(ResultItem),
    "reasoning": Reader(ReasoningItem),
    "item_reference": Reader(ReferenceItem),
}
_PREFIXES = {
    "message": "msg_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "reasoning": "rs_",
}


class _Kind(Struct):
    type: str | None = "message"


_KIND: Reader[_Kind] = Reader(_Kind)
_ITEM: msgspec.json.Decoder[Item] = msgspec.json.Decoder(Item)


def new_id(kind: str) -> str:
    """A fresh id for an item of this type."""
    return _PREFIXES[kind] + secrets.token_hex(16)


def read_item(raw: msgspec.Raw, place: str) -> Item | ReferenceItem:
    """An item of a request. Raises InvalidRequest that names what is wrong below `place`."""
    kind = _KIND.json(raw, place).type or "message"
    reader = _KINDS.get(kind)
    if reader is None:
        raise InvalidRequest(
            f"{place}.type: {kind[:100]!r} is not supported: items are {', '.join(_KINDS)}",
            f"{place}.type",
            "unsupported_parameter",
        )
    item: Item | ReferenceItem = reader.json(raw, place)
    return item


def pack(item: Item) -> tuple[str, bytes]:
    """An item as a store keeps it: its id, and JSON in which a message's content is a list."""
    kind = str(type(item).__struct_config__.tag)
    item_id = item.id or new_id(kind)
    return item_id, msgspec.json.encode(_whole(item, item_id))


def unpack(packed: bytes) -> Item:
    """The item again."""
    return _ITEM.decode(packed)


def pack_output(output: dict[str, Any]) -> tuple[str, bytes]:
    """An item of an answer, as `pack`: without its log-probabilities."""
    return pack(msgspec.convert(output, Item))


def _whole(item: Item, item_id: str) -> Item:
    found = msgspec.structs.replace(item, id=item_id, status=item.status or "completed")
    match found:
        case MessageItem(content=str(text)):
            found.content = [(SaidContent if found.role == "assistant" else TextContent)(text)]
        case MessageItem(content=list(content)):
            found.content = [_told(each) for each in content]
        case ResultItem(output=list(output)):
            found.output = [_told(each) for each in output]
    return found


def _told(content: Any) -> Any:
    """As the API tells of it: clients know an image by its `detail`."""
    if isinstance(content, ImageContent) and content.detail is None:
        return msgspec.structs.replace(content, detail="auto")
    return content


# ---- in OpenAI's chat words


@dataclass(slots=True)
class ItemWriter:
    """Chat messages being written.

    `places[i]`: what the client calls `messages[i]`, and what its content.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    places: list[tuple[str, str]] = field(default_factory=list)
    _answer: dict[str, Any] | None = None  # the model's turn that is being written
    _thoughts: list[str] = field(default_factory=list)

    def instruct(self, instructions: str) -> None:
        """The system prompt, which comes first."""
        self._add({"role": "system", "content": instructions}, "instructions", "instructions")

    def add(self, item: Item, place: str) -> None:
        """The next item."""
        match item:
            case ReasoningItem():
                thoughts = item.content or item.summary
                self._thoughts += [each.text for each in thoughts]
            case CallItem():
                answer = self._answering(place)
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                answer.setdefault("tool_calls", []).append(call)
            case MessageItem(role="assistant"):
                if self._answer is not None and "tool_calls" not in self._answer:
                    self._answer = None
                answer = self._answering(place)
                answer["content"] = _joined(answer.get("content"), _content(item.content))
            case MessageItem():
                message = {"role": item.role, "content": _content(item.content)}
                self._add(message, place, f"{place}.content")
            case ResultItem():
                message = {"role": "tool", "tool_call_id": item.call_id}
                self._add(message | {"content": _content(item.output)}, place, f"{place}.output")

    def _add(self, message: dict[str, Any], place: str, content: str) -> None:
        self._answer = None
        self._thoughts = []  # of a turn of which nothing else is left
        self.messages.append(message)
        self.places.append((place, content))

    def _answering(self, place: str) -> dict[str, Any]:
        """The model's turn, with what it thought before."""
        if self._answer is None:
            thoughts = self._thoughts
            self._add({"role": "assistant"}, place, f"{place}.content")
            self._thoughts = thoughts
            self._answer = self.messages[-1]
        if self._thoughts:
            before = self._answer.get("reasoning_content")
            said = [before] if before else []
            self._answer["reasoning_content"] = "\n".join([*said, *self._thoughts])
            self._thoughts = []
        return self._answer


def _joined(before: Any, added: Any) -> Any:
    if before is None:
        return added
    if isinstance(before, str) and isinstance(added, str):
        return before + added
    return [*_listed(before), *_listed(added)]


def _listed(content: Any) -> Sequence[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _content(content: str | Sequence[Content]) -> str | list[dict[str, Any]]:
    """Text alone is one string, as the model's own turns were when they were made."""
    if isinstance(content, str):
        return content
    if content and all(isinstance(each, SaidContent | RefusalContent) for each in content):
        return "".join(
            each.text if isinstance(each, SaidContent) else each.refusal
            for each in content
            if isinstance(each, SaidContent | RefusalContent)
        )
    return [_part(each) for each in content]


def _part(content: Content) -> dict[str, Any]:
    match content:
        case RefusalContent():
            return {"type": "text", "text": content.refusal}
        case PlainContent() | SaidContent():
            return {"type": "text", "text": content.text}
        case TextContent():
            part = {"type": "text", "text": content.text}
            return _marked(part, content.prompt_cache_breakpoint)
        case FileContent(file_url=str(url)):
            return {"type": "input_image", "image_url": url, "detail": content.detail}
        case FileContent():
            names = ("file_id", "file_data", "filename", "detail")
            file = msgspec.structs.asdict(content)
            return {"type": "file", "file": {name: file[name] for name in names}}
        case ImageContent():
            return {"type": "input_image", **msgspec.structs.asdict(content)}


def _marked(part: dict[str, Any], mark: dict[str, Any] | None) -> dict[str, Any]:
    return part if mark is None else {**part, "prompt_cache_breakpoint": mark}
