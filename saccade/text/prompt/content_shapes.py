"""Detects whether a chat template expects the content of messages as a string or as a list of
parts, and converts messages accordingly.

This is done once per template. Test conversations are rendered with both shapes. A shape is
supported if its text is unchanged in the output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

TemplateMessage = dict[str, Any]
"""A message in the form that templates expect: `role`, `content` (a string, or parts {"type":
"text", "text": ...} and {"type": "image"}), and other fields.
"""
TOOLS = -1
"""A message index that stands for everything before the first non-system message. This includes
tools, which templates may write before or after the system messages.
"""
Shape = Literal["text", "parts"]
Render = Callable[[Sequence[TemplateMessage]], str | None]
"""Renders messages, or returns None if the template rejects them."""

_SHAPES: tuple[Shape, Shape] = ("text", "parts")
_BETWEEN = "\n"
"""Separator with which text parts are joined to a string, as in vLLM and llama.cpp."""


@dataclass(frozen=True, slots=True)
class ContentShapes:
    """The shapes of content that one template supports, by role."""

    # the only shape that works for texts of a role; `None`: both work
    texts: Mapping[str, Shape | None]
    walked: frozenset[str]  # roles for which the template iterates over parts in some case
    others: Shape | None = None  # the shape for roles that were not detected
    fills: bool = False  # messages without content must get an empty one

    def fit(self, messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
        """Return the messages with their content in the shape that the template expects."""
        return [self._fit(message) for message in messages]

    def hidden(self, messages: Sequence[TemplateMessage]) -> tuple[int, int] | None:
        """Return (message, part) of the first image or video that the template would leave out, or
        None.
        """
        for index, message in enumerate(messages):
            media = _first_media(message.get("content"))
            if media is not None and self._joins(message["role"]):
                return index, media
        return None

    def _joins(self, role: str) -> bool:
        return self.texts.get(role, self.others) == "text" and role not in self.walked

    def _fit(self, message: TemplateMessage) -> TemplateMessage:
        content, shape = message.get("content"), self.texts.get(message["role"], self.others)
        if content is None:
            if not self.fills:
                return message
            content = ""
        if shape == "parts" and isinstance(content, str):
            content = [{"type": "text", "text": content}]
        elif shape == "text" and isinstance(content, list) and _first_media(content) is None:
            content = _BETWEEN.join(part["text"] for part in content if part["text"])
        return {**message, "content": content}


def _first_media(content: object) -> int | None:
    parts = enumerate(content if isinstance(content, list) else ())
    return next((number for number, part in parts if part["type"] != "text"), None)


def find_shapes(render: Render) -> ContentShapes:
    """Detect by rendering test conversations whether a template expects content as a string or as a
    list of parts.
    """
    found = _Found(render)
    whole, short = [_said("system"), *_TALK], _TALK
    calling = [_said("user"), {"role": "assistant", "tool_calls": [_CALL]}, _said("tool")]
    thinking = [_said("user"), {"role": "assistant", "reasoning_content": "Well"}, _said("user")]
    fills = False
    for talk in (whole, short):
        found.look(talk)
    for talk in (calling, thinking):
        bare = found.look(talk)
        filled = found.look([{"content": "", **each} for each in talk])
        fills = fills or (filled and not bare)
    return found.shapes(fills)


class _Found:
    def __init__(self, render: Render) -> None:
        self._render = render
        self._best: dict[str, set[frozenset[Shape]]] = {}

    def look(self, talk: Sequence[TemplateMessage]) -> bool:
        """Render a conversation with all combinations of shapes. Returns False if the template
        accepts none.
        """
        roles = sorted({each["role"] for each in talk if "content" in each})
        counts: dict[tuple[str, Shape], int] = {}
        accepted = False
        for chosen in product(_SHAPES, repeat=len(roles)):
            shapes = dict(zip(roles, chosen, strict=True))
            text = self._render([_shaped(each, shapes) for each in talk])
            if text is None:
                continue
            accepted = True
            for role, shape in shapes.items():
                # A seal means that the list itself was printed. A missing word means a lost part.
                words = [_word(role)] if shape == "text" else [_word(role), _other(role)]
                count = 0 if _seal(role) in text else min(map(text.count, words))
                counts[role, shape] = max(count, counts.get((role, shape), 0))
        for role in roles:
            shown = {shape: counts.get((role, shape), 0) for shape in _SHAPES}
            if most := max(shown.values()):
                best = frozenset(shape for shape in _SHAPES if shown[shape] == most)
                self._best.setdefault(role, set()).add(best)
        return accepted

    def shapes(self, fills: bool) -> ContentShapes:
        """Return the shapes to use. fills: messages without content need an empty one.

        The shape for a role is the one that rendered its text most often in every conversation.
        """
        texts: dict[str, Shape | None] = {}
        for role, best in self._best.items():
            always = frozenset(_SHAPES).intersection(*best)
            texts[role] = next(iter(always)) if len(always) == 1 else None
        walked = frozenset(
            role for role, best in self._best.items() if any("parts" in each for each in best)
        )
        common = set(texts.values())
        return ContentShapes(texts, walked, common.pop() if len(common) == 1 else None, fills)


_CALL = {"id": "callprobe", "type": "function", "function": {"name": "look", "arguments": {}}}
"""Its id has nine letters because some templates require that."""


def _word(role: str) -> str:
    return f"saccade{role}"


def _other(role: str) -> str:
    return f"another{role}"


def _seal(role: str) -> str:
    """Return the value of an extra field in test messages. It is in the output only if a part is
    printed as a dict.
    """
    return f"sealed{role}"


def _said(role: str) -> TemplateMessage:
    named = {"tool_call_id": _CALL["id"], "name": "look"} if role == "tool" else {}
    return {"role": role, "content": _word(role), **named}


_TALK = [_said("user"), _said("assistant"), _said("user")]


def _shaped(message: TemplateMessage, shapes: Mapping[str, Shape]) -> TemplateMessage:
    role = message["role"]
    if "content" not in message or shapes[role] == "text":
        return message
    texts = [message["content"], _other(role)] if message["content"] else [""]
    parts = [{"type": "text", "text": text, "probe": _seal(role)} for text in texts]
    return {**message, "content": parts}
