"""Computes values from prompts without generating answers, for embeddings, scores and decisions.

A request may contain many prompts. Their texts are tokenized and checked first. Then their images
are opened, each only once. Cached results are reused without calling the engine. Identical prompts
in a request are computed once.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
from blake3 import blake3

from saccade.core.client import ANYBODY, Client
from saccade.core.errors import InvalidRequest
from saccade.core.types import (
    Caching,
    PooledOutput,
    PromptReading,
    Request,
    SamplingParams,
)
from saccade.front.prepared import PreparedRequest, Prompt, count_tokens
from saccade.front.prompt_encoder import EncodedPrompt, GenerationRequest, takes_long
from saccade.front.read_requests import MAX_TOKENS, ReadRequest, SharedReadRequest, WasRead
from saccade.front.request_manager import RequestManager
from saccade.front.steps.open_files import OpenFiles
from saccade.front.steps.open_sources import OpenSources
from saccade.media.sources.fairness import BOUNDLESS, MemoryBudget
from saccade.media.sources.source import Source
from saccade.text.prompt.special_tokens import Rendered

MAX_SHARED = 8 * MAX_TOKENS
"""Maximum number of tokens in prompts with a common prefix, which counts once for each prompt."""
_FEW = 16
"""Maximum number of prompts that are tokenized on the event loop. If there are more, they are
tokenized in a thread.
"""
_ONE_TOKEN = SamplingParams(max_tokens=1)


class PromptReader:
    """Executes `ReadRequest`s with one `RequestManager`."""

    def __init__(self, front: RequestManager) -> None:
        self._front = front
        self._intake = front.intake

    async def read_prompts(
        self,
        asked: Sequence[ReadRequest] | SharedReadRequest,
        client: Client = ANYBODY,
        budget: MemoryBudget = BOUNDLESS,
        max_tokens: int = MAX_TOKENS,
    ) -> list[WasRead]:
        """Compute the requested values for each prompt, and return the results in order.

        budget: counts the bytes of images that are fetched.
        max_tokens: the maximum in all prompts, unless they have a common prefix.

        Raises a RequestError that names the field.
        """
        if not isinstance(asked, SharedReadRequest):
            return await self._run(await self._prepare(asked, client, budget, max_tokens))
        prepared = await self._prepare_shared(asked, client, budget)
        # The first prompt computes the common prefix, so that the others find it in the cache.
        first = await self._run(prepared[:1])
        return first + (await self._run(prepared[1:]) if len(prepared) > 1 else [])

    # ---- prompts

    async def _prepare(
        self, reads: Sequence[ReadRequest], client: Client, budget: MemoryBudget, max_tokens: int
    ) -> list[PreparedRequest]:
        intake, most = self._intake, self._front.check_ready().context_length
        opened_files = await intake.steps.step(OpenFiles).opened(
            [each.request for each in reads], client, budget, most
        )
        reads = [
            replace(read, request=each) for read, each in zip(reads, opened_files, strict=True)
        ]
        sources = {id(each): each for read in reads for each in _sources(read.request)}
        intake.media.check_sources(tuple(sources.values()))
        encode = partial(self._encode, reads, most, max_tokens)
        many = len(reads) > _FEW or any(takes_long(read.request) for read in reads)
        encoded = await intake.in_thread(encode) if many else encode()
        opened = await intake.steps.step(OpenSources).opened(
            reads[0].request, tuple(sources.values()), client, budget
        )
        found = dict(zip(sources, opened, strict=True))

        def finish() -> list[PreparedRequest]:
            made, total = [], 0
            for read, each in zip(reads, encoded, strict=True):
                shown = tuple(found[id(source)] for source in _sources(read.request))
                total += count_tokens(each, shown)
                _check_total(total, max_tokens)
                prompt = intake.prompt(read.request, each, shown)
                _check_fits(read.place, len(prompt.tokens), most)
                made.append(_prepared(read.request, prompt, read.reading, client))
            return made

        return await intake.in_thread(finish) if many else finish()

    def _encode(
        self, reads: Sequence[ReadRequest], most: int, max_tokens: int
    ) -> list[EncodedPrompt]:
        encoded, total = [], 0
        for read in reads:
            each = self._intake.prompts.encode_now(read.request, most)
            if not each.tokens:
                raise InvalidRequest(f"{read.place}: the input must not be empty", read.place)
            total += len(each.tokens)
            _check_total(total, max_tokens)
            encoded.append(each)
        return encoded

    async def _prepare_shared(
        self, asked: SharedReadRequest, client: Client, budget: MemoryBudget
    ) -> list[PreparedRequest]:
        """Tokenize the common prefix once, then the rest of each prompt.

        Each prompt has the same tokens as if it had been sent separately.
        """
        intake, most = self._intake, self._front.check_ready().context_length
        files = intake.steps.step(OpenFiles)
        (request,) = await files.opened([asked.request], client, budget, most)
        asked, sources = replace(asked, request=request), _sources(request)
        intake.media.check_sources(sources)
        head, tails = await intake.in_thread(partial(self._encode_shared, asked, most))
        opened = await intake.steps.step(OpenSources).opened(request, sources, client, budget)
        prompt = intake.prompt(request, head, opened)
        made, total = [], 0
        for tail, (_, reading) in zip(tails, asked.tails, strict=True):
            total += len(prompt.tokens) + len(tail)
            _check_total(total, MAX_SHARED)
            whole = replace(prompt, tokens=(*prompt.tokens, *tail))
            _check_fits(asked.place, len(whole.tokens), most)
            made.append(_prepared(request, whole, reading, client))
        return made

    def _encode_shared(
        self, asked: SharedReadRequest, most: int
    ) -> tuple[EncodedPrompt, list[list[int]]]:
        request, intake, mark = asked.request, self._intake, asked.mark
        chat = request.chat
        rendered = intake.prompts.render(chat, request, most)
        if rendered.text.count(mark) != 1:
            raise InvalidRequest(
                f"{asked.place}: the model's chat template changes the text of the last message",
                asked.place,
            )
        at = rendered.text.index(mark)
        begin = Rendered(rendered.text[:at], rendered.marked[:at])
        end = Rendered(rendered.text[at + len(mark) :], rendered.marked[at + len(mark) :])
        tokens = intake.prompts.tokens_of(begin, asked.place, most)
        found = intake.prompts.encode_now(request, most).message_offsets if chat.marks else ()
        head = EncodedPrompt(
            tokens, message_offsets=tuple(each for each in found if each[0] <= len(tokens))
        )
        tails, total = [], 0
        for at, (text, _) in enumerate(asked.tails, 1):
            # The client's text must not be read as special tokens, so its characters are masked.
            tail = Rendered(text + end.text, "x" * len(text) + end.marked)
            tails.append(intake.prompts.tokens_of(tail, asked.place, most))
            if (total := total + len(tails[-1])) > MAX_TOKENS:
                raise InvalidRequest(
                    f"{asked.tails_place}: the first {at} of {len(asked.tails)} have {total} "
                    f"tokens; the limit for all is {MAX_TOKENS}: send several requests",
                    asked.tails_place,
                    "too_many_tokens",
                )
        return head, tails

    # ---- results

    async def _run(self, prepared: Sequence[PreparedRequest]) -> list[WasRead]:
        kept = self._front.pooled_outputs
        epoch, names = kept.epoch, [name_of(each.request) for each in prepared]
        found = {
            name: pooled_output for name in names if (pooled_output := kept.get(name)) is not None
        }
        self._front.metrics.inc("saccade_readouts_total", len(found), source="cache")
        missing = {
            name: each for name, each in zip(names, prepared, strict=True) if name not in found
        }
        cached: dict[bytes, tuple[int, int]] = {}
        if missing:
            order, parts = list(missing), dict[bytes, list[PooledOutput]]()
            async with aclosing(self._front.generate(*missing.values())) as events:
                async for event in events:
                    name = order[event.choice]
                    if event.pooled_output is not None:
                        parts.setdefault(name, []).append(event.pooled_output)
                    if event.finish is not None:
                        kept_now = event.caching.written if event.caching else ()
                        cached[name] = event.cached.total, sum(count for _, count in kept_now)
            for name, runs in parts.items():
                found[name] = _joined(runs)
                kept.put(name, found[name], epoch)
            self._front.metrics.inc("saccade_readouts_total", len(parts), source="model")
        return [
            _was_read(found[name], each.request, cached.get(name))
            for name, each in zip(names, prepared, strict=True)
        ]


def name_of(request: Request) -> bytes:
    """Return the cache key of a request's result.

    Requests have the same key if they are of one tenant, for the same values of the same prompt
    with the same adapter.
    """
    images = [
        (span.start, span.length, span.offset, key.digest, key.settings, key.salt)
        for span in request.spans
        for key in (request.images[span.image].key,)
    ]
    adapter = request.adapter.fingerprint
    asked = msgspec.msgpack.encode((request.cache_salt, adapter, request.reading, images))
    tokens = np.array(request.tokens, np.int32).tobytes()
    return blake3(tokens + asked + len(tokens).to_bytes(8)).digest()


def _joined(runs: Sequence[PooledOutput]) -> PooledOutput:
    values = b"".join(run.values for run in runs)
    return PooledOutput(runs[0].start, runs[0].width, values)


def _was_read(
    pooled_output: PooledOutput, request: Request, used: tuple[int, int] | None
) -> WasRead:
    """Decode a pooled output, and count tokens.

    used: how many tokens were cached, and how many were newly pinned. None if the output itself was
    cached.
    """
    values = np.frombuffer(pooled_output.values, np.float32).reshape(-1, pooled_output.width)
    total, images = len(request.tokens), sum(span.length for span in request.spans)
    cached, written = (total, 0) if used is None else used
    return WasRead(values, total, cached, written, images)


def _prepared(
    request: GenerationRequest, prompt: Prompt, reading: PromptReading, client: Client
) -> PreparedRequest:
    read = Request(
        secrets.token_hex(12),
        prompt.tokens,
        prompt.spans,
        tuple(each.image for each in prompt.opened),
        _ONE_TOKEN,
        client.salt(request.cache_salt),
        time.monotonic(),
        client.share(request.cache_salt),
        caching=Caching(prompt.breakpoints, adapter=request.adapter),
        reading=reading,
    )
    return PreparedRequest(read, prompt.opened, prompt.places)


def _sources(request: GenerationRequest) -> tuple[Source, ...]:
    for video in request.chat.videos:
        raise InvalidRequest(
            f"{video.param}: videos are not supported by this endpoint: send frames as images",
            video.param,
        )
    return request.chat.sources


def _check_fits(place: str, tokens: int, most: int) -> None:
    if tokens > most:
        raise InvalidRequest(
            f"This model's maximum context length is {most} tokens; {place} has {tokens}: shorten "
            "it, or send smaller images",
            place,
            "context_length_exceeded",
        )


def _check_total(tokens: int, most: int = MAX_TOKENS) -> None:
    if tokens > most:
        raise InvalidRequest(
            f"the request has over {most} tokens: send its inputs in several requests",
            code="too_many_tokens",
        )
