"""Sessions: conversations whose requests follow one another, and what each teaches about the next.

Owns the sessions, their rules, and the trust in each client, all within bounds. A session is known
by an answer that comes back to the same client under the same salt: nothing is found or learned
across salts. Knows nothing of tokens, or of preparing the next prompt (`next_prompts.py`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from saccade.core.types import ImageKey
from saccade.front.answer_update import NOTHING_AHEAD, AheadReport, AnswerUpdate
from saccade.front.breakpoints import NO_CACHE_REQUEST
from saccade.front.conversation import Chat, Message, MessageText, Part, tool_call
from saccade.front.prompt_encoder import GenerationRequest
from saccade.front.sessions.outline import MessageOutline, Outline, outline_of
from saccade.front.sessions.trimming import (
    ADVICE,
    HistoryChange,
    TrimRule,
    compare,
    learn,
)
from saccade.media.opened import OpenedImage
from saccade.media.sources.source import ImageSource
from saccade.text.answer.reader import AnswerEvent, WholeAnswer, gather

MOST_SESSIONS = 1024
"""In all. The client with the most loses its oldest first."""
MOST_MESSAGES = 2048
"""Of a conversation that is followed."""
LOOKED_BACK = 4
"""Newest answers of a request that are looked for among sessions."""
MOST_ALIKE = 4
"""Sessions of one client that have the same last answer. Older ones are forgotten."""
MOST_WRONG = 2
"""Wrong predictions after which nothing is prepared for a client, until one is right again."""

Tenant = tuple[str, str, str]
"""A salt, a client that takes turns, and an adapter: what no session crosses."""


@dataclass(slots=True, eq=False)
class ExpectedPrompt:
    """The beginning of the next request, as predicted.

    outline: its messages. base: how many of its tokens the request before computed. length: tokens
    to be computed ahead, and those before them. computed: how many were.
    """

    outline: Outline
    base: int = 0
    length: int = 0
    computed: int = 0


@dataclass(slots=True, eq=False)
class ChatSession:
    """One conversation. outline: of its last request. answers: the answer to that, as the client
    may send it back, without and with its reasoning.

    rule: how the client trims, once known. coming: images that each request adds. returned: the
    form in which the last answer came back; None: in none of these. shown: the last image of its
    last request.
    """

    tenant: Tenant
    outline: Outline = ()
    answers: tuple[MessageOutline, ...] = ()
    rule: TrimRule | None = None
    coming: int = 1
    returned: int | None = 0
    expected: ExpectedPrompt | None = None
    shown: ImageKey | None = None

    @property
    def mark(self) -> bytes:
        """The name of the last answer in its last request."""
        return next(m.name for m in reversed(self.outline) if m.role == "assistant")


@dataclass(slots=True, eq=False)
class SessionTurn:
    """One request of a session, from its preparation to its answer.

    asked: the client's wish, without bytes. images: its images, by their sources. edited: its chat
    is shorter than the client's. shown_before: the last image of the request before. found: what
    was predicted for it, if that was right. answer: as far as it has come. begun: some of it has.
    """

    session: ChatSession
    asked: GenerationRequest
    images: dict[int, OpenedImage]
    edited: bool = False
    shown_before: ImageKey | None = None
    found: ExpectedPrompt | None = None
    report: AheadReport = NOTHING_AHEAD
    answer: list[AnswerEvent] = field(default_factory=list)
    begun: bool = False

    @property
    def chat(self) -> Chat:
        return self.asked.chat

    def hear(self, event: AnswerUpdate) -> AheadReport | None:
        """Take news of the answer. Returns what the request found ready, with the first news."""
        self.answer += event.parts
        if self.begun:
            return None
        self.begun = True
        if (found := self.found) is not None:
            used = max(0, min(event.cached.total, found.length) - found.base)
            prepared = max(found.computed, used)
            self.report = replace(self.report, prepared=prepared, used=used)
        return self.report


@dataclass(frozen=True, slots=True)
class NextPrompt:
    """A next request's messages as far as they are known. next: what the message behind is like."""

    messages: tuple[Message, ...]
    next: Message
    expected: ExpectedPrompt


