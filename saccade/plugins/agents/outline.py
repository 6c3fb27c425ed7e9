"""Outlines of conversations: hashes of messages and their parts, for comparing two requests.

An outline contains neither text nor image bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
from blake3 import blake3

from saccade.front.conversation import Chat, Message, MessageText
from saccade.media.opened import OpenedImage

NAME_BYTES = 16
_encode = msgspec.json.Encoder(order="deterministic").encode


@dataclass(frozen=True, slots=True)
class PartOutline:
    """The hash of a part, and whether it is an image."""

    name: bytes
    image: bool


@dataclass(frozen=True, slots=True)
class MessageOutline:
    """The outline of one message."""

    role: str
    said: bytes  # the hash of its role and fields
    parts: tuple[PartOutline, ...]
    name: bytes  # the hash of the whole message

    @property
    def images(self) -> int:
        return sum(part.image for part in self.parts)


Outline = tuple[MessageOutline, ...]


def outline_of(chat: Chat, opened: Sequence[OpenedImage]) -> Outline:
    """Return the outline of a chat.

    opened: the chat's images in order.
    """
    images = iter(opened)
    return tuple([message_outline(message, images) for message in chat.messages])


def message_outline(message: Message, images: Iterator[OpenedImage]) -> MessageOutline:
    """Return the outline of a message. A message whose content is a string has a single part."""
    if isinstance(message.content, str):
        parts = [_text(message.content)]
    else:
        parts = [
            _text(part.text) if isinstance(part, MessageText) else _image(next(images))
            for part in message.parts
        ]
    said = _named(_encode([message.role, message.fields]))
    name = _named(b"".join([said, *(b"%d" % part.image + part.name for part in parts)]))
    return MessageOutline(message.role, said, tuple(parts), name)


def _text(text: str) -> PartOutline:
    return PartOutline(_named(text.encode(errors="replace")), False)


def _image(opened: OpenedImage) -> PartOutline:
    key = opened.image.key
    return PartOutline(_named(key.digest + key.settings), True)


def _named(data: bytes) -> bytes:
    return blake3(data).digest(NAME_BYTES)
