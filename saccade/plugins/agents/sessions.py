"""Sessions: conversations in which each request continues the previous one, so that the next
request can be predicted.

The numbers of sessions, of their trim rules, and of clients are limited. A request belongs to a
session if it contains the session's last answer, and has the same client and salt. Nothing is
shared across salts.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from saccade.core.types import ImageKey
from saccade.front.answer_update import NOTHING_AHEAD, AheadReport, AnswerUpdate
from saccade.front.breakpoints import NO_CACHE_REQUEST
from saccade.front.conversation import Chat, Message, MessageText, Part, tool_call
from saccade.front.extras import find_extra
from saccade.front.prompt_encoder import GenerationRequest
from saccade.media.opened import OpenedImage
from saccade.media.sources.source import ImageSource
from saccade.plugins.agents.history_edits import AskedEdit
from saccade.plugins.agents.outline import (
    MessageOutline,
    Outline,
    message_outline,
    outline_of,
)
from saccade.plugins.agents.published_rules import OF_TOOLS, OF_USERS
from saccade.plugins.agents.trimming import (
    ADVICE,
    HistoryChange,
    TrimRule,
    compare,
    learn,
)
from saccade.plugins.agents.trust import Trust
from saccade.text.answer.events import AnswerEvent
from saccade.text.answer.reader import WholeAnswer, gather

MAX_SESSIONS = 1024
"""Maximum number of sessions. When it is exceeded, the client with the most sessions loses its
oldest one.
"""
MAX_MESSAGES = 2048
"""Maximum messages in a conversation that is followed."""
LOOKED_BACK = 4
"""The number of a request's latest answers with which sessions are looked up."""
MAX_ALIKE = 16
"""Maximum sessions of one client with the same last answer. Older ones are dropped."""
MAX_COMPARED = 64
"""The number of latest messages that are compared to tell sessions with the same answer apart."""
GROWN = 1
"""The number of requests that only add one image, after which a session is assumed to be an agent's
and a trim rule is guessed.
"""

K = TypeVar("K")
Tenant = tuple[str, str, str]
"""A salt, a client (for round-robin) and an adapter. Sessions are never shared across these."""


@dataclass(slots=True, eq=False)
class ExpectedPrompt:
    """The predicted first messages of the next request."""

    outline: Outline  # the outline of its messages
    guessed: bool = False  # whether the rule was not observed in this session
    base: int = 0  # the number of its tokens that the preceding request has computed
    length: int = 0  # the number of its known tokens, including `base`
    computed: int = 0  # the number of tokens that were prefilled


@dataclass(slots=True, eq=False)
class ChatSession:
    """The state of one conversation."""

    tenant: Tenant
    outline: Outline = ()  # the outline of its last request
    # the outline of the answer as the client may send it back, without and with its reasoning
    answers: tuple[MessageOutline, ...] = ()
    rule: TrimRule | None = None  # how the client trims, once known
    coming: int = 1  # the number of images that each request adds
    grown: int = 0  # the number of requests that only added one image
    returned: int | None = 0  # index in `answers` of the form that was sent back; None: unknown
    expected: tuple[ExpectedPrompt, ...] = ()  # predictions of the next request
    shown: ImageKey | None = None  # the last image of its last request

    @property
    def mark(self) -> bytes:
        """The hash of the last answer that the session's last request contains."""
        return next(m.name for m in reversed(self.outline) if m.role == "assistant")


@dataclass(slots=True, eq=False)
class SessionTurn:
    """One request of a session, from its preparation to its answer."""

    session: ChatSession
    asked: GenerationRequest  # the request, without bytes
    outline: Outline  # the outline of its chat
    images: dict[int, OpenedImage]  # its images, by the ID of their source
    edited: bool = False  # an edit has shortened its chat
    shown_before: ImageKey | None = None  # the last image of the preceding request
    found: ExpectedPrompt | None = None  # the prediction that was right, if any
    beside: tuple[ExpectedPrompt, ...] = ()  # the other predictions
    report: AheadReport = NOTHING_AHEAD
    answer: list[AnswerEvent] = field(default_factory=list)  # the events received so far
    begun: bool = False  # whether there were any

    @property
    def chat(self) -> Chat:
        return self.asked.chat

    def hear(self, event: AnswerUpdate) -> AheadReport | None:
        """Process an update of the answer. The first call returns the report of prefilled tokens,
        later calls None.
        """
        self.answer += event.parts
        if self.begun:
            return None
        self.begun = True
        if (found := self.found) is not None:
            used = max(0, min(event.cached.total, found.length) - found.base)
            vain = sum(each.computed for each in self.beside)
            prepared = max(found.computed, used) + vain
            self.report = replace(self.report, prepared=prepared, used=used)
        return self.report


