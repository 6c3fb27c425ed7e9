"""The edits with which a request can have its conversation shortened.

    ClearToolUses   Anthropic's clear_tool_uses_20250919: replace old tool results by a short text
    DropOldest      OpenAI's truncation "auto": drop the oldest messages until the rest fits

Edits decide what is removed. They get the whole conversation in each request, and remove its oldest
parts first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, ClassVar, Protocol

from saccade.front.conversation import Chat, Message, MessageText

CLEARED = "[tool result cleared]"
STEP = 4
"""`DropOldest` removes multiples of 1 / STEP of the context."""


@dataclass(frozen=True, slots=True)
class AppliedEdit:
    """Counts what an edit has removed. If it had no effect, all counts except `tokens` are zero."""

    NAME: ClassVar[str] = "agents.edited"
    tokens: int  # the prompt's tokens before the edit
    cleared_tokens: int = 0
    cleared_uses: int = 0


class HistoryEdit(Protocol):
    """An edit that shortens a chat before it is computed.

    least: the edit is skipped if it would remove fewer prompt tokens than this.
    """

    @property
    def least(self) -> int: ...

    def shorter(self, chat: Chat, sizes: Sequence[int], most: int) -> Iterator[tuple[Chat, int]]:
        """Yield shorter versions of a chat, each with the number of tool uses removed.

        The caller uses the first version with at most `most` tokens, or else the last one.

        sizes: the approximate number of tokens of each message. Their sum is the prompt's length.
        """
        ...

    def foreseen(self, messages: Sequence[Message], done: bool) -> tuple[Message, ...] | None:
        """Return the messages as the edit will leave them in the next request, or None if that is
        unknown.

        done: whether the edit had an effect on the last request.
        """
        ...

    def naming(self, names: Mapping[str, str]) -> HistoryEdit:
        """Return this edit for messages whose calls were renamed.

        names: the client's function name of each call, by the call's ID.
        """
        ...


@dataclass(frozen=True, slots=True)
class AskedEdit:
    """Attaches the edit that a request specifies to its preparation."""

    NAME: ClassVar[str] = "agents.edit"
    edit: HistoryEdit


@dataclass(frozen=True, slots=True)
class ClearToolUses:
    """Replaces the results of old tool uses with a short text."""

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
        """Yield one shorter version if the threshold is exceeded, or else none."""
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
        """Return the messages, with those tool uses cleared that will be old in the next
        request.
        """
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
    """Yield the ID and tool name of each tool use, in order. Consecutive calls with one ID are one
    use.
    """
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

        The first remaining message is never a tool's result. The number of removed tokens grows in
        steps of a fraction of the context, so that the prefix stays the same for several requests.
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
        """Return None: usually, no further messages are dropped, and when they are depends on
        future tokens.
        """
        return None
