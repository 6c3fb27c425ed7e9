"""Learns from two requests how a client shortens its conversation, and predicts the next request.

    compare     finds which messages of an earlier request were changed or removed
    learn       returns the rule behind it, if it is a known type of rule
    TrimRule    shortens a conversation like the client

A rule removes the oldest images, counted from the end. Each image is replaced with a text, or
removed alone, or with its whole turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from saccade.front.conversation import Chat, Message, MessageText, Part
from saccade.plugins.agents.outline import MessageOutline, Outline

MAX_STUB = 4096
"""Maximum characters of the texts that replace an image."""

What = Literal["image became text", "image left out", "message left out", "text changed"]
ADVICE: dict[What, str] = {
    "image became text": "trim several images at once, and rarely",
    "image left out": "trim several images at once, and rarely",
    "message left out": "leave out several turns at once, and rarely",
    "text changed": "put what changes, such as the time, into the last message",
}
Place = tuple[int, int]
"""The indices of a message and of a part in it."""


@dataclass(frozen=True, slots=True)
class Trimmed:
    """An image that the client removed from the conversation."""

    at: Place  # its position in the earlier request
    # the positions of the texts that replace it, or None if its message was removed, too
    stub: tuple[Place, ...] | None
    whole: bool = False  # the texts replace the whole message


@dataclass(frozen=True, slots=True)
class HistoryChange:
    """The differences between an earlier request and the next one."""

    place: int | None = None  # the message with the first difference, in the next request
    what: What | None = None  # the type of that difference
    trimmed: tuple[Trimmed, ...] = ()  # the removed images in order
    kept: int = 0  # the number of images that remain
    dropped: tuple[tuple[int, int], ...] = ()  # ranges of removed messages
    known: int = 0  # the number of earlier messages that the next request continues from
    grown: int = 0  # the index of its first message after them

    @property
    def whole(self) -> bool:
        """Whether the next request contains the earlier one unchanged."""
        return self.place is None


def compare(old: Outline, new: Outline) -> HistoryChange:
    """Return the differences between an earlier request and the next one of its session."""
    at = to = 0
    place: int | None = None
    what: What | None = None
    trimmed: list[Trimmed] = []
    dropped: list[tuple[int, int]] = []
    while at < len(old) and to < len(new):
        if old[at].name == new[to].name:
            at, to = at + 1, to + 1
            continue
        stubs = _trimmed(old[at], new[to], at, to)
        if not stubs and (back := _next_known(old, at, new[to])) is not None:
            if place is None:
                place, what = to, "message left out"
            dropped.append((at, back))
            trimmed += [Trimmed(each, None) for each in images_of(old, at, back)]
            at = back
            continue
        stubs = stubs or _replaced(old[at], new[to], at, to)
        if not stubs:
            break
        if place is None:
            place, what = to, "image became text" if stubs[0].stub else "image left out"
        trimmed += stubs
        at, to = at + 1, to + 1
    if at < len(old) and place is None:
        place, what = to, "text changed" if to < len(new) else "message left out"
    kept = sum(message.images for message in old[:at]) - len(trimmed)
    return HistoryChange(place, what, tuple(trimmed), kept, tuple(dropped), at, to)


def _trimmed(old: MessageOutline, new: MessageOutline, at: int, to: int) -> list[Trimmed] | None:
    """Return the images that are missing in the new message, or None if there are other
    differences.

    at, to: the indices of the old message and of the new message.
    """
    if old.said != new.said or old.images <= new.images:
        return None
    found: list[Trimmed] = []
    place = 0
    for number, part in enumerate(old.parts):
        if place < len(new.parts) and new.parts[place] == part:
            place += 1
        elif not part.image:
            return None
        else:
            after = old.parts[number + 1] if number + 1 < len(old.parts) else None
            stands = place < len(new.parts) and not new.parts[place].image
            stub = stands and new.parts[place] != after
            found.append(Trimmed((at, number), ((to, place),) if stub else ()))
            place += stub
    return found if place == len(new.parts) else None


def _replaced(old: MessageOutline, new: MessageOutline, at: int, to: int) -> list[Trimmed]:
    """Return the images of a message whose whole content was replaced."""
    if old.said != new.said or old.images != 1 or new.images:
        return []
    ((_, number),) = images_of((old,), 0, 1)
    return [Trimmed((at, number), tuple((to, part) for part in range(len(new.parts))), True)]


def _next_known(old: Outline, at: int, new: MessageOutline) -> int | None:
    """Return the index of the next old message with images that equals `new`, possibly trimmed, or
    None.
    """
    for index in range(at + 1, len(old)):
        same = old[index].name == new.name and old[at].name != new.name
        if same or (old[index].images and _trimmed(old[index], new, index, 0)):
            return index
    return None


def images_of(messages: Outline, start: int, end: int) -> Iterator[Place]:
    """Yield the position of each image in a range of messages."""
    for index in range(start, end):
        for number, part in enumerate(messages[index].parts):
            if part.image:
                yield index, number


@dataclass(frozen=True, slots=True)
class TrimRule:
    """A rule for trimming: if there would be more than `most` images, keep `keep` of them: the
    `first` ones and the latest.
    """

    most: int
    keep: int
    first: int = 0
    # the texts that replace an image, or None if its message is removed, with `lead` messages
    # before it and `behind` after it
    stub: tuple[str, ...] | None = ()
    lead: int = 0
    behind: int | None = None  # None: up to `lead` messages before the next image that remains
    whole: bool = False  # the texts replace the whole message
    tail: int = 0  # the number of last messages of a request that are missing in the next one

    def surplus(self, images: int, coming: int) -> int:
        """Return how many images the client removes from a conversation with `images` images when
        it adds `coming` new ones.
        """
        total = images + coming
        return min(total - self.keep, images - self.first) if total > self.most else 0

    def cut(self, messages: Sequence[Message], coming: int) -> tuple[Message, ...]:
        """Shorten a conversation as the client does before it adds `coming` images."""
        places = [
            (index, number)
            for index, message in enumerate(messages)
            for number, part in enumerate(message.parts)
            if not isinstance(part, MessageText)
        ]
        surplus = self.surplus(len(places), coming)
        if surplus <= 0:
            return (*messages,)
        gone = places[self.first : self.first + surplus]
        stub = self.stub
        if stub is None and self.behind is not None:
            reach = range(-self.lead, self.behind + 1)
            left_out = {index + step for index, _ in gone for step in reach}
            return tuple(m for index, m in enumerate(messages) if index not in left_out)
        if stub is None:
            rest = places[self.first + surplus :]
            begin = gone[0][0] - self.lead
            end = (rest[0][0] if rest else len(messages)) - self.lead
            return (*messages[:begin], *messages[end:])
        return tuple(
            _stubbed(message, {part for at, part in gone if at == index}, stub, self.whole)
            for index, message in enumerate(messages)
        )


def _stubbed(message: Message, gone: set[int], stub: Sequence[str], whole: bool) -> Message:
    if not gone:
        return message
    if whole:
        return replace(message, content=tuple(map(MessageText, stub)))
    parts: list[Part] = []
    for number, part in enumerate(message.parts):
        if number in gone:
            parts += [MessageText(text) for text in stub]
        else:
            parts.append(part)
    return replace(message, content=tuple(parts))


def learn(old: Outline, found: HistoryChange, chat: Chat, images: int) -> TrimRule | None:
    """Return the rule behind a comparison, or None if it does not reveal one.

    chat: the new request.
    images: the number of images in it.
    """
    before = [*images_of(old, 0, len(old))]
    gone = [each.at for each in found.trimmed]
    if not gone or any(message.images for message in old[found.known :]):
        return None
    first = before.index(gone[0])
    if before[first : first + len(gone)] != gone or first + len(gone) > len(before):
        return None
    coming = images - found.kept
    if coming <= 0:
        return None
    tail = len(old) - found.known
    rule = TrimRule(len(before) + coming - 1, images, first, tail=tail)
    if all(each.stub is None for each in found.trimmed):
        rest = before[first + len(gone) :]
        until = rest[0][0] if rest else found.known
        return _dropping(rule, found.dropped, [index for index, _ in gone], until)
    stubs = {
        (each.whole, None if each.stub is None else tuple(_text(chat, at) for at in each.stub))
        for each in found.trimmed
    }
    whole, stub = stubs.pop()
    if stubs or stub is None or found.dropped or sum(map(len, stub)) > MAX_STUB:
        return None
    return replace(rule, stub=stub, whole=whole)


def _dropping(
    rule: TrimRule, dropped: Sequence[tuple[int, int]], gone: Sequence[int], until: int
) -> TrimRule | None:
    """Return the rule with the messages that are removed together with images, or None if they
    follow no pattern.

    gone: the index of each removed image's message.
    until: the index of the next image's message.
    """
    begin, end = dropped[0]
    rule = replace(rule, stub=None, lead=gone[0] - begin)
    if len(dropped) == 1 and end == until - rule.lead:
        return rule
    runs = {(at - begin, end - at - 1) for at, (begin, end) in zip(gone, dropped)}
    if len(runs) > 1 or len(dropped) != len(gone):
        return None
    return replace(rule, behind=end - gone[0] - 1)


def _text(chat: Chat, place: Place) -> str:
    message = chat.messages[place[0]]
    if isinstance(message.content, str):
        return message.content
    part = message.parts[place[1]]
    assert isinstance(part, MessageText)
    return part.text