@dataclass(frozen=True, slots=True)
class NextPrompt:
    """The messages of a next request, up to the first that cannot be predicted."""

    messages: tuple[Message, ...]
    next: Message  # an example of the message that follows
    expected: ExpectedPrompt
    later: tuple[Message, ...] = ()  # after the next trimming, if predictable


class Sessions:
    """All sessions of a server.

    drop: called to cancel a prediction that is wrong or outdated.
    """

    def __init__(self) -> None:
        self.drop: Callable[[ChatSession], None] = _forget_prediction
        self._all: OrderedDict[ChatSession, None] = OrderedDict()  # the least recently used first
        self._alike: dict[tuple[Tenant, bytes], list[ChatSession]] = {}
        self._counts: Counter[Tenant] = Counter()
        self._rules: OrderedDict[tuple[Tenant, bytes], TrimRule] = OrderedDict()
        self._last_rules: OrderedDict[Tenant, TrimRule] = OrderedDict()
        self._known, self._guessed = Trust(), Trust()

    def __len__(self) -> int:
        return len(self._all)

    def follow(
        self,
        tenant: Tenant,
        request: GenerationRequest,
        opened: Sequence[OpenedImage],
        edited: bool = False,
    ) -> SessionTurn | None:
        """Find a request's session or create one, and update it with the request.

        opened: the images of the request's chat in order.
        edited: an edit of the request has shortened the chat.

        Returns None if the chat is too long to follow, or contains no earlier answer.
        """
        chat = request.chat
        if len(chat.messages) > MAX_MESSAGES or not chat.goes_on:
            return None
        outline = outline_of(chat, opened)
        light, images = _without_bytes(request, opened)
        session = self._find(tenant, outline)
        if session is None:
            session = ChatSession(tenant, rule=self._rules.get((tenant, outline[0].name)))
            turn = SessionTurn(session, light, outline, images, edited)
        else:
            self._forget(session)
            turn = SessionTurn(session, light, outline, images, edited, session.shown)
            found = compare(session.outline, outline)
            if found.grown < len(outline):  # otherwise, the request was repeated
                self._judge(turn, outline)
                self._learn(turn, outline, found)
        session.outline = outline
        session.shown = opened[-1].image.key if opened else session.shown
        self._add(session)
        return turn

    def predict(self, turn: SessionTurn) -> list[NextPrompt]:
        """Predict the start of the session's next request if the client is expected to shorten the
        history.

        Returns an empty list otherwise, and if `turn` is no longer the session's latest request.
        """
        session, chat = turn.session, turn.chat
        if session.outline is not turn.outline:
            return []
        forms = _answer_forms(gather(turn.answer))
        session.answers = outline_of(Chat(forms), ())
        last = max(i for i, m in enumerate(chat.messages) if m.role == "assistant")
        if session.returned is None or _ends_task(chat.messages[last], forms[0]):
            return []
        if last + 1 == len(chat.messages):
            return []  # an unfinished answer, so no message follows it yet
        answer = forms[min(session.returned, len(forms) - 1)]
        next_message = chat.messages[last + 1]
        before, expected = session.expected, dict[Outline, NextPrompt]()
        known = dict(zip(map(id, chat.messages), turn.outline))
        for messages, rule in self._cuts(turn, answer):
            outline = tuple(
                known.get(id(each)) or message_outline(each, iter(images_in((each,), turn)))
                for each in messages
            )
            images = sum(each.images for each in outline)
            guessed = rule is not None and session.rule is None
            later = () if rule is None else rule.cut(messages, rule.most + 1 - images)
            prompt = NextPrompt(messages, next_message, ExpectedPrompt(outline, guessed), later)
            expected.setdefault(outline, prompt)
        if before and {each.outline for each in before if each.computed} == expected.keys():
            return []  # the request was repeated
        session.expected = tuple(prompt.expected for prompt in expected.values())
        return [*expected.values()]

    def trusts(self, tenant: Tenant, guessed: bool = False) -> bool:
        """Return False if the client's last predictions were wrong.

        guessed: check the predictions from guessed rules, which are counted separately.
        """
        return tenant in (self._guessed if guessed else self._known)

    def _cuts(
        self, turn: SessionTurn, answer: Message
    ) -> Iterator[tuple[tuple[Message, ...], TrimRule | None]]:
        """Yield the known messages of each possible next request, with the rule that
        predicts them.
        """
        session, messages = turn.session, turn.chat.messages
        if (asked := find_extra(turn.asked.extras, AskedEdit)) is not None:
            foreseen = asked.edit.foreseen((*messages, answer), turn.edited)
            if foreseen is not None:
                yield foreseen, None
                return
        rules = [session.rule] if session.rule is not None else self._guesses(turn)
        images = sum(message.images for message in turn.outline)
        for rule in rules:
            if rule.surplus(images, session.coming) > 0 or rule.tail:
                before = messages[: len(messages) - rule.tail]
                yield rule.cut((*before, answer), session.coming), rule

    def _guesses(self, turn: SessionTurn) -> Sequence[TrimRule]:
        """Return the rules to try for an agent: the last one of the same client, or those of
        published agents.
        """
        session = turn.session
        if session.grown < GROWN:
            return ()
        if (last := self._last_rules.get(session.tenant)) is not None:
            return (last,)
        images = sum(message.images for message in turn.outline)
        shown = next(m for m in turn.outline if m.images)
        rules = OF_TOOLS if shown.role == "tool" else OF_USERS
        return [rule for rule in rules if rule.most == images]

    # ---- learning

    def _judge(self, turn: SessionTurn, outline: Outline) -> None:
        session = turn.session
        if not (predictions := session.expected):
            return
        right = next((each for each in predictions if _begins(outline, each.outline)), None)
        trust = self._guessed if predictions[0].guessed else self._known
        trust.judge(session.tenant, right is not None)
        if right is None:
            turn.report = AheadReport(sum(each.computed for each in predictions))
            self.drop(session)
        else:
            turn.found, session.expected = right, ()
            turn.beside = tuple(each for each in predictions if each is not right)

    def _learn(self, turn: SessionTurn, outline: Outline, found: HistoryChange) -> None:
        session, chat = turn.session, turn.chat
        came = {message.name for message in outline[found.grown :]}
        forms = enumerate(session.answers)
        session.returned = next((form for form, each in forms if each.name in came), None)
        images = sum(message.images for message in outline)
        session.coming = max(images - found.kept, 0) or session.coming
        session.grown += found.whole and session.coming == 1
        if found.place is not None and found.what is not None:
            place = chat.messages[found.place].place.removesuffix(".content")
            turn.report = replace(
                turn.report, changed=f"{place} changed: {found.what}", advice=ADVICE[found.what]
            )
        rule = learn(session.outline, found, chat, images)
        if rule is None:
            return
        session.rule = rule
        _remember(self._last_rules, session.tenant, rule)
        if not outline[0].images:
            _remember(self._rules, (session.tenant, outline[0].name), rule)

    # ---- finding

    def _find(self, tenant: Tenant, outline: Outline) -> ChatSession | None:
        said = [message.name for message in outline if message.role == "assistant"]
        marks = dict.fromkeys(reversed(said[-1 - LOOKED_BACK :]))
        known = {message.name for message in outline}
        alike = [each for mark in marks for each in self._alike.get((tenant, mark), ())]
        alike = [each for each in alike if _goes_on(each, known)]
        return max(alike, key=lambda each: _likeness(each, known), default=None)

    def _add(self, session: ChatSession) -> None:
        self._all[session] = None
        self._counts[session.tenant] += 1
        alike = self._alike.setdefault((session.tenant, session.mark), [])
        alike.append(session)
        if len(alike) > MAX_ALIKE:
            self._drop(alike[0])
        while len(self._all) > MAX_SESSIONS:
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
    session.expected = ()


