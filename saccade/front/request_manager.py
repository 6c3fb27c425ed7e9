"""The requests in flight: submits them to the engine, converts its output to text, and finishes
each request exactly once.

Also has the state of the engine as clients see it. The HTTP server and `LLM` use this module.
Everything runs on one event loop, so there are no locks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_right
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Literal, Protocol

from saccade.core.client import ANYBODY, Client, Permits
from saccade.core.errors import (
    Cancelled,
    EngineUnavailable,
    ImageError,
    InternalError,
    InvalidRequest,
    RequestError,
    StartupError,
)
from saccade.core.metrics import Metrics
from saccade.core.plan import PixelSlot
from saccade.core.settings import AdapterSettings
from saccade.core.types import (
    NO_ADAPTER,
    CacheReport,
    Delta,
    ImageKey,
    ImageOutcome,
    Request,
)
from saccade.front.answer_update import AnswerUpdate, CachedTokens, Finish, FoundImage, InFlight
from saccade.front.input_processor import InputProcessor
from saccade.front.prepared import PreparedRequest
from saccade.front.prompt_encoder import GenerationRequest
from saccade.ipc.messages import (
    Abort,
    Altered,
    EmbeddingReady,
    Failed,
    Flush,
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
    TokenizerText,
)
from saccade.media.sources.fairness import BOUNDLESS, MemoryBudget
from saccade.text.answer.detokenize import Detokenizer, StopStrings, Vocabulary
from saccade.text.answer.events import CallEnded

if TYPE_CHECKING:
    from saccade.front.adapters import AdapterRegistry
    from saccade.front.pooled_output_cache import PooledOutputCache
    from saccade.front.score_prompts import Scoring

log = logging.getLogger("saccade")

State = Literal["starting", "ready", "stopping", "failed"]

NO_LORAS = AdapterSettings(max_loras=0)
SCRAPE_SECONDS = 1.0
"""How long to wait for the engine's metrics before the last known values are used."""
STALL_LOOK_SECONDS = 0.25
"""Interval between checks that the engine makes progress, while the server waits for requests to
finish.
"""


class EngineClient(Protocol):
    """The connection of the front-end process to the engine (`engine.link.EngineProcess`)."""

    @property
    def stall(self) -> str:
        """Why a running engine makes no progress, or "" if it does."""
        ...

    async def start(self, on_progress: Callable[[Loading], None]) -> Ready:
        """Start the engine, and return its `Ready` message.

        on_progress: called with the progress of loading. Raises StartupError.
        """
        ...

    def send(self, message: ToEngine) -> None:
        """Send a message to the engine. Raises EngineUnavailable."""
        ...

    async def receive(self) -> ToFront:
        """Wait for the next message from the engine and return it. Raises EngineUnavailable once
        the engine has exited.
        """
        ...

    async def stop(self, grace: float) -> None: ...


