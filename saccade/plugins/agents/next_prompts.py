"""Prefills the next prompts of sessions while the engine is idle.

The queue is limited to one prompt per session, `MAX_OF_CLIENT` per client, and `MOST` in total.
Clients are served round-robin. One prompt is computed at a time, by the engine's rules for idle
work (`sched/turns.py`), and is cancelled when its session's next request arrives.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from saccade.core.errors import RequestError
from saccade.core.family import FamilySpec
from saccade.core.metrics import Metrics
from saccade.core.types import Caching, Image, Request, SamplingParams, Span
from saccade.front.answer_update import AnswerUpdate
from saccade.front.conversation import Message, MessageText
from saccade.front.prepared import PreparedRequest
from saccade.front.prompt_encoder import PromptEncoder
from saccade.ipc.messages import Ready
from saccade.plugins.agents.sessions import (
    ChatSession,
    NextPrompt,
    Sessions,
    SessionTurn,
    Tenant,
    images_in,
)

log = logging.getLogger("saccade")

MOST, MAX_OF_CLIENT = 64, 8
"""Maximum queued prompts, in total and per client. Each prompt keeps its images in memory."""
MAX_BYTES = 64 << 20
"""Maximum bytes of all their images."""
MIN_TOKENS = 32
"""Minimum new tokens of a next prompt. Fewer are not worth a request."""
POOL_SHARE = 0.5
"""Maximum fraction of the KV cache for one prefilled prompt."""
UNKNOWN = "\ufdd0"
"""Placeholder for the unknown text of the next message."""

Generate = Callable[[PreparedRequest], AsyncGenerator[AnswerUpdate, None]]
Spawn = Callable[[Coroutine[None, None, None]], None]
Shown = tuple[tuple[int, ...], tuple[Span, ...], tuple[Image, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """A next prompt to prefill.

    last: the preceding request, after its preparation.
    """

    turn: SessionTurn
    prediction: NextPrompt
    last: PreparedRequest
    most_tokens: int
    nbytes: int


class NextPrompts:
    """Prefills next prompts one after another.

    generate, spawn: as in `Answers`.
    """

    def __init__(
        self,
        sessions: Sessions,
        prompts: PromptEncoder,
        spec: FamilySpec,
        generate: Generate,
        spawn: Spawn,
        metrics: Metrics,
    ) -> None:
        self._sessions = sessions
        sessions.drop = self._drop
        self._prompts = prompts
        self._spec = spec
        self._states = spec.kv_spec().state_bytes("float32") > 0
        self._generate = generate
        self._spawn = spawn
        self._metrics = metrics
        self._clients: OrderedDict[Tenant, deque[_Job]] = OrderedDict()  # the next one is first
        self._nbytes = 0
        self._serving = False
        self._current: tuple[ChatSession, asyncio.Task[None]] | None = None

    @property
    def waiting(self) -> int:
        """The number of next prompts that are queued or being prefilled."""
        return sum(map(len, self._clients.values())) + (self._current is not None)

    def answered(self, turn: SessionTurn, last: PreparedRequest, ready: Ready) -> None:
        """Queue the prompts that may follow an answered request, if they can be predicted."""
        tenant = turn.session.tenant
        most = min(ready.context_length, int(POOL_SHARE * ready.kv_tokens))
        for prediction in self._sessions.predict(turn):
            nbytes = sum(image.nbytes for image in images_in(prediction.messages, turn))
            mine = self._clients.get(tenant, ())
            full = self.waiting >= MOST or len(mine) >= MAX_OF_CLIENT
            trusted = self._sessions.trusts(tenant, prediction.expected.guessed)
            if full or self._nbytes + nbytes > MAX_BYTES or not trusted:
                return
            job = _Job(turn, prediction, last, most, nbytes)
            self._clients.setdefault(tenant, deque()).append(job)
            self._nbytes += nbytes
            self._begin()

    def _begin(self) -> None:
        self._tell()
        if not self._serving:
            self._serving = True
            self._spawn(self._serve())

    def stop(self, session: ChatSession) -> None:
        """Cancel the prefill for a session, because its next request has arrived."""
        if self._current is not None and self._current[0] is session:
            self._current[1].cancel()
        jobs = self._clients.get(session.tenant, ())
        for job in [job for job in jobs if job.turn.session is session]:
            self._clients[session.tenant].remove(job)
            self._nbytes -= job.nbytes
            if not self._clients[session.tenant]:
                del self._clients[session.tenant]
        self._tell()

    def take_update(self, turn: SessionTurn, event: AnswerUpdate) -> AnswerUpdate:
        """Process an update of an answer. Adds the report of prefilled tokens to the request's
        first update.
        """
        if (report := turn.hear(event)) is None:
            return event
        if turn.found is not None:
            counted = sum(each.computed for each in (turn.found, *turn.beside))
            self._count("computed", report.prepared - counted)
            self._count("used", report.used)
            self._count("wasted", report.prepared - report.used)
        return replace(event, ahead=report)

    def _drop(self, session: ChatSession) -> None:
        self.stop(session)
        self._count("wasted", sum(each.computed for each in session.expected))
        session.expected = ()

    def _count(self, outcome: str, tokens: int) -> None:
        self._metrics.inc("saccade_prepared_tokens_total", tokens, outcome=outcome)

    def _tell(self) -> None:
        self._metrics.set("saccade_next_prompts_waiting", self.waiting)

    async def _serve(self) -> None:
        try:
            while self._clients:
                tenant, mine = next(iter(self._clients.items()))
                job = mine.popleft()
                self._clients.move_to_end(tenant)
                if not mine:
                    del self._clients[tenant]
                self._nbytes -= job.nbytes
                task = asyncio.ensure_future(self._compute(job))
                self._current = job.turn.session, task
                try:
                    await asyncio.wait([task])
                finally:
                    task.cancel()
                    self._current = None
                    self._tell()
        finally:
            self._serving = False

    async def _compute(self, job: _Job) -> None:
        try:
            made = await self._prompts.in_thread(lambda: self._request(job))
            if made is None:
                return
            async with aclosing(self._generate(made)) as events:
                async for event in events:
                    expected = job.prediction.expected
                    expected.computed = max(0, expected.length - event.cached.total)
                    self._count("computed", expected.computed)
                    break
        except RequestError as error:
            log.info("a next prompt was not prefilled: %s", error.message)
        except Exception:  # a background task must not affect other requests
            log.exception("a next prompt was not prefilled")

    def _request(self, job: _Job) -> PreparedRequest | None:
        """Return the request that computes the known part of the next prompt, or None if few of its
        tokens are new.
        """
        last, prediction, expected = job.last.request, job.prediction, job.prediction.expected
        opened = tuple(images_in(prediction.messages, job.turn))
        shown = tokens, spans, images = self._encode(job, prediction.messages)
        expected.base = _common(shown, (last.tokens, last.spans, last.images))
        expected.length = len(tokens)
        fresh = expected.length - expected.base
        if fresh < MIN_TOKENS or expected.length >= job.most_tokens:
            return None
        branch = 0
        if self._states and prediction.later:
            branch = _common(shown, self._encode(job, prediction.later))
        made = Request(
            secrets.token_hex(12),
            tokens,
            spans,
            images,
            SamplingParams(max_tokens=1),
            last.cache_salt,
            last.arrival,
            last.client,
            caching=Caching(adapter=last.adapter, idle=True, branch=branch),
        )
        places = ("",) * len(opened)
        return PreparedRequest(made, opened, places, silent=True)

    def _encode(self, job: _Job, messages: Sequence[Message]) -> Shown:
        """Return the tokens before the unknown text, with their spans and images."""
        asked, chat = job.turn.asked, job.turn.chat
        images = [each.image for each in images_in(messages, job.turn)]
        unknown = replace(job.prediction.next, content=(MessageText(UNKNOWN),))
        chat = replace(chat, messages=(*messages, unknown))
        rendered = self._prompts.render(chat, asked, job.most_tokens)
        known = rendered.text.rfind(UNKNOWN)
        tokens = self._prompts.known_tokens(rendered, known, asked, job.most_tokens)
        found, spans = self._spec.expand_prompt(tokens, images, [None] * len(images))
        return tuple(found), tuple(spans), tuple(images)


def _common(one: Shown, other: Shown) -> int:
    """Return the length of the longest common prefix of two prompts. Their images must
    match, too.
    """
    tokens, spans, images = one
    tokens2, spans2, images2 = other
    length = next(
        (at for at, (a, b) in enumerate(zip(tokens, tokens2)) if a != b),
        min(len(tokens), len(tokens2)),
    )
    for a, b in zip(spans, spans2):
        if a.start >= length and b.start >= length:
            break
        if a.start != b.start or images[a.image].key != images2[b.image].key:
            return min(length, a.start, b.start)
    return length
