"""A test double of the engine: it speaks the front end's message protocol in-process and answers
with tokens that a test chooses.

It is honest about the protocol (one final delta per request, pixels asked for before they are used,
slots given back) and about
nothing else: no model runs. What needs one is tested through the real engine.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from saccade.core.config import MIB
from saccade.core.errors import EngineUnavailable
from saccade.core.plan import PixelSlot
from saccade.core.types import (
    CacheReport,
    Delta,
    DraftCounts,
    ImageKey,
    ImageOutcome,
    PooledOutput,
    PromptScores,
    Request,
    Tier,
    TokenLogprobs,
)
from saccade.ipc.messages import (
    Abort,
    Loading,
    MetricValues,
    Output,
    PixelsFailed,
    PixelsReady,
    Ready,
    Scrape,
    Submit,
    ToEngine,
    ToFront,
)
from saccade.sched.images.slots import PixelSlots

CONTEXT = 512
CHUNK = 5
CACHED = 5
ENCODE_MS = 0.01
ARENA_BYTES = 16 * MIB

Reply = Callable[[Request], Iterable[int]]


class EchoEngine:
    """Answers each request with `reply(request)`, one token per message, then the end token 2;
    `paused` holds it after two tokens; `fault` (words, code) ends it after one; `caching` is what
    it says of the caches, `restored` of tiers, `draft_counts` of each token.
    """

    def __init__(self, reply: Reply, context: int = CONTEXT) -> None:
        self.reply = reply
        self._context = context
        self.paused = False
        self.fault: tuple[str, str] | None = None
        self.caching: CacheReport | None = None
        self.draft_counts: tuple[DraftCounts, ...] = ()
        self.restored: tuple[tuple[Tier, int], ...] = ()
        self.stall = ""
        self.received: list[ToEngine] = []
        self.grace: float | None = None
        self._dead = False
        self._out: asyncio.Queue[ToFront | None] = asyncio.Queue()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._slots = PixelSlots(ARENA_BYTES)
        self._pixels: dict[ImageKey, asyncio.Future[str | None]] = {}

    async def start(self, told: Callable[[Loading], None]) -> Ready:
        return Ready(
            kv_tokens=4 * self._context, context_length=self._context, decided=(("engine", "echo"),)
        )

    def send(self, message: ToEngine) -> None:
        if self._dead:
            raise EngineUnavailable("the engine process was killed by signal 9")
        self.received.append(message)
        match message:
            case Submit(request):
                self._tasks[request.id] = asyncio.create_task(self._answer(request))
            case Abort(id):
                if task := self._tasks.pop(id, None):
                    task.cancel()
                    self._say(Delta(id, finish="abort"))
            case Scrape():
                self.received.pop()
                self._out.put_nowait(MetricValues(()))
            case PixelsReady(key):
                self._pixels[key].set_result(None)
            case PixelsFailed(key, error):
                self._pixels.pop(key).set_result(error)

    async def receive(self) -> ToFront:
        message = await self._out.get()
        if message is None:
            raise EngineUnavailable("the engine process was killed by signal 9")
        return message

    async def stop(self, grace: float) -> None:
        self.grace = grace
        for task in self._tasks.values():
            task.cancel()

    def die(self) -> None:
        self._dead = True
        for task in self._tasks.values():
            task.cancel()
        self._out.put_nowait(None)

    def say_nonsense(self) -> None:
        """Break the protocol: news of what is no answer."""
        self._out.put_nowait(Output(deltas=("nonsense",)))  # type: ignore[arg-type]

    @property
    def aborted(self) -> list[str]:
        return [message.id for message in self.received if isinstance(message, Abort)]

    def _say(self, *deltas: Delta) -> None:
        self._out.put_nowait(Output(deltas=deltas))

    async def _answer(self, request: Request) -> None:
        admitted = time.monotonic()
        if error := await self._see(request):
            self._say(Delta(request.id, finish="error", error=error))
            return
        sampling = request.sampling
        if (reading := request.reading) is not None:
            width = len(reading.labels) or 4
            told = PooledOutput(
                len(request.tokens) - 1, width, array("f", range(1, 1 + width)).tobytes()
            )
            self._say(Delta(request.id, finish="stop", pooled_output=told, admitted=admitted))
            return
        for scores in _scores(request):
            self._say(Delta(request.id, scores=scores))
        for count, token in enumerate((*self.reply(request), 2), 1):
            ends = (token == 2 and not sampling.ignore_eos) or token in sampling.stop_token_ids
            finish: Literal["stop", "length"] | None = (
                "stop" if ends else "length" if count == sampling.max_tokens else None
            )
            outcomes = (
                tuple(ImageOutcome(i, "none") for i in range(len(request.images)))
                if count == 1
                else ()
            )
            self._say(
                Delta(
                    request.id,
                    (token,),
                    _logprobs(request, token),
                    finish,
                    None,
                    CACHED if count == 1 else 0,
                    outcomes,
                    caching=self.caching if count == 1 else None,
                    admitted=admitted if count == 1 else 0.0,
                    draft_counts=self.draft_counts,
                    restored=self.restored if count == 1 else (),
                )
            )
            if finish:
                self._tasks.pop(request.id)
                return
            if self.fault is not None:
                error, code = self.fault
                self._say(Delta(request.id, finish="error", error=error, code=code))
                self._tasks.pop(request.id)
                return
            await asyncio.sleep(0)
            while self.paused and count >= 2:
                await asyncio.sleep(0.01)

    async def _see(self, request: Request) -> str | None:
        """Ask for the pixels of every picture not seen yet; the reason when there are none."""
        slots: dict[ImageKey, PixelSlot] = {}
        for key, image in {image.key: image for image in request.images}.items():
            if key not in self._pixels:
                self._pixels[key] = asyncio.get_running_loop().create_future()
                slot = self._slots.reserve(image)
                assert slot is not None
                self._out.put_nowait(Output(want=((key, slot),)))
                slots[key] = slot
            error = await asyncio.shield(self._pixels[key])
            if key in slots:
                self._slots.free(slots[key])
            if error is not None:
                return error
            if key in slots:
                encoded = (key, ENCODE_MS, time.monotonic())
                self._out.put_nowait(Output(encoded=(encoded,)))
        return None


def _logprobs(request: Request, token: int) -> tuple[TokenLogprobs, ...]:
    wanted = request.sampling.logprobs
    return (
        ()
        if wanted is None
        else (TokenLogprobs(token, -0.5, tuple((token + i, -0.5 - i) for i in range(wanted))),)
    )


def score(place: int, alternative: int) -> float:
    """Of the prompt's token at `place`, or of the alternative (1 the best) to it. The token is the
    second best.
    """
    return -0.125 * place - 0.25 * (alternative or 2)


def _scores(request: Request) -> Iterator[PromptScores]:
    """In chunks. The best alternative to a token is the one after it, the second it itself."""
    top, tokens = request.prompt_logprobs, request.tokens
    if top is None:
        return
    for start in range(1, len(tokens), CHUNK):
        places = range(start, min(start + CHUNK, len(tokens)))
        ids, logprobs = array("i"), array("f")
        for place in places:
            token = tokens[place]
            ids.extend((token, token + 1, token, *range(token + 2, token + top))[: 1 + top])
            logprobs.extend(score(place, i) for i in range(1 + top))
        ranks = array("i", [2] * len(places))
        yield PromptScores(start, ids.tobytes(), logprobs.tobytes(), ranks.tobytes())