class _Answer:
    """One request to the engine: its text so far, the parser of the text, and its queue of
    updates.
    """

    def __init__(
        self,
        request: Request,
        prepared: PreparedRequest,
        choice: int,
        vocabulary: Vocabulary,
        events: asyncio.Queue[AnswerUpdate | RequestError],
    ) -> None:
        self.request = request
        self.places = prepared.places
        self.message_offsets = prepared.message_offsets
        self.choice = choice
        self.events = events
        self.error: RequestError | None = None
        self.submitted = time.monotonic()
        self.last_news: float | None = None
        self._text = Detokenizer(vocabulary, prepared.reading.special, prepared.reading.read_tags)
        self._stops = StopStrings(request.sampling.stop, prepared.reading.with_stop)
        # A tag that the parser reads may also end the answer: with a grammar, the end of a call.
        self._special = vocabulary.special - vocabulary.named(prepared.reading.read_tags).keys()
        self._reading = prepared.reading
        self._reader = prepared.reading.reader()
        self._num_tokens = 0

    @property
    def standing(self) -> InFlight:
        request, age = self.request, time.monotonic() - self.request.arrival
        return InFlight(age, len(request.tokens), len(request.images), self._num_tokens)

    def advance(self, delta: Delta) -> AnswerUpdate:
        """Return the update for `delta`. Its `finish` is also set if a stop string ends the
        answer.
        """
        sampling = self.request.sampling
        tokens = delta.tokens
        if delta.finish == "stop" and tokens and not self._reading.with_stop:
            ends = tokens[-1] in sampling.stop_token_ids or tokens[-1] in self._special
            tokens = tokens[:-1] if ends else tokens
        # Stop strings are ignored within the minimum length that the client requested.
        exempt = sampling.tokens_due(self._num_tokens)
        self._num_tokens += len(delta.tokens)
        text = self._text.feed(tokens[:exempt])
        rest, stopped = self._stops.feed(self._text.feed(tokens[exempt:]))
        text += rest
        finish: Finish | None = (
            "length"
            if delta.finish == "length"
            else "stop"
            if stopped or delta.finish == "stop"
            else None
        )
        if finish and not stopped:
            rest, stopped = self._stops.feed(self._text.end())
            text += rest if stopped else rest + self._stops.end()
        if stopped:
            finish = "stop"
        parts = self._reader.feed(text) if text else []
        first = next((i for i, part in enumerate(parts) if isinstance(part, CallEnded)), None)
        if self._reading.single and first is not None:
            parts, finish = parts[: first + 1], "stop"
        elif finish:
            parts += self._reader.end()
        return AnswerUpdate(
            self.choice,
            text,
            len(delta.tokens),
            delta.logprobs,
            finish,
            CachedTokens(delta.cached_tokens, delta.restored),
            parts=tuple(parts),
            stop=self._stops.found,
            draft_counts=delta.draft_counts,
        )


