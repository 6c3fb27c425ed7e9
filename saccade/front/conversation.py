"""A conversation as every dialect's reader builds it: messages, parts, tools, marks.

Owns the types in which the APIs meet. Each message and each part carries its place in the client's
own body, so that any later refusal names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec

from saccade.front.breakpoints import Mark
from saccade.front.extras import Extras
from saccade.media.sources.source import ImageSource, SentFile, Source, VideoSource
from saccade.text.prompt.content_shapes import TOOLS

if TYPE_CHECKING:
    from saccade.text.grammar.tools import ToolSet


@dataclass(frozen=True, slots=True)
class MessageText:
    """Text within a message, and its place in the client's body."""

    text: str
    place: str = ""


Part = MessageText | Source | SentFile
"""A piece of a message: text, an image, a video, or a file that has yet to be opened
(`steps/open_files.py`).
"""


def _characters(values: Mapping[str, Any]) -> int:
    if not values:
        return 0
    from saccade.text.grammar.json_size import extent

    return extent(values).characters


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    `fields` go to the template unchanged: tool_calls, tool_call_id, name, reasoning_content.
    """

    role: str
    content: str | tuple[Part, ...] | None
    fields: Mapping[str, Any] = field(default_factory=dict)
    marks: tuple[Mark, ...] = ()  # places up to which the client wants the prompt kept
    place: str = ""  # the content's path in the client's body, e.g. "messages[2].content".
    # of features. `num_characters`: in the text and the fields. `media`: all parts but texts, in
    # order.
    extras: Extras = ()
    num_characters: int = field(init=False, compare=False)
    media: tuple[Source | SentFile, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        size = len(self.content) if isinstance(self.content, str) else 0
        media: list[Source | SentFile] = []
        for part in self.parts:
            if isinstance(part, MessageText):
                size += len(part.text)
            else:
                media.append(part)
        size += _characters(self.fields)
        object.__setattr__(self, "num_characters", size)
        object.__setattr__(self, "media", tuple(media))

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.content if isinstance(self.content, tuple) else ()

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates take it, with absent values left out."""
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
    """Convert a past tool call for the template. JSON arguments become an object."""
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

    `tools`: None if the client sends neither tools nor a choice. `variables` are the client's own
    for the template. effort, verbosity, thinks: `reasoning_effort`, `verbosity` and
    `enable_thinking`, whose meaning is the template's. `num_characters`: in the template's whole
    input. Counting takes a while, so a large chat is built beside the event loop. `media`: images,
    videos and files, in the template's order. `sources`: images and videos alone. `files`: still
    to be opened. `marks`: all marks in order, tools' first.
    """

    messages: tuple[Message, ...]
    tools: ToolSet | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    effort: str | None = None
    verbosity: str | None = None
    thinks: bool | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    tool_marks: tuple[Mark, ...] = ()
    num_characters: int = field(init=False, compare=False)
    media: tuple[Source | SentFile, ...] = field(init=False, compare=False)
    sources: tuple[Source, ...] = field(init=False, compare=False)
    videos: tuple[VideoSource, ...] = field(init=False, compare=False)
    files: tuple[SentFile, ...] = field(init=False, compare=False)
    marks: tuple[Mark, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        size, marks = 0, [*self.tool_marks]
        media: list[Source | SentFile] = []
        sources, videos, files = list[Source](), list[VideoSource](), list[SentFile]()
        for index, message in enumerate(self.messages):
            size += message.num_characters
            media += message.media
            for mark in message.marks:
                marks.append(replace(mark, message=index))
        for each in media:
            if isinstance(each, SentFile):
                files.append(each)
                continue
            sources.append(each)
            if isinstance(each, VideoSource):
                videos.append(each)
        for tool in self.tools.tools if self.tools else ():
            size += tool.num_characters
        size += _characters(self.variables)
        object.__setattr__(self, "num_characters", size)
        object.__setattr__(self, "media", tuple(media))
        object.__setattr__(self, "sources", tuple(sources))
        object.__setattr__(self, "videos", tuple(videos))
        object.__setattr__(self, "files", tuple(files))
        object.__setattr__(self, "marks", tuple(marks))

    @property
    def has_switches(self) -> bool:
        """Return True if the request says how much to reason or to write."""
        return any(each is not None for each in (self.effort, self.verbosity, self.thinks))

    @property
    def goes_on(self) -> bool:
        """Return True if the chat holds an earlier answer."""
        return len(self.messages) > 1 and any(m.role == "assistant" for m in self.messages)

    def place_of(self, message: int, part: int | None) -> str:
        """Return the client's name for a message offset: the tools, a message's content, or a part
        within it.
        """
        if message == TOOLS:
            return "tools"
        if part is None:
            return self.messages[message].place
        found = self.messages[message].parts[part]
        return found.place if isinstance(found, MessageText) else found.param


NO_CHAT = Chat(())
"""The conversation of a prompt that is a text or tokens."""
