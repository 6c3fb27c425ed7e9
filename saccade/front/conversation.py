"""The conversation that all APIs convert their requests to: messages, parts, tools and cache
breakpoints.

Each message and part has its path in the client's request, so that later errors can name it.
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
    """A part of a message that contains text."""

    text: str
    place: str = ""  # path in the client's request


Part = MessageText | Source | SentFile
"""A part of a message: text, an image, a video, or a file that has not been opened yet
(`steps/open_files.py`).
"""


def _characters(values: Mapping[str, Any]) -> int:
    if not values:
        return 0
    from saccade.text.grammar.json_size import extent

    return extent(values).characters


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    fields: passed to the template unchanged: tool_calls, tool_call_id, name, reasoning_content.
    """

    role: str
    content: str | tuple[Part, ...] | None
    fields: Mapping[str, Any] = field(default_factory=dict)
    marks: tuple[Mark, ...] = ()  # cache breakpoints in the message
    place: str = ""  # path of the content in the client's request, e.g. "messages[2].content"
    extras: Extras = ()  # values for plugins
    num_characters: int = field(init=False, compare=False)  # in the text and the fields
    # all parts except texts, in order
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
        """Return the message as a dict in the form that chat templates expect, without missing
        values.
        """
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
    """Return an earlier tool call in the form that chat templates expect. Arguments in JSON are
    decoded.
    """
    if isinstance(arguments, str):
        try:
            parsed = msgspec.json.decode(arguments)
            arguments = parsed if isinstance(parsed, dict) else arguments
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass  # the model had written invalid JSON: the template gets the text
    named = {"id": id} if id is not None else {}
    return {**named, "type": "function", "function": {"name": name, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation that the chat template renders.

    The constructor counts characters, which is slow, so large chats are constructed in a thread.
    """

    messages: tuple[Message, ...]
    tools: ToolSet | None = None  # None if the client sent neither tools nor a tool choice
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    # `reasoning_effort`, `verbosity` and `enable_thinking`, which the template interprets
    effort: str | None = None
    verbosity: str | None = None
    thinks: bool | None = None
    # additional variables for the template
    variables: Mapping[str, Any] = field(default_factory=dict)
    tool_marks: tuple[Mark, ...] = ()
    num_characters: int = field(init=False, compare=False)  # in everything that the template gets
    # images, videos and files, in order
    media: tuple[Source | SentFile, ...] = field(init=False, compare=False)
    sources: tuple[Source, ...] = field(init=False, compare=False)  # images and videos
    videos: tuple[VideoSource, ...] = field(init=False, compare=False)
    files: tuple[SentFile, ...] = field(init=False, compare=False)  # not opened yet
    # all breakpoints in order; the tools' breakpoints are first
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
        """True if the request sets reasoning effort, verbosity, or whether to think."""
        return any(each is not None for each in (self.effort, self.verbosity, self.thinks))

    @property
    def goes_on(self) -> bool:
        """True if the chat contains an earlier answer of the assistant."""
        return len(self.messages) > 1 and any(m.role == "assistant" for m in self.messages)

    def place_of(self, message: int, part: int | None) -> str:
        """Return the path, in the client's request, of the tools, of a message's content, or of a
        part in it.

        message: the index of the message, or `TOOLS`.
        part: the index of the part; None for the entire content.
        """
        if message == TOOLS:
            return "tools"
        if part is None:
            return self.messages[message].place
        found = self.messages[message].parts[part]
        return found.place if isinstance(found, MessageText) else found.param


NO_CHAT = Chat(())
"""An empty conversation, for requests whose prompt is a text or token ids."""