class Sessions:
    """All sessions of a server. `drop` ends a prediction that was wrong, or is too old."""

    def __init__(self) -> None:
        self.drop: Callable[[ChatSession], None] = _forget_prediction
        self._all: OrderedDict[ChatSession, None] = OrderedDict()  # the longest unused first
        self._alike: dict[tuple[Tenant, bytes], list[ChatSession]] = {}
        self._counts: Counter[Tenant] = Counter()
        self._rules: OrderedDict[tuple[Tenant, bytes], TrimRule] = OrderedDict()
        self._wrong: OrderedDict[Tenant, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._all)

    def follow(
        self,
        tenant: Tenant,
        request: GenerationRequest,
        opened: Sequence[OpenedImage],
        edited: bool = False,
    ) -> SessionTurn | None:
        """Find a request's session, or begin one, and learn from what changed.

        `opened`: the images of the request's chat, in order. `edited`: the chat is shorter than
        the client's, as the request asks for.
        """
        chat = request.chat
        if len(chat.messages) > MOST_MESSAGES:
            return None
        outline = outline_of(chat, opened)
        light, images = _without_bytes(request, opened)
        session = self._find(tenant, outline)
        if session is None:
            session = ChatSession(tenant, rule=self._rules.get((tenant, outline[0].name)))
            turn = SessionTurn(session, light, images, edited)
        else:
            self._forget(session)
            turn = SessionTurn(session, light, images, edited, session.shown)
            found = compare(session.outline, outline)
            if found.grown < len(outline):  # else the same request again
                self._judge(turn, outline)
                self._learn(turn, outline, found)
        session.outline = outline
        session.shown = opened[-1].image.key if opened else session.shown
        self._add(session)
        return turn

    def predict(self, turn: SessionTurn) -> NextPrompt | None:
        """Return what the session's next request will begin with, if its rule changes that."""
        session, rule = turn.session, turn.session.rule
        forms = _answer_forms(gather(turn.answer))
        session.answers = outline_of(Chat(forms), ())
        if session.returned is None or not turn.answer:
            return None
        answer, edit = forms[min(session.returned, len(forms) - 1)], turn.asked.edit
        messages: tuple[Message, ...] | None = None
        if edit is not None:
            messages = edit.foreseen((*turn.chat.messages, answer), turn.edited)
        if messages is None and rule is not None:
            before = turn.chat.messages[: len(turn.chat.messages) - rule.tail]
            images = sum(message.images for message in session.outline)
            if rule.surplus(images, session.coming) > 0 or rule.tail:
                messages = rule.cut((*before, answer), session.coming)
        if messages is None:
            return None
        last = next(i for i, m in enumerate(reversed(turn.chat.messages)) if m.role == "assistant")
        beginning = turn.chat.messages[len(turn.chat.messages) - last]
        outline = outline_of(replace(turn.chat, messages=messages), images_in(messages, turn))
        session.expected = ExpectedPrompt(outline)
        return NextPrompt(messages, beginning, session.expected)

    def trusts(self, tenant: Tenant) -> bool:
        """Return False if the client's last predictions were wrong."""
        return self._wrong.get(tenant, 0) < MOST_WRONG

    # ---- learning

    def _judge(self, turn: SessionTurn, outline: Outline) -> None:
        session = turn.session
        expected = session.expected
        if expected is None:
            return
        right = _begins(outline, expected.outline)
        wrong = self._wrong.pop(session.tenant, 0)
        self._wrong[session.tenant] = max(0, wrong - 1) if right else min(MOST_WRONG, wrong + 1)
        while len(self._wrong) > MOST_SESSIONS:
            self._wrong.popitem(last=False)
        if right:
            turn.found, session.expected = expected, None
        else:
            turn.report = AheadReport(expected.computed)
            self.drop(session)

    def _learn(self, turn: SessionTurn, outline: Outline, found: HistoryChange) -> None:
        session, chat = turn.session, turn.chat
        came = {message.name for message in outline[found.grown :]}
        forms = enumerate(session.answers)
        session.returned = next((form for form, each in forms if each.name in came), None)
        images = sum(message.images for message in outline)
        session.coming = max(images - found.kept, 0) or session.coming
        if found.place is not None and found.what is not None:
            place = chat.messages[found.place].place.removesuffix(".content")
            turn.report = replace(
                turn.report, changed=f"{place} changed: {found.what}", advice=ADVICE[found.what]
            )
        rule = learn(session.outline, found, chat, images)
        if rule is None:
            return
        session.rule = rule
        if not outline[0].images:
            self._rules[session.tenant, outline[0].name] = rule
            self._rules.move_to_end((session.tenant, outline[0].name))
            while len(self._rules) > MOST_SESSIONS:
                self._rules.popitem(last=False)

    # ---- finding

    def _find(self, tenant: Tenant, outline: Outline) -> ChatSession | None:
        """Return the session that a request goes on, by the answers that it sends back."""
        said = [message.name for message in outline if message.role == "assistant"]
        for at in range(len(said) - 1, max(-1, len(said) - 2 - LOOKED_BACK), -1):
            if alike := self._alike.get((tenant, said[at])):
                known = {*said}
                return max(alike, key=lambda each: _likeness(each, known))
        return None

    def _add(self, session: ChatSession) -> None:
        self._all[session] = None
        self._counts[session.tenant] += 1
        alike = self._alike.setdefault((session.tenant, session.mark), [])
        alike.append(session)
        if len(alike) > MOST_ALIKE:
            self._drop(alike[0])
        while len(self._all) > MOST_SESSIONS:
            most = max(self._counts, key=lambda tenant: self._counts[tenant])
            self._drop(next(each for each in self._all if each.tenant == most))

    def _drop(self, session: ChatSession) -> None:
        self._forget(session)
        self.drop(session)

    def _forget(self, session: ChatSession) -> None:
        del self._all[session]
        self._counts[session.tenant] -= 1
        if not self._counts[session.tenant]:
            del self._counts[session.tenant]
        alike = self._alike[session.tenant, session.mark]
        alike.remove(session)
        if not alike:
            del self._alike[session.tenant, session.mark]


