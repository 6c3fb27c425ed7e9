"""The edits by which a request can have its conversation shortened.

    ClearToolUses   Anthropic's clear_tool_uses_20250919: replace old tool results by a short text
    DropOldest      OpenAI's truncation "auto": drop the oldest messages until the rest fits

Edits decide what is removed. They get the whole conversation each time, and remove from the oldest
part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, ClassVar, Protocol

from saccade.front.conversation import Chat, Message, MessageText

CLEARED = "[tool result cleared]"
STEP = 4
"""`DropOldest` removes a multiple of 1 / STEP of the context."""


@dataclass(frozen=True, slots=True)
class AppliedEdit:
    """The result of an edit. All zeros, except for `tokens`, if it had no effect."""

    NAME: ClassVar[str] = "agents.edited"
    tokens: int  # the prompt's tokens before the edit
    cleared_tokens: int = 0
    cleared_uses: int = 0


class HistoryEdit(Protocol):
    """An edit that a request specifies.

    least: the minimum prompt tokens that it must remove to be applied.
    """

    @property
    def least(self) -> int: ...

    def shorter(self, chat: Chat, sizes: Sequence[int], most: int) -> Iterator[tuple[Chat, int]]:
        """Yield shorter versions of a chat, with the number of tool uses removed.

        The first one with at most `most` tokens is used, or else the last. `sizes`: the approximate
        tokens of each message, whose sum is the prompt's tokens.
        """
        ...

    def foreseen(self, messages: Sequence[Message], done: bool) -> tuple[Message, ...] | None:
        """Return the messages as they will be in the next request, if that is predictable.

        `done`: the edit had an effect on the last request.
        """
        ...

    def naming(self, names: Mapping[str, str]) -> HistoryEdit:
        """Return the edit for messages with other names of calls. names: the client's, by ID."""
        ...


@dataclass(frozen=True, slots=True)
class AskedEdit:
    """The edit that a request specifies."""

    NAME: ClassVar[str] = "agents.edit"
    edit: HistoryEdit


@dataclass(frozen=True, slots=True)
class ClearToolUses:
    """Clears old tool uses."""

    tokens: int | None = 100_000  # clear if the prompt has more tokens
    uses: int | None = None  # clear if there are more tool uses
    keep: int = 3  # the number of latest uses that remain
    least: int = 0
    excluded: frozenset[str] = frozenset()  # tools whose uses remain
    inputs: frozenset[str] | bool = False  # tools whose arguments are cleared, too; True: all
    # the client's names for calls with other names in the messages, by ID
    named: Mapping[str, str] = field(default_factory=dict)

    def naming(self, names: Mapping[str, str]) -> ClearToolUses:
        return replace(self, named=names)

    def shorter(self, chat: Chat, sizes: Sequence[int], most: int) -> Iterator[tuple[Chat, int]]:  # noqa: ARG002
        """Yield the shorter version, if the threshold is exceeded."""
        uses, tokens = [*_uses(chat.messages)], sum(sizes)
        due = tokens > self.tokens if self.tokens is not None else len(uses) > (self.uses or 0)
        gone = self._gone(uses)
        if due and gone:
            yield replace(chat, messages=self.cut(chat.messages)), len(gone)

    def cut(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Return the messages with old tool uses cleared."""
        gone = self._gone([*_uses(messages)])
        return tuple(self._cleared(message, gone) for message in messages)

    def foreseen(self, messages: Sequence[Message], done: bool) -> tuple[Message, ...] | None:
        """Return the messages with those uses cleared that will be old in the next request."""
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
    """Yield each tool use's ID and tool, in order. Consecutive calls with one ID are one use."""
    for message in messages:
        last = None
        for call in message.fields.get("tool_calls", ()):
            id = call.get("id", "")
            if not id or id != last:
                yield id, call["function"]["name"]
            last = id


@dataclass(frozen=True, slots=True)
class DropOldest:
    """Drops the oldest messages after the system prompt."""

    least: int = 0

    def naming(self, names: Mapping[str, str]) -> DropOldest:  # noqa: ARG002
        return self

    def shorter(self, chat: Chat, sizes: Sequence[int], most: int) -> Iterator[tuple[Chat, int]]:
        """Yield versions that drop more and more messages.

        The first remaining message is never a tool's result. The cut moves in steps of a fraction
        of the context, so that the prefix stays the same for several requests.
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
        """Return None: the cut usually stays, and its next move depends on future tokens."""
        return None
