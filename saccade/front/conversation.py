"""A conversation as every dialect's reader builds it: messages, parts, tools, marks.

Owns the types in which the APIs meet. Each message and each part carries its place in the client's
own body, so that any later refusal names it. Knows nothing of any API's JSON, of templates, or of
fetching images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from saccade.front.breakpoints import Mark
from saccade.media.sources import ImageSource, SentFile, Source, VideoSource
from saccade.text.grammar.json_size import extent
from saccade.text.grammar.tools import ToolSet
from saccade.text.prompt.message_offsets import TOOLS


@dataclass(frozen=True, slots=True)
class MessageText:
    """Text within a message, and its place in the client's body."""

    text: str
    place: str = ""


Part = MessageText | Source | SentFile
"""A piece of a message: text, an image, a video, or a file that has yet to be opened
(`document_parts.py`).
"""


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    `fields` go to the template unchanged: tool_calls, tool_call_id, name, reasoning_content. marks:
    places up to which the client wants the prompt kept. place: of the content in the client's body,
    e.g. "messages[2].content". `num_characters`: of the text and the fields.
    """

    role: str
    content: str | tuple[Part, ...] | None
    fields: Mapping[str, Any] = field(default_factory=dict)
    marks: tuple[Mark, ...] = ()
    place: str = ""
    num_characters: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        size = len(self.content) if isinstance(self.content, str) else 0
        size += sum(len(part.text) for part in self.parts if isinstance(part, MessageText))
        fields = extent(self.fields).characters if self.fields else 0
        object.__setattr__(self, "num_characters", size + fields)

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.content if isinstance(self.content, tuple) else ()

    @property
    def sources(self) -> tuple[Source, ...]:
        return tuple(part for part in self.parts if not isinstance(part, MessageText | SentFile))

    @property
    def files(self) -> tuple[SentFile, ...]:
        return tuple(part for part in self.parts if isinstance(part, SentFile))

    def for_template(self) -> dict[str, Any]:
        """The message for chat templates, without None values."""
        message: dict[str, Any] = {"role": self.role, **self.fields}
        if isinstance(self.content, tuple):
            message["content"] = [_for_template(part) for part in self.content]
        elif self.content is not None:
            message["content"] = self.content
        return message


def _for_template(part: Part) -> dict[str, Any]:
    match part:
        case MessageText(text=text) | SentFile(heading=text):
            return {"type": "text", "text": text}
        case ImageSource():
            return {"type": "image"}
    return {"type": "video"}


def tool_call(id: str | None, name: str, arguments: str | Mapping[str, Any]) -> dict[str, Any]:
    """A call of an earlier answer for templates: the arguments as an object, if their
    text is one.
    """
    if isinstance(arguments, str):
        try:
            parsed = msgspec.json.decode(arguments)
            arguments = parsed if isinstance(parsed, dict) else arguments
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass  # a model's own broken call, sent back: the template prints the text
    named = {"id": id} if id is not None else {}
    return {**named, "type": "function", "function": {"name": name, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation to be rendered by the chat template.

    `offer`: None: the client names no tools, and chooses none.
    `variables` are the client's own for the template. effort, verbosity, thinks:
    `reasoning_effort`, `verbosity` and `enable_thinking`, whose meaning is the template's.
    `num_characters`: of the template's whole input; counting takes a while, so a large chat is
    built beside the event loop.
    """

    messages: tuple[Message, ...]
    offer: ToolSet | None = None
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
        tools = sum(tool.num_characters for tool in self.offer.tools) if self.offer else 0
        variables = extent(self.variables).characters if self.variables else 0
        object.__setattr__(self, "num_characters", messages + tools + variables)

    @property
    def sources(self) -> tuple[Source, ...]:
        """Images and videos, in the order of the template."""
        return tuple(source for message in self.messages for source in message.sources)

    @property
    def files(self) -> tuple[SentFile, ...]:
        """Files still to be opened."""
        return tuple(file for message in self.messages for file in message.files)

    @property
    def videos(self) -> tuple[VideoSource, ...]:
        return tuple(source for source in self.sources if isinstance(source, VideoSource))

    @property
    def marks(self) -> tuple[Mark, ...]:
        """The marks in order, tools' first."""
        marks = (
            replace(mark, message=index)
            for index, message in enumerate(self.messages)
            for mark in message.marks
        )
        return (*self.tool_marks, *marks)

    def place_of(self, message: int, part: int | None) -> str:
        """The client's name for a landmark: the tools, a message's content, or a part of the
        content.
        """
        if message == TOOLS:
            return "tools"
        if part is None:
            return self.messages[message].place
        found = self.messages[message].parts[part]
        return found.place if isinstance(found, MessageText) else found.param