class RequestManager:
    """Connects clients to one engine. Call `start` after the constructor, and `stop` at the end."""

    def __init__(
        self,
        intake: InputProcessor,
        engine: EngineClient,
        metrics: Metrics,
        max_requests: int = 1024,
        scoring: Scoring | None = None,  # how the model scores or embeds, if it does
        pooled_bytes: int = 0,
        loras: AdapterSettings = NO_LORAS,
    ) -> None:
        self.intake = intake
        self.scoring = scoring
        self.metrics = metrics
        self.vocabulary = Vocabulary(intake.tokenizer.backend)
        self.state: State = "starting"
        self.reason = "the model is being loaded"
        # Start at 0, as counters without labels do.
        for level in ("kv", "embedding", "pixels", "encoder"):
            metrics.inc("saccade_image_hits_total", 0, level=level)
        self.permits = Permits(
            max_requests,
            "--max-queued-requests",
            lambda taken: metrics.set("saccade_requests_in_flight", taken),
        )
        self._adapter_folders, self._max_loras = loras.folders, loras.max_loras
        self._pooled_bytes = pooled_bytes
        metrics.set("saccade_adapters_max", loras.max_loras)
        self._engine = engine
        self._ready: Ready | None = None
        self._answers: dict[str, _Answer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._scraped = asyncio.Event()
        self._tokenizer_sent: asyncio.Task[None] | None = None

    @cached_property
    def adapters(self) -> AdapterRegistry:
        """The registry of LoRA adapters, created at first use. Its attribute `changes` sends the
        engine those changes that affect all requests, such as new weights.
        """
        from saccade.front.adapters import AdapterRegistry
        from saccade.front.changes import EngineChanges

        changes = EngineChanges(self._engine.send)
        return AdapterRegistry(changes, self._max_loras, self._adapter_folders)

    @cached_property
    def pooled_outputs(self) -> PooledOutputCache:
        """A cache of pooled outputs, for prompts that are read without generating answers. Created
        at first use.
        """
        from saccade.front.pooled_output_cache import PooledOutputCache

        return PooledOutputCache(self._pooled_bytes)

    # ---- start and stop

    async def start(
        self,
        on_progress: Callable[[Loading], None] = lambda _: None,
        check: Callable[[], Awaitable[None]] | None = None,
    ) -> Ready:
        """Start the image workers and the engine, and return the engine's `Ready` message.

        on_progress: called with the progress of loading.
        check: awaited before any client is served. It generates answers, and raises if one is
            wrong.

        Raises StartupError.
        """
        self.intake.media.start()
        try:
            ready, _ = await asyncio.gather(self._engine.start(on_progress), self.intake.warm_up())
            self._ready = ready
            if (encoders := self.intake.media.encoders) is not None:
                encoders.trust(ready.tower)
            self.spawn(self._listen())
            if self._adapter_folders:
                await self.adapters.load_wanted()
            if check is not None:
                self.reason = "its first answers are being checked"
                await check()
        except StartupError as error:
            self._fail(str(error))
            raise
        if self.state == "starting":
            self.state, self.reason = "ready", ""
        return ready

    async def drain(self, grace: float) -> None:
        """Reject new requests, and wait up to `grace` seconds for those in flight. Requests that
        have not finished by then fail.
        """
        if self.state in ("starting", "ready"):
            self.state, self.reason = "stopping", "the server is shutting down"
        deadline = time.monotonic() + grace
        while not (self.permits.idle.is_set() or self._engine.stall):
            if (left := deadline - time.monotonic()) <= 0:
                break
            with suppress(TimeoutError):
                await asyncio.wait_for(self.permits.idle.wait(), min(left, STALL_LOOK_SECONDS))
        self._end_all(EngineUnavailable("the server is shutting down"))

    async def stop(self, grace: float = 0.0) -> None:
        """Drain requests, then stop the engine and the image workers."""
        await self.drain(grace)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._engine.stop(0.0)
        await self.intake.media.close()

    @property
    def health(self) -> tuple[State | Literal["stalled"], str]:
        """The state of the server, and the reason unless it is "ready"."""
        if self.state == "ready" and (stall := self._engine.stall):
            return "stalled", stall
        return self.state, self.reason

    async def scrape(self) -> Metrics:
        """Request the engine's current metrics, and return them together with all others."""
        self.metrics.set("saccade_engine_stalled", self.health[0] == "stalled")
        if self.state in ("ready", "stopping") and self._ready is not None:
            self._scraped.clear()
            self._send(Scrape())
            with suppress(TimeoutError):
                await asyncio.wait_for(self._scraped.wait(), SCRAPE_SECONDS)
        return self.metrics

    def flush(self, embeddings: bool) -> None:
        """Drop all pooled outputs, and the engine's prefix cache. With `embeddings`, also drop
        image embeddings and the pixels that are cached for regions.

        Requests that are submitted later only find cache entries that requests in flight still use.
        Raises EngineUnavailable.
        """
        self.check_ready()
        if "pooled_outputs" in vars(self):
            self.pooled_outputs.clear()
        if embeddings:
            self.intake.media.kinds.forget()
        self._engine.send(Flush(embeddings))

    def check_ready(self) -> Ready:
        """Return the engine's `Ready` message. Raises EngineUnavailable unless the engine is
        ready.
        """
        if self.state != "ready" or self._ready is None:
            raise EngineUnavailable(self.reason)
        return self._ready

    def _check_started(self) -> Ready:
        """Return the engine's `Ready` message as `check_ready` does, but also while `check` (see
        `start`) is running.
        """
        if self.state == "starting" and self._ready is not None:
            return self._ready
        return self.check_ready()

    @property
    def proven(self) -> bool:
        """True if tests compare the answers of this architecture with transformers."""
        return not self.intake.spec.unproven

    # ---- requests

    async def prepare(
        self,
        request: GenerationRequest,
        client: Client = ANYBODY,
        budget: MemoryBudget = BOUNDLESS,
    ) -> PreparedRequest:
        """Prepare a request as `InputProcessor.prepare` does, for the engine's context length."""
        most = self._check_started().context_length
        if request.held and self.intake.steps.can_hold:
            self._send_tokenizer()  # while the front end prepares the request
        prepared = await self.intake.prepare(request, most, client, budget)
        if prepared.request.grammar:
            await asyncio.shield(self._send_tokenizer())
        return prepared

    def _send_tokenizer(self) -> asyncio.Task[None]:
        """Send the tokenizer to the engine, which needs it for grammars. Later calls return the
        same task.
        """
        if self._tokenizer_sent is None:
            self._tokenizer_sent = asyncio.create_task(self._write_tokenizer())
            self._tasks.add(self._tokenizer_sent)
        return self._tokenizer_sent

    async def _write_tokenizer(self) -> None:
        text = await self.intake.in_thread(lambda: self.intake.tokenizer.json)
        self._send(TokenizerText(text))

    async def generate(
        self, *prepared: PreparedRequest, streamed: bool = True
    ) -> AsyncGenerator[AnswerUpdate, None]:
        """Submit the requests, and yield updates of all answers as they arrive until every answer
        has finished.

        Answers are numbered in order: first the `n` answers to the first request, then those to the
        next. If `streamed` is False, an update may cover several tokens, which saves work. Close
        the iterator early (`contextlib.aclosing`) to abort unfinished answers.

        Raises the RequestError with which an answer failed.
        """
        ready = self._check_started()
        for each in prepared:
            if each.request.adapter != NO_ADAPTER:
                self.adapters.check(each.request.adapter)
        events: asyncio.Queue[AnswerUpdate | RequestError] = asyncio.Queue()
        group = prepared[0].request.id
        requests = [
            (request, each)
            for each in prepared
            for request in _requests(each, group, streamed or _may_stop(each))
        ]
        answers = [
            _Answer(request, each, choice, self.vocabulary, events)
            for choice, (request, each) in enumerate(requests)
        ]
        opened = [image for each in prepared for image in each.opened]
        media = self.intake.media
        for image in opened:
            media.hold_image(image)
        followers = [begin(self) for begin in prepared[0].follow]
        try:
            for answer in answers:
                self._answers[answer.request.id] = answer
                images = answer.request.images
                keeps = bool(images) and media.seen.disk is not None
                aliases = media.seen.take_same(images) if keeps else ()
                self._send(Submit(answer.request, aliases))
            unfinished = len(answers)
            while unfinished:
                event = await events.get()
                if isinstance(event, RequestError):
                    raise event
                unfinished -= event.finish is not None
                for follower in followers:
                    event = follower.take_update(event)
                yield _without_content(event) if prepared[0].silent else event
            for follower in followers:
                follower.end(prepared[0], ready)
        finally:
            for answer in answers:
                if self._forget(answer, "abort"):
                    self._send(Abort(answer.request.id))
            for image in opened:
                media.release_image(image)

    def taken(self, id: str) -> None:
        """Release the arena slot of an embedding, after the embedding has been sent. id: the
        engine's request.
        """
        self._send(Abort(id))

    def in_flight(self, client: Client, most: int) -> list[InFlight]:
        """Return the progress of at most `most` answers in flight, the oldest first.

        A client with one of several API keys gets only its own answers.
        """
        own = client.share("") if client.limited and client.name else None
        shown = (each for each in self._answers.values() if own in (None, each.request.client))
        return [each.standing for each in islice(shown, most)]

    def cancel(self, group: str) -> None:
        """Stop the answers to a request, which then raise Cancelled. group: its
        `PreparedRequest.request.id`.
        """
        for answer in [each for each in self._answers.values() if each.request.group == group]:
            self._send(Abort(answer.request.id))
            if self._forget(answer, "abort"):
                answer.events.put_nowait(Cancelled())

    def _forget(self, answer: _Answer, outcome: str) -> bool:
        """Remove an answer, and count it in the metrics under `outcome`. Returns False if it was
        already removed.
        """
        if self._answers.pop(answer.request.id, None) is None:
            return False
        if answer.request.caching.idle:
            return True
        self.metrics.inc("saccade_requests_total", outcome=outcome)
        self.metrics.observe("saccade_e2e_seconds", time.monotonic() - answer.request.arrival)
        return True

    def _end(self, answer: _Answer, error: RequestError) -> None:
        if self._forget(answer, "error"):
            answer.events.put_nowait(error)

    def _end_all(self, error: RequestError) -> None:
        for answer in list(self._answers.values()):
            self._send(Abort(answer.request.id))
            self._end(answer, error)

    # ---- the engine

    def _send(self, message: ToEngine) -> None:
        # If the engine has exited, `_listen` detects it and fails every request.
        with suppress(EngineUnavailable):
            self._engine.send(message)

    def _fail(self, reason: str) -> None:
        self.state, self.reason = "failed", reason
        if "adapters" in vars(self):
            self.adapters.changes.fail(reason)
        self._end_all(EngineUnavailable(reason))

    async def _listen(self) -> None:
        try:
            while True:
                message = await self._engine.receive()
                if isinstance(message, Output):
                    self._take(message)
                elif isinstance(message, MetricValues):
                    self.metrics.absorb(message.values)
                    self._scraped.set()
                elif isinstance(message, Altered):
                    self.adapters.changes.hear(message)
                elif isinstance(message, Failed):
                    self._fail(message.error)
        except EngineUnavailable as error:
            if self.state != "stopping":
                log.error("%s", error.message)
            self._fail(self.reason if self.state == "failed" else error.message)
        except Exception:  # no messages are received any more
            log.exception("the front end failed")
            self._fail("internal error: lost connection to the engine")

    def _take(self, news: Output) -> None:
        for encoded in news.encoded:
            self.intake.media.encoded(*encoded)
        for key, image in news.aliases:
            self.intake.media.seen.put_same(key, image)
        for key, slot in news.want:
            self.spawn(self._decode(key, slot))
        for key in news.unwanted:  # after the task just spawned has started
            asyncio.get_running_loop().call_soon(self.intake.media.call_off, key)
        for delta in news.deltas:
            if answer := self._answers.get(delta.id):
                try:
                    self._deliver(answer, delta)
                except Exception:  # a bug in one request must not affect the others
                    log.exception("an answer failed")
                    self._send(Abort(delta.id))
                    self._end(answer, InternalError())

    def _deliver(self, answer: _Answer, delta: Delta) -> None:
        if delta.finish in ("error", "abort"):
            self._end(answer, answer.error or _error_of(delta))
            return
        if delta.scores is not None or (delta.pooled_output is not None and delta.finish is None):
            update = AnswerUpdate(
                answer.choice, scores=delta.scores, pooled_output=delta.pooled_output
            )
            answer.events.put_nowait(update)
            return
        self._time(answer, len(delta.tokens), delta.admitted)
        event = replace(
            answer.advance(delta),
            found=tuple(self._found(answer, outcome) for outcome in delta.images),
            caching=_placed(delta.caching, answer.message_offsets),
            admitted=delta.admitted,
            embedding=delta.embedding,
            pooled_output=delta.pooled_output,
        )
        if event.finish is not None and self._forget(answer, event.finish) and delta.finish is None:
            self._send(Abort(answer.request.id))  # a stop string, which the engine does not see
        answer.events.put_nowait(event)

    def _found(self, answer: _Answer, outcome: ImageOutcome) -> FoundImage:
        found = FoundImage(
            outcome.image, outcome.level, outcome.missed_kv, outcome.missed_embedding, outcome.tier
        )
        if outcome.level in ("kv", "embedding"):
            return found
        key = answer.request.images[outcome.image].key
        if outcome.tiles:
            found = replace(found, tiles=outcome.tiles, parts=self.intake.media.tile_parts(key))
        spent = self.intake.media.spent(key)
        passed = (spent.encoded - answer.submitted) * 1e3
        # An image may have been decoded while its request arrived.
        decoding = min(spent.decode_ms, max(0.0, spent.decoded - answer.submitted) * 1e3)
        elsewhere = decoding + spent.ship_ms + spent.encode_ms + spent.encoder_ms
        wait = max(0.0, passed - elsewhere)
        return replace(found, wait_ms=wait, **asdict(spent))

    def _time(self, answer: _Answer, num_tokens: int, admitted: float) -> None:
        if not num_tokens or answer.request.caching.idle:
            return
        now = time.monotonic()
        if answer.last_news is None:
            self.metrics.observe("saccade_queue_seconds", admitted - answer.request.arrival)
            self.metrics.observe("saccade_ttft_seconds", now - answer.request.arrival)
        else:
            for _ in range(num_tokens):
                self.metrics.observe("saccade_itl_seconds", (now - answer.last_news) / num_tokens)
        answer.last_news = now

    async def _decode(self, key: ImageKey, slot: PixelSlot) -> None:
        """Decode an image, and send its pixels to the engine.

        If that fails, send the error. The engine then ends every request with this image.
        """
        try:
            names = await self.intake.media.bring(key, slot)
            self._send(EmbeddingReady(key) if names is None else PixelsReady(key, *names))
        except asyncio.CancelledError:
            self._send(PixelsFailed(key, "no request needs the image any more"))
        except RequestError as error:
            self._report_pixel_error(key, error)
        except Exception:  # the request must still end
            log.exception("an image could not be sent to the engine")
            self._report_pixel_error(key, InternalError())

    def _report_pixel_error(self, key: ImageKey, error: RequestError) -> None:
        for answer in self._answers.values():
            for image, place in zip(answer.request.images, answer.places, strict=True):
                if image.key == key:
                    answer.error = (
                        ImageError(error.message, place, error.code)
                        if isinstance(error, ImageError)
                        else error
                    )
        self._send(PixelsFailed(key, error.message))

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Run `work` as a background task, which is cancelled when the server stops."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _error_of(delta: Delta) -> RequestError:
    said = delta.error or "the engine aborted the request"
    if delta.code == InternalError.code:
        log.error("request %s: %s", delta.id, said)
        return InternalError(said)
    if delta.code:
        return InvalidRequest(said, code=delta.code)
    return EngineUnavailable(said, code="engine_error")


def _placed(
    report: CacheReport | None, message_offsets: Sequence[tuple[int, str]]
) -> CacheReport | None:
    """Return the report with the path of the message part that contains the first token missing in
    the cache.
    """
    if report is None or report.missed is None:
        return report
    after = bisect_right(message_offsets, report.missed.token, key=lambda offset: offset[0])
    place = message_offsets[after][1] if after < len(message_offsets) else ""
    return replace(report, missed=replace(report.missed, place=place))


def _without_content(event: AnswerUpdate) -> AnswerUpdate:
    finish: Finish | None = "length" if event.finish else None
    return replace(event, text="", parts=(), num_tokens=0, logprobs=(), finish=finish, stop=None)


def _may_stop(prepared: PreparedRequest) -> bool:
    """Return True if the front end may detect the end of the answer before the engine does."""
    return bool(prepared.request.sampling.stop) or prepared.reading.single


def _requests(prepared: PreparedRequest, group: str, streamed: bool) -> Iterator[Request]:
    """Yield a request to the engine for each answer. They have the same group, and ascending
    seeds.
    """
    request = prepared.request
    for choice in range(prepared.n):
        sampling = replace(request.sampling, seed=(request.sampling.seed + choice) % 2**63)
        # Only the first answer reports the prompt's scores.
        top = None if choice else request.prompt_logprobs
        id = f"{request.id}-{choice}"
        yield replace(
            request,
            id=id,
            sampling=sampling,
            group=group,
            prompt_logprobs=top,
            streamed=streamed,
        )
