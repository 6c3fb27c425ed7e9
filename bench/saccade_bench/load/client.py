"""One streamed chat completion over HTTP, with the arrival times of its parts.

The load generator uses aiohttp so that it is not the bottleneck: with 64 concurrent streams, it
takes 22 us of CPU time per event, and httpx takes 100 (decision 048).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import aiohttp
import msgspec

from saccade.core.decoders import json_decoder
from saccade.core.errors import ConfigError
from saccade.tools.server import cause, named_first, refusal, root, said, unreachable
from saccade_bench.options import TargetOptions

TIMEOUT = 600.0
STREAM_END = b"[DONE]"


class _Text(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    delta: _Text = msgspec.field(default_factory=_Text)
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None
    image_tokens: int | None = None
    video_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    saccade: dict[str, Any] | None = None


_decode = json_decoder(_Event).decode


@dataclass(frozen=True, slots=True)
class ReplyUsage:
    """Token counts as reported by the server, or None if it does not report them."""

    prompt: int | None = None
    completion: int | None = None
    cached: int | None = None
    image: int | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason for an incomplete response.

    `kind` is one of "timeout", "connection", "HTTP 429" (any status), "error in stream",
    "broken stream" and "not sent".
    """

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class BenchReply:
    """The outcome of one request.

    Times are `time.perf_counter()` seconds. `arrivals` has one for each event with text. If a
    response has no text (only an invisible token), its finish counts as the first arrival.
    """

    sent: float
    arrivals: tuple[float, ...]
    done: float
    text: str = ""
    usage: ReplyUsage = field(default_factory=ReplyUsage)
    finish: str | None = None
    trace: dict[str, Any] | None = None
    failure: Failure | None = None


class Stream:
    """Parser of one response's server-sent events, fed with bytes as they arrive."""

    def __init__(self) -> None:
        self._rest = b""
        self.pieces: list[str] = []
        self.arrivals: list[float] = []
        self.usage = ReplyUsage()
        self.finish: str | None = None
        self.trace: dict[str, Any] | None = None
        self.ended = False
        self.failure: Failure | None = None

    def feed(self, data: bytes, now: float) -> None:
        """Parse bytes that arrived at `now` (`time.perf_counter()` seconds).

        Lines may be split anywhere. Each event must be a single `data:` line, as in OpenAI's API.
        """
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, data: bytes, now: float) -> None:
        if data == STREAM_END:
            self.ended = True
            return
        try:
            event = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.failure = self.failure or Failure("broken stream", f"{error}: {data[:200]!r}")
            return
        if event.error is not None:
            self.failure = self.failure or Failure(
                "error in stream", said({"error": event.error}) or str(event.error)[:500]
            )
        for choice in event.choices:
            text = (choice.delta.reasoning_content or choice.delta.reasoning or "") + (
                choice.delta.content or ""
            )
            self.finish = choice.finish_reason or self.finish
            if text or (choice.finish_reason and not self.arrivals):
                self.pieces.append(choice.delta.content or "")
                self.arrivals.append(now)
        if event.usage is not None:
            details = event.usage.prompt_tokens_details or _PromptDetails()
            self.usage = ReplyUsage(
                event.usage.prompt_tokens,
                event.usage.completion_tokens,
                details.cached_tokens,
                vision_tokens(details),
            )
        self.trace = event.saccade or self.trace


def vision_tokens(details: _PromptDetails) -> int | None:
    """Return the tokens of images and videos together, or None if the server reports neither."""
    told = (details.image_tokens, details.video_tokens)
    return None if told == (None, None) else sum(count or 0 for count in told)


class BenchClient:
    """Client of one server, with any number of concurrent requests. Use as `async with`."""

    def __init__(self, target: TargetOptions) -> None:
        self.root = root(target.url)
        self._timeout = target.timeout or TIMEOUT
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=None),
            timeout=aiohttp.ClientTimeout(total=None),
            headers={"Content-Type": "application/json", **headers(target)},
        )

    async def __aenter__(self) -> BenchClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._session.close()

    async def count_tokens(self, model: str, text: str) -> int | None:
        """Return the number of tokens of a text, or None if the server has no /tokenize."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        try:
            async with self._session.post(f"{self.root}/tokenize", json=body) as reply:
                count = (await reply.json())["count"] if reply.ok else None
        except (aiohttp.ClientError, ValueError, TypeError, KeyError):
            return None
        return count if isinstance(count, int) else None

    async def model(self) -> str:
        """Return the first model that the server lists. Raises ConfigError if it is unreachable."""
        try:
            async with self._session.get(f"{self.root}/v1/models") as reply:
                return named_first(self.root, reply.status, await reply.text(errors="replace"))
        except (aiohttp.ClientError, OSError) as error:
            raise unreachable(self.root, error) from None

    async def text(self, path: str) -> str | None:
        """Return the body of a GET request, or None if it failed."""
        try:
            async with self._session.get(f"{self.root}{path}") as reply:
                return await reply.text() if reply.ok else None
        except (aiohttp.ClientError, OSError):
            return None

    async def complete(self, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """Request a chat completion without streaming. Return None if it failed."""
        try:
            async with self._session.post(f"{self.root}/v1/chat/completions", json=body) as reply:
                found = await reply.json(content_type=None) if reply.ok else None
                return found if isinstance(found, dict) else None
        except (aiohttp.ClientError, OSError, ValueError):
            return None

    async def stream(self, body: bytes) -> BenchReply:
        """Stream a chat completion. Failures are part of the reply and never raised."""
        stream, sent, now = Stream(), time.perf_counter(), time.perf_counter
        failure: Failure | None = None
        try:
            async with asyncio.timeout(self._timeout):
                try:
                    failure = await self._exchange(body, stream)
                except aiohttp.ServerDisconnectedError:
                    if stream.arrivals:
                        raise
                    # Some servers (such as llama.cpp's) close keep-alive connections unannounced.
                    failure = await self._exchange(body, stream)
        except TimeoutError:
            failure = Failure("timeout", f"no whole answer within {self._timeout:g} s")
        except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError) as error:
            failure = Failure("broken stream" if stream.arrivals else "connection", cause(error))
        except (aiohttp.ClientError, OSError) as error:
            failure = Failure("connection", cause(error))
        done = now()
        failure = failure or stream.failure
        if failure is None and not (stream.ended and stream.finish):
            failure = Failure(
                "broken stream", "the stream ended without a finish_reason and [DONE]"
            )
        text = "".join(stream.pieces)
        return BenchReply(
            sent,
            tuple(stream.arrivals),
            done,
            text,
            stream.usage,
            stream.finish,
            stream.trace,
            failure,
        )

    async def _exchange(self, body: bytes, stream: Stream) -> Failure | None:
        """Send the request and parse its stream. Does not catch aiohttp's exceptions."""
        url = f"{self.root}/v1/chat/completions"
        async with self._session.post(url, data=body) as reply:
            if not reply.ok:
                told = refusal(reply.status, await reply.text(errors="replace"))
                return Failure(f"HTTP {reply.status}", told)
            async for data in reply.content.iter_any():
                stream.feed(data, time.perf_counter())
        return None


def headers(target: TargetOptions) -> dict[str, str]:
    """Return the headers of --header and --api-key. Raises ConfigError if one has no `=`."""
    found = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    for line in target.header:
        name, equals, value = line.partition("=")
        if not equals:
            raise ConfigError(f"--header {line}: expected NAME=VALUE")
        found[name.strip()] = value.strip()
    return found
