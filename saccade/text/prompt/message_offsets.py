"""Finds where the parts of a chat end in the rendered prompt.

The chat is rendered a second time with flags. A flag is a private-use character after the last
visible character of each text, or as a separate text after each image. Without the flags, both
renderings are equal, unless the template depends on how texts end. Offsets after the first
difference are unknown, and are replaced with the offset of that difference.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from saccade.core.family import FLAGS
from saccade.text.prompt.content_shapes import TOOLS, TemplateMessage

_FIRST, _MOST = 0xF0000, 0xFFFE
_FLAGS = re.compile(f"[{FLAGS}]")


@dataclass(frozen=True, slots=True)
class MessageOffset:
    """The offset in the prompt at which a part ends, or a message with a single text (`part` is
    None).
    """

    message: int
    part: int | None
    end: int


def flagged(
    messages: Sequence[TemplateMessage],
) -> tuple[list[TemplateMessage], list[tuple[int, int | None]]]:
    """Return the messages with flags and, for each flag, the (message, part) whose end it marks.

    The first message that is not a system message also starts with a flag (`TOOLS`).
    """
    places: list[tuple[int, int | None]] = []

    def flag(message: int, part: int | None) -> str:
        places.append((message, part))
        return chr(_FIRST + len(places) - 1) if len(places) <= _MOST else ""

    talk = next((i for i, each in enumerate(messages) if each["role"] != "system"), None)
    marked: list[TemplateMessage] = []
    for index, message in enumerate(messages):
        content = message.get("content")
        begin = flag(TOOLS, None) if index == talk and content else ""
        if isinstance(content, str):
            content = _after(_before(content, begin), flag(index, None))
        elif isinstance(content, list):
            content = _flag_parts(content, begin, partial(flag, index))
        marked.append(message if content is None else {**message, "content": content})
    return marked, places[:_MOST]


def _flag_parts(
    parts: Sequence[dict[str, Any]], begin: str, flag: Callable[[int], str]
) -> list[dict[str, Any]]:
    """Return the parts with a flag after each: in its text, or as a separate text after an image.

    begin: a flag to insert before the first part. An empty text stays empty, and its flag is added
    to the part before it.
    """
    marked: list[dict[str, Any]] = []
    flagged_at = -1
    for number, part in enumerate(parts):
        if part.get("type") != "text":
            if begin:
                marked.append({"type": "text", "text": begin})
            marked += [part, {"type": "text", "text": flag(number)}]
            begin, flagged_at = "", len(marked) - 1
        elif part["text"]:
            text = _after(_before(part["text"], begin), flag(number))
            marked.append({**part, "text": text})
            begin, flagged_at = "", len(marked) - 1
        else:
            marked.append(part)
            if flagged_at >= 0:
                before = marked[flagged_at]
                marked[flagged_at] = {**before, "text": _after(before["text"], flag(number))}
    return marked


def _before(text: str, mark: str) -> str:
    hidden = len(text) - len(text.lstrip())
    return text[:hidden] + mark + text[hidden:]


def _after(text: str, mark: str) -> str:
    """Insert `mark` after the last visible character, so that templates still trim the same white
    space.
    """
    visible = len(text.rstrip())
    return text[:visible] + mark + text[visible:]


def find_offsets(
    text: str, marked: str, places: Sequence[tuple[int, int | None]]
) -> list[MessageOffset]:
    """Return the offsets in `text` at which parts end, in order.

    marked: the rendering with flags.
    places: the (message, part) of each flag.
    """
    found: list[MessageOffset] = []
    for number, match in enumerate(_FLAGS.finditer(marked)):
        place = ord(match.group()) - _FIRST
        if place < len(places):
            found.append(MessageOffset(*places[place], match.start() - number))
    bare = _FLAGS.sub("", marked)
    known = len(text) if bare == text else _common_prefix(bare, text)
    return [MessageOffset(each.message, each.part, min(each.end, known)) for each in found]


def _common_prefix(one: str, other: str) -> int:
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