def _forget_prediction(session: ChatSession) -> None:
    session.expected = None


def _likeness(session: ChatSession, said: set[bytes]) -> tuple[bool, int]:
    """Tell sessions with the same last answer apart, by their next and their earlier answers."""
    next_said = any(answer.name in said for answer in session.answers)
    return next_said, sum(message.name in said for message in session.outline)


def _begins(outline: Outline, beginning: Outline) -> bool:
    return len(outline) > len(beginning) and all(
        one.name == other.name for one, other in zip(outline, beginning)
    )


def images_in(messages: Sequence[Message], turn: SessionTurn) -> list[OpenedImage]:
    """Return the opened images of a turn that some of its messages show, in order."""
    return [turn.images[id(source)] for message in messages for source in message.media]


def _answer_forms(answer: WholeAnswer) -> tuple[Message, ...]:
    """Return an answer as clients send it back: without its reasoning, and with it."""
    calls = [tool_call(call.id, call.name, call.arguments) for call in answer.calls]
    fields = {"tool_calls": calls} if calls else {}
    text = answer.text or (None if calls else "")
    bare = Message("assistant", text, fields)
    if not answer.reasoning:
        return (bare,)
    return bare, Message("assistant", text, {"reasoning_content": answer.reasoning, **fields})


def _without_bytes(
    request: GenerationRequest, opened: Sequence[OpenedImage]
) -> tuple[GenerationRequest, dict[int, OpenedImage]]:
    """Return a request whose images have lost their bytes, and those images by their sources."""
    images: dict[int, OpenedImage] = {}
    left = iter(opened)

    def lighten(part: Part) -> Part:
        if isinstance(part, MessageText):
            return part
        light = ImageSource("", part.param)
        images[id(light)] = next(left)
        return light

    messages = tuple(
        replace(message, content=tuple(map(lighten, message.parts)), marks=())
        if message.media
        else replace(message, marks=())
        if message.marks
        else message
        for message in request.chat.messages
    )
    chat = replace(request.chat, messages=messages, tool_marks=())
    return replace(request, prompt=chat, cache=NO_CACHE_REQUEST), images
