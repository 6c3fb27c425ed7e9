"""Strategies (habits) of agent frameworks for trimming their history before they send it.

A strategy is applied to the full history each time, as in Anthropic's loop, cua, UI-TARS and
Skyvern.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Json = dict[str, Any]
History = list[Json]

STUB = "[screenshot taken earlier]"


@dataclass(frozen=True)
class Habit:
    """A strategy for trimming images.

    keep: number of newest images that are kept; 0: all.
    batch: number of images that are removed at a time.
    form: what replaces a removed image: a text part ("stub"), a text as its message's content,
        nothing, nothing for its entire message, or nothing for its entire turn.
    first: number of images at the start that are always kept.
    reminder: text appended to each request, but not kept in the history.
    """

    keep: int = 0
    batch: int = 1
    form: Literal["stub", "content", "nothing", "message", "turn"] = "stub"
    first: int = 0
    reminder: str = ""
    stub: str = STUB

    def trim(self, history: Sequence[Json]) -> History:
        """Return the messages to send for a history."""
        shown = [i for i, message in enumerate(history) if images(message)]
        surplus = max(0, len(shown) - self.first - self.keep) if self.keep else 0
        surplus -= surplus % self.batch
        gone = shown[self.first : self.first + surplus]
        if self.form == "turn":
            rest = shown[self.first + surplus :]
            sent = [m for i, m in enumerate(history) if not gone or not gone[0] <= i < rest[0]]
        elif self.form == "message":
            sent = [m for i, m in enumerate(history) if i not in gone]
        else:
            sent = [self._left(m) if i in gone else m for i, m in enumerate(history)]
        tail = [{"role": "user", "content": self.reminder}] if self.reminder else []
        return [*sent, *tail]

    def _left(self, message: Json) -> Json:
        if self.form == "content":
            return {**message, "content": self.stub}
        stub = [{"type": "text", "text": self.stub}] if self.form == "stub" else []
        content = [
            each
            for part in message["content"]
            for each in (stub if part["type"] == "image_url" else [part])
        ]
        return {**message, "content": content}


HABITS: Mapping[str, Habit] = {
    "append": Habit(),
    "keep-1": Habit(1),
    "keep-3": Habit(3),
    "keep-5": Habit(5),
    "fours": Habit(3, batch=4),
    "vanish": Habit(3, form="nothing"),
    "window": Habit(5, form="turn"),
    "messages": Habit(5, form="message"),
}


def images(message: Json) -> int:
    """Return the number of images in a message."""
    content = message["content"]
    parts = content if isinstance(content, list) else []
    return sum(part["type"] == "image_url" for part in parts)
