"""POST /v1/chat/completions/render, /v1/completions/render and /v1/messages/render: return the
prompt of a request, in the format of vLLM's render endpoints. No image is decoded, and the engine
is not used.

Images with the same embedding have the same hash in all responses. Prompts with equal tokens and
hashes have equal KV, within one `cache_salt`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from saccade.api.chat.read import read_chat, read_completion
from saccade.api.handlers import Endpoint, RequestHandler
from saccade.api.mounting import ApiContext
from saccade.core.types import NO_ADAPTER, Span
from saccade.edge.body import while_connected
from saccade.edge.headers import request_id
from saccade.front.prepared import Prompt
from saccade.front.prompt_encoder import GenerationRequest
from saccade.plugins.messages.read import read_message


class TokenRange(Struct):
    """The range of an image's tokens, including text that the model's format has between them."""

    offset: int
    """The index of the first token."""
    length: int
    """The number of tokens."""


class Features(Struct):
    """The images and videos of a prompt in order, by "image" or "video"."""

    mm_hashes: dict[str, list[str]]
    """Cache keys. A video has one per pair of frames."""
    mm_placeholders: dict[str, list[TokenRange]]
    """The range of tokens of each one."""


class RenderedPrompt(Struct):
    """A prompt as the engine receives it."""

    request_id: str
    """The response's x-request-id."""
    model: str
    """The name of the model or adapter."""
    token_ids: Sequence[int]
    """The prompt's tokens, with a placeholder for each row of an image's embedding."""
    features: Features | None
    """Null for text."""
    cache_salt: str | None = None
    """The request's cache_salt."""


Read = Callable[[bytearray, int], tuple[str | None, list[GenerationRequest]]]
"""Parses a body, and returns the requested model and the prompts. Raises InvalidRequest."""


def render_routes(api: ApiContext) -> list[Route]:
    renders = _Renderer(api.handler)
    return [
        Route(f"{path}/render", Endpoint(partial(renders.render, read, listed)), methods=["POST"])
        for path, read, listed in (
            ("/v1/chat/completions", _chat, False),
            ("/v1/completions", _completion, True),
            ("/v1/messages", _messages, False),
        )
    ]


def _chat(body: bytearray, context_length: int) -> tuple[str | None, list[GenerationRequest]]:
    request, reply, _ = read_chat(body, context_length)
    return reply.model, [request]


def _completion(body: bytearray, context_length: int) -> tuple[str | None, list[GenerationRequest]]:
    requests, reply, _ = read_completion(body, context_length)
    return reply.model, requests


def _messages(body: bytearray, context_length: int) -> tuple[str | None, list[GenerationRequest]]:
    asked = read_message(body, context_length)
    return asked.reply.model, asked.requests


@dataclass(frozen=True, slots=True)
class _Renderer:
    handler: RequestHandler

    async def render(
        self, read: Read, listed: bool, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Send the prompt in a request, or a list of prompts if `listed`.

        read: parses the body.
        """
        async with self.handler.admission.admit(scope, receive) as (body, held):
            front = self.handler.front
            model, requests = await self.handler.read_body(read, body)
            name, adapter = self.handler.model_of(model)
            length = front.check_ready().context_length
            rendered = []
            for request in requests:
                if adapter != NO_ADAPTER:
                    request = replace(request, adapter=adapter)
                prompt = await while_connected(
                    receive, front.intake.read_prompt(request, length, held.client, held)
                )
                rendered.append(
                    RenderedPrompt(
                        request_id.get(),
                        name,
                        prompt.tokens,
                        features_of(prompt),
                        request.cache_salt or None,
                    )
                )
            content: Any = rendered if listed else rendered[0]
            raw = await front.intake.in_thread(partial(msgspec.json.encode, content))
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(raw)).encode()),
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": raw})


def features_of(prompt: Prompt) -> Features | None:
    """Return the image hashes and token ranges of a prompt, or None if it has no images."""
    if not prompt.opened:
        return None
    spans: list[list[Span]] = [[] for _ in prompt.opened]
    for span in prompt.spans:
        spans[span.image].append(span)
    features = Features({}, {})
    for opened, own in zip(prompt.opened, spans, strict=True):
        kind = "video" if opened.of_video else "image"
        place = TokenRange(own[0].start, own[-1].end - own[0].start)
        features.mm_hashes.setdefault(kind, []).append(opened.image.key.identifier)
        features.mm_placeholders.setdefault(kind, []).append(place)
    return features
