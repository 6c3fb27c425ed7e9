"""A `Sampler` that requests answers from an OpenAI-compatible server, and messages with images."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from saccade.tools.server import cause, first_model, refusal, root
from saccade_bench.eval.contract import EvalMessage, SampleError

SIGNATURES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"RIFF": "webp", b"GIF8": "gif"}


def user_message(parts: Iterable[str | bytes]) -> EvalMessage:
    """Return a user message with text and encoded images, in order."""
    content: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
        else:
            content.append({"type": "image_url", "image_url": {"url": data_url(part)}})
    return {"role": "user", "content": content}


def data_url(encoded: bytes) -> str:
    kind = next((kind for start, kind in SIGNATURES.items() if encoded.startswith(start)), "png")
    return f"data:image/{kind};base64,{base64.b64encode(encoded).decode()}"


@dataclass(frozen=True)
class HttpSampler:
    """A `Sampler` of greedy answers. It is thread-safe."""

    client: httpx.Client
    model: str
    max_tokens: int
    extra: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def connect(
        base_url: str,
        model: str | None,
        headers: Mapping[str, str],
        max_tokens: int,
        extra: Mapping[str, Any],
        timeout: float,
    ) -> HttpSampler:
        """Return a sampler for a model, by default the server's first.

        Raises ConfigError if the server does not list its models.
        """
        address = root(base_url)
        name = model or first_model(address, headers, timeout)
        client = httpx.Client(
            base_url=address,
            headers=dict(headers),
            timeout=timeout,
            limits=httpx.Limits(max_connections=None),
        )
        return HttpSampler(client, name, max_tokens, extra)

    def __call__(self, messages: list[EvalMessage]) -> str:
        body = {
            "model": self.model,
            "messages": messages,
            "temperature": 0,
            "max_tokens": self.max_tokens,
            **self.extra,
        }
        try:
            reply = self.client.post("/v1/chat/completions", json=body)
        except httpx.HTTPError as error:
            raise SampleError(cause(error)) from None
        if reply.is_error:
            raise SampleError(f"HTTP {reply.status_code}: {refusal(reply.status_code, reply.text)}")
        try:
            return str(reply.json()["choices"][0]["message"]["content"] or "")
        except (ValueError, KeyError, IndexError, TypeError):
            raise SampleError(f"not a chat completion: {reply.text[:500]}") from None
