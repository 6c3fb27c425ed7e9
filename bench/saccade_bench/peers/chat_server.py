"""OpenAI's chat completions around whatever answers them: what the peers have alike.

Owns HTTP and the form of answers, and takes only commands that every peer obeys. Does not know
how a prompt is made, nor Saccade.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

Json = dict[str, Any]
SUPPORTED = {
    "stream",
    "stream_options",
    "model",
    "messages",
    "temperature",
    "max_tokens",
    "max_completion_tokens",
    "ignore_eos",
    "seed",
}


@dataclass(frozen=True)
class Piece:
    """One token's text; token counts so far; `finish` is set in the last piece."""

    text: str
    prompt: int
    count: int
    finish: str | None = None


class Answers(Protocol):
    """A model that answers requests."""

    name: str

    def answer(self, body: Json) -> AsyncIterator[Piece]:
        """A piece for each token, and a last one. Raises the library's errors."""


def pictures(messages: list[Json]) -> Iterator[bytes]:
    for message in messages:
        for part in message["content"] if isinstance(message["content"], list) else []:
            if part["type"] == "image_url":
                url = part["image_url"]["url"]
                if not url.startswith("data:"):
                    raise ValueError("images must be data URLs")
                yield base64.b64decode(url.partition(",")[2])


def usage(piece: Piece) -> Json:
    return {
        "prompt_tokens": piece.prompt,
        "completion_tokens": piece.count,
        "total_tokens": piece.prompt + piece.count,
    }


def chunk(peer: Answers, delta: Json, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    data = {
        "id": "peer",
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": peer.name,
        "choices": [choice],
    }
    return b"data: " + json.dumps(data).encode() + b"\n\n"


async def stream(peer: Answers, body: Json) -> AsyncIterator[bytes]:
    yield chunk(peer, {"role": "assistant", "content": ""})
    last = Piece("", 0, 0)
    try:
        async for last in peer.answer(body):
            yield chunk(peer, {"content": last.text} if last.text else {}, last.finish)
    except Exception as error:
        yield (
            b"data: "
            + json.dumps(
                {"error": {"message": f"{type(error).__name__}: {error}", "type": "server_error"}}
            ).encode()
            + b"\n\n"
        )
        return
    if (body.get("stream_options") or {}).get("include_usage"):
        yield (
            b"data: "
            + json.dumps(
                {
                    "id": "peer",
                    "object": "chat.completion.chunk",
                    "choices": [],
                    "usage": usage(last),
                }
            ).encode()
            + b"\n\n"
        )
    yield b"data: [DONE]\n\n"


def app(peer: Answers) -> Starlette:
    async def chat(request: Request) -> Response:
        body = await request.json()
        unknown = sorted(set(body) - SUPPORTED)
        if unknown:
            return JSONResponse(
                {
                    "error": {
                        "message": f"not supported: {', '.join(unknown)}",
                        "type": "invalid_request_error",
                    }
                },
                400,
            )
        if body.get("stream"):
            return StreamingResponse(stream(peer, body), media_type="text/event-stream")
        text, last = "", Piece("", 0, 0)
        try:
            async for last in peer.answer(body):
                text += last.text
        except Exception as error:
            return JSONResponse(
                {"error": {"message": f"{type(error).__name__}: {error}", "type": "server_error"}},
                500,
            )
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": last.finish,
        }
        return JSONResponse(
            {
                "id": "peer",
                "object": "chat.completion",
                "model": peer.name,
                "choices": [choice],
                "usage": usage(last),
            }
        )

    async def models(_request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": peer.name, "object": "model"}]})

    async def health(_request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
        ]
    )
