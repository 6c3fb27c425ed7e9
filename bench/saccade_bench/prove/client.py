"""Ask a server questions about images, and record the signs of a mixed-up image."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from saccade.tools.server import refusal
from saccade_bench.image_files import data_url
from saccade_bench.prove.pictures import NumberImage

QUESTION = "What number is this?"
MAX_TOKENS = 32
TOP = 5
BUSY = 429
PAUSE = 0.5


class Refused(Exception):
    """The server rejected the request. The message is the server's."""


@dataclass(frozen=True, slots=True)
class JudgedAnswer:
    """An answer. Values that the server does not report are None.

    `prompt` and `cached` are numbers of prompt tokens. `scores` has the log-probabilities of each
    generated token and of the top alternatives.
    """

    text: str
    prompt: int | None
    cached: int | None
    scores: tuple[tuple[str, float], ...] | None


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

    async def ask(
        self, images: Sequence[NumberImage | str], question: str = QUESTION, **extra: Any
    ) -> JudgedAnswer:
        """Return a greedy answer about images (files or URLs) in this order, followed by a
        question.

        Raises Refused for a 4xx status, and httpx.HTTPError for other failures.
        """
        parts = [{"type": "image_url", "image_url": {"url": url_of(image)}} for image in images]
        return await self.say([*parts, {"type": "text", "text": question}], **extra)

    async def say(self, parts: Sequence[dict[str, Any]], **extra: Any) -> JudgedAnswer:
        """Do what `ask` does, with the message's content parts."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": list(parts)}],
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
            **self._extra,
            **extra,
        }
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
            if reply.status_code != BUSY or time.monotonic() > until:
                break
            await asyncio.sleep(PAUSE)
        if 400 <= reply.status_code < 500:
            raise Refused(refusal(reply.status_code, reply.text))
        reply.raise_for_status()
        return _read(reply.json())


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
            (each["token"], each["logprob"])
            for token in listed
            for each in (token, *token.get("top_logprobs", ()))
        )
    return JudgedAnswer(
        choice["message"].get("content") or "",
        usage.get("prompt_tokens"),
        details.get("cached_tokens"),
        scores,
    )