def _remember(rules: OrderedDict[K, TrimRule], key: K, rule: TrimRule) -> None:
    rules[key] = rule
    rules.move_to_end(key)
    while len(rules) > MAX_SESSIONS:
        rules.popitem(last=False)


def _goes_on(session: ChatSession, known: set[bytes]) -> bool:
    """Return True if `known` contains the session's last answer or its last message."""
    answered = any(answer.name in known for answer in session.answers)
    return answered or session.outline[-1].name in known


def _likeness(session: ChatSession, known: set[bytes]) -> int:
    """Return the number of the session's messages that are in `known`, minus the number that are
    not.
    """
    names = {message.name for message in session.outline[-MAX_COMPARED:]}
    return len(names & known) - len(names - known)


def _ends_task(before: Message, answer: Message) -> bool:
    return "tool_calls" in before.fields and "tool_calls" not in answer.fields


def _begins(outline: Outline, beginning: Outline) -> bool:
    return len(outline) > len(beginning) and all(
        one.name == other.name for one, other in zip(outline, beginning)
    )


def images_in(messages: Sequence[Message], turn: SessionTurn) -> list[OpenedImage]:
    """Return the turn's opened images that these messages contain, in order."""
    return [turn.images[id(source)] for message in messages for source in message.media]


def _answer_forms(answer: WholeAnswer) -> tuple[Message, ...]:
    """Return the messages as which clients may send an answer back: without its reasoning, and with
    it.
    """
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
    """Return a copy of a request without image bytes, and its opened images by the ID of their
    source.
    """
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
