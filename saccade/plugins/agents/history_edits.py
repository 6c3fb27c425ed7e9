"""Ways to shorten a conversation that a client asks the server for.

    ClearToolUses   Anthropic's clear_tool_uses_20250919: old tool results become a short text
    DropOldest      OpenAI's truncation "auto": drop the oldest messages until the rest fits

Decides what is removed. An edit sees the whole conversation each time, and takes from the oldest
on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, ClassVar, Protocol

from saccade.front.conversation import Chat, Message, MessageText

CLEARED = "[tool result cleared]"
STEP = 4
"""`DropOldest` takes a quarter of the context at a time."""


@dataclass(frozen=True, slots=True)
class AppliedEdit:
    """The result of an edit. tokens: prompt length before it. It cleared 0 if it had no effect."""

    NAME: ClassVar[str] = "agents.edited"
    tokens: int
    cleared_tokens: int = 0
    cleared_uses: int = 0


class HistoryEdit(Protocol):
    """An edit that a request asks for.

    least: prompt tokens that it must take to be worth it.
    """

    @property
    def least(self) -> int: ...

    def shorter(self, chat: Chat, sizes: Sequence[int], most: int) -> Iterator[tuple[Chat, int]]:
        """Yield shorter forms of a chat, and how many tool uses were removed.

        The first that has at most `most` tokens counts, or else the last. `sizes`: each message's
        tokens, about, which add up to the prompt's.
        """
        ...

    def foreseen(self, messages: Sequence[Message], done: bool) -> tuple[Message, ...] | None:
        """Return the messages as a next request will show them, if that is known.

        `done`: the edit took effect on the last request.
        """
        ...

    def naming(self, names: Mapping[str, str]) -> HistoryEdit:
        """Return the edit for messages with other names of calls. names: the client's, by id."""
        ...


@dataclass(frozen=True, slots=True)
class AskedEdit:
    """The edit that a request asks for."""

    NAME: ClassVar[str] = "agents.edit"
    edit: HistoryEdit


@dataclass(frozen=True, slots=True)
class ClearToolUses:
    """tokens, uses: when it begins, by prompt tokens or tool uses. keep: newest uses that stay.
    excluded: tools whose uses stay. inputs: tools whose calls lose their arguments, True for all.
    named: the client's names for calls that the messages name otherwise, by id.
    """

    tokens: int | None = 100_000
    uses: int | None = None
    keep: int = 3
    least: int = 0
    excluded: frozenset[str] = frozenset()
    inputs: frozenset[str] | bool = False
    named: Mapping[str, str] = field(default_factory=dict)

    def naming(self, names: Mapping[str, str]) -> ClearToolUses:
        return replace(self, named=names)

    def shorter(self, chat: Chat, sizes: Sequence[int], most: int) -> Iterator[tuple[Chat, int]]:  # noqa: ARG002
        """Yield the shorter form, if the threshold is reached."""
        uses, tokens = [*_uses(chat.messages)], sum(sizes)
        due = tokens > self.tokens if self.tokens is not None else len(uses) > (self.uses or 0)
        gone = self._gone(uses)
        if due and gone:
            yield replace(chat, messages=self.cut(chat.messages)), len(gone)

    def cut(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Return messages with their old tool uses cleared."""
        gone = self._gone([*_uses(messages)])
        return tuple(self._cleared(message, gone) for message in messages)

    def foreseen(self, messages: Sequence[Message], done: bool) -> tuple[Message, ...] | None:
        """Return the messages with the uses cleared that the next one makes old."""
        due = done or (self.uses is not None and len([*_uses(messages)]) > self.uses)
        return self.cut(messages) if due else None

    def _gone(self, uses: Sequence[tuple[str, str]]) -> Mapping[str, str]:
        old = uses[: -self.keep] if self.keep else uses
        named = ((id, self.named.get(id, name)) for id, name in old)
        return {id: name for id, name in named if name not in self.excluded}

    def _cleared(self, message: Message, gone: Mapping[str, str]) -> Message:
        if message.role == "tool" and message.fields.get("tool_call_id") in gone:
            marks = tuple(replace(mark, part=None) for mark in message.marks)
            text = MessageText(CLEARED, message.place)
            return replace(message, content=(text,), marks=marks)
        if self.inputs and "tool_calls" in message.fields:
            calls = [self._without_input(call, gone) for call in message.fields["tool_calls"]]
            return replace(message, fields={**message.fields, "tool_calls": calls})
        return message

    def _without_input(self, call: dict[str, Any], gone: Mapping[str, str]) -> dict[str, Any]:
        name = gone.get(call.get("id", ""))
        if name is None or not (self.inputs is True or name in (self.inputs or ())):
            return call
        return {**call, "function": {**call["function"], "arguments": {}}}


def _uses(messages: Sequence[Message]) -> Iterator[tuple[str, str]]:
    """Yield each tool use's id and tool, in order. Calls in a row with one id are one use."""
    for message in messages:
        last = None
        for call in message.fields.get("tool_calls", ()):
            id = call.get("id", "")
            if not id or id != last:
                yield id, call["function"]["name"]
            last = id


@dataclass(frozen=True, slots=True)
class DropOldest:
    """Drops messages from the oldest on, behind the system's."""

    least: int = 0

    def naming(self, names: Mapping[str, str]) -> DropOldest:  # noqa: ARG002
        return self

    def shorter(self, chat: Chat, sizes: Sequence[int], most: int) -> Iterator[tuple[Chat, int]]:
        """Yield forms that lack more and more messages.

        A cut is placed before a message other than a tool's result. It moves by a part of the
        context at a time, so that a prefix stays for a while.
        """
        if (surplus := sum(sizes) - most) <= 0:
            return
        messages, step = chat.messages, max(1, most // STEP)
        first = next((i for i, m in enumerate(messages) if m.role != "system"), len(messages))
        cuts = [i for i in range(first + 1, len(messages)) if messages[i].role != "tool"]
        wanted, dropped = -(-surplus // step) * step, [0, *accumulate(sizes[first:])]
        for at in cuts:
            if dropped[at - first] >= wanted or at == cuts[-1]:
                yield replace(chat, messages=(*messages[:first], *messages[at:])), 0
                wanted += step

    def foreseen(self, messages: Sequence[Message], done: bool) -> tuple[Message, ...] | None:  # noqa: ARG002
        """Return None: a cut stays for a while, and moves by tokens yet to come."""
        return None
