"""Ask a server questions about images, and record the signs of a mixed-up image."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx

from saccade_bench.prove.pictures import NumberImage

QUESTION = "What number is this?"
MAX_TOKENS = 32
TOP = 5
BUSY = (429, 503)
PAUSE = 0.5


class Refused(Exception):
    """The server rejected the request. The message is the server's."""


@dataclass(frozen=True, slots=True)
class JudgedAnswer:
    """An answer. Values that the server does not report are None.

    `prompt` and `cached` are numbers of prompt tokens. `scores` has, for each generated token, its
    log-probability and those of the top alternatives.
    """

    text: str
    prompt: int | None
    cached: int | None
    scores: tuple[tuple[tuple[str, float], ...], ...] | None


@dataclass(frozen=True, slots=True)
class SentRequest:
    """The body of a request, and its answer."""

    body: dict[str, Any]
    answer: JudgedAnswer


class Asker:
    """A client for one model of a server. Use it as `async with`."""

    def __init__(
        self,
        address: str,
        model: str,
        headers: dict[str, str],
        timeout: float,
        extra: Mapping[str, Any],
    ) -> None:
        """`extra` is merged into every request body."""
        self.model = model
        self.exchanges: list[SentRequest] = []  # cleared before each case
        self._extra = extra
        self._client = httpx.AsyncClient(base_url=address, headers=headers, timeout=timeout)
        self._patience = timeout
        self._scores = True

    async def __aenter__(self) -> Asker:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.aclose()

    async def other_model(self) -> str | None:
        """Return another model that the server lists, or None."""
        listed = (await self._client.get("/v1/models")).raise_for_status().json()["data"]
        return next((each["id"] for each in listed if each["id"] != self.model), None)

    async def ready(self) -> None:
        """Wait until the server lists its models. Raises TimeoutError."""
        async with asyncio.timeout(self._patience):
            while True:
                with suppress(httpx.TransportError):
                    if (await self._client.get("/v1/models")).is_success:
                        return
                await asyncio.sleep(PAUSE)

    async def ask(
        self, images: Sequence[NumberImage | str], question: str = QUESTION, **extra: Any
    ) -> JudgedAnswer:
        """Return a greedy answer about images (files or URLs) in this order, followed by a
        question.

        Raises Refused for a 4xx status, and httpx.HTTPError for other failures.
        """
        parts = [{"type": "image_url", "image_url": {"url": url_of(image)}} for image in images]
        return await self.say([*parts, {"type": "text", "text": question}], **extra)

    async def ask_one(self, image: NumberImage | str) -> JudgedAnswer:
        return await self.ask([image])

    async def abort(self, image: NumberImage, seconds: float) -> None:
        """Ask about an image, and close the connection after some seconds."""
        part = {"type": "image_url", "image_url": {"url": url_of(image)}}
        asked = [{"role": "user", "content": [part, {"type": "text", "text": QUESTION}]}]
        body = {**self.body(asked), "stream": True}
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._client.post("/v1/chat/completions", json=body)

    async def say(self, parts: Sequence[dict[str, Any]], **extra: Any) -> JudgedAnswer:
        """Do what `ask` does, with the message's content parts."""
        return await self.chat([{"role": "user", "content": list(parts)}], **extra)

    async def chat(self, messages: Sequence[dict[str, Any]], **extra: Any) -> JudgedAnswer:
        """Do what `ask` does, with all messages."""
        body = self.body(messages, **extra)
        answer = await self.send(body)
        self.exchanges.append(SentRequest(body, answer))
        return answer

    def body(self, messages: Sequence[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        return {
            "model": self.model,
            "messages": list(messages),
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
            **self._extra,
            **extra,
        }

    async def send(self, body: dict[str, Any]) -> JudgedAnswer:
        """Return the answer to a body of `body`, with log-probabilities if the server has them."""
        if self._scores:
            try:
                return await self._post({**body, "logprobs": True, "top_logprobs": TOP})
            except Refused:  # the server may not support logprobs
                answer = await self._post(body)
                self._scores = False
                return answer
        return await self._post(body)

    async def _post(self, body: dict[str, Any]) -> JudgedAnswer:
        until = time.monotonic() + self._patience
        while True:
            reply = await self._client.post("/v1/chat/completions", json=body)
            if reply.status_code not in BUSY or time.monotonic() > until:
                break
            await asyncio.sleep(PAUSE)
        if 400 <= reply.status_code < 500:
            raise Refused(refusal(reply.status_code, reply.text))
        reply.raise_for_status()
        return _read(reply.json())


def says(text: str, expected: str) -> bool:
    """Return True if the text contains `expected` as a separate word. Ignores case and thousands
    separators.
    """
    bare = re.sub(r"(?<=\d)[, ](?=\d{3}\b)", "", text)
    word = rf"(?<!\w){re.escape(expected)}(?!\w)"
    return any(re.search(word, form, re.IGNORECASE) for form in (text, bare))


def refusal(status: int, body: str) -> str:
    """Return the message of an error in OpenAI's format, or the start of another body."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return body.strip()[:500] or f"HTTP {status} without a body"


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def url_of(image: NumberImage | str) -> str:
    if isinstance(image, str):
        return image
    return data_url(image.encoded, image.kind)


def _read(answer: dict[str, Any]) -> JudgedAnswer:
    choice, usage = answer["choices"][0], answer.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    listed = (choice.get("logprobs") or {}).get("content")
    scores = None
    if listed:
        scores = tuple(
            tuple((each["token"], each["logprob"]) for each in (token, *token["top_logprobs"]))
            for token in listed
        )
    return JudgedAnswer(
        choice["message"].get("content") or "",
        usage.get("prompt_tokens"),
        details.get("cached_tokens"),
        scores,
    )
