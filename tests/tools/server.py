"""A tiny OpenAI-compatible server for the tools' tests: its answers, delays and failures are
decided by the test.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

Json = dict[str, Any]
IMAGE_TOKENS = 50


def texts(body: Json) -> str:
    parts = [
        part
        for message in body["messages"]
        for part in (
            message["content"] if isinstance(message["content"], list) else [message["content"]]
        )
    ]
    return " ".join(part if isinstance(part, str) else part.get("text", "") for part in parts)


def pictures(body: Json) -> list[str]:
    lists = [
        message["content"] for message in body["messages"] if isinstance(message["content"], list)
    ]
    return [
        part["image_url"]["url"] for parts in lists for part in parts if part["type"] == "image_url"
    ]


@dataclass
class Script:
    """What the server does: `answer(body)` gives the words of an answer; `refuse(number, body)` a
    status, or None; `key` must be sent.
    """

    answer: Callable[[Json], list[str]] = lambda body: ["tok"] * body.get("max_tokens", 4)
    refuse: Callable[[int, Json], int | None] = lambda number, body: None
    first: float = 0.0
    between: float = 0.0
    break_after: int | None = None
    usage: bool = True
    cached: int = 5
    key: str | None = None
    trace: Json | None = None
    owner: str = "script"
    tokenizes: bool = False
    finish: str = "stop"


@dataclass
class Seen:
    """What the server saw."""

    bodies: list[Json] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0

    @property
    def streamed(self) -> list[Json]:
        return [body for body in self.bodies if body.get("stream")]


class ScriptedServer:
    """Runs in a thread of its own; `url` is where."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.seen = Seen()
        routes = [
            Route("/v1/models", self.models),
            Route("/metrics", self.metrics),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
        ]
        self._server = uvicorn.Server(
            uvicorn.Config(Starlette(routes=routes), port=0, log_level="error", lifespan="off")
        )
        self._thread = threading.Thread(target=self._server.run)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        while not self._server.started:
            threading.Event().wait(0.005)
        return self

    def __exit__(self, *error: object) -> None:
        self._server.should_exit = True
        self._thread.join()

    async def models(self, request: Request) -> Response:
        return self.locked(request) or JSONResponse(
            {"object": "list", "data": [{"id": "scripted", "owned_by": self.script.owner}]}
        )

    def locked(self, request: Request) -> Response | None:
        """A refusal of whoever has not the key."""
        if (
            self.script.key is None
            or request.headers.get("authorization") == f"Bearer {self.script.key}"
        ):
            return None
        return JSONResponse({"error": {"message": "no key", "type": "x"}}, 401)

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(
            "# TYPE process_resident_memory_bytes gauge\nprocess_resident_memory_bytes 1.5e+08\n"
        )

    async def tokenize(self, request: Request) -> Response:
        """The words of a text, if the script says so."""
        if not self.script.tokenizes:
            return JSONResponse({"error": {"message": "no such path", "type": "x"}}, 404)
        return JSONResponse({"count": len((await request.json())["prompt"].split())})

    async def chat(self, request: Request) -> Response:
        body = json.loads(await request.body())
        if refused := self.locked(request):
            return refused
        self.seen.bodies.append(body)
        self.seen.headers.append(dict(request.headers))
        number = len(self.seen.streamed) - 1 if body.get("stream") else len(self.seen.bodies) - 1
        status = self.script.refuse(number, body)
        if status is not None:
            return JSONResponse({"error": {"message": "refused by script", "type": "x"}}, status)
        words = self.script.answer(body)
        usage = {
            "prompt_tokens": 7 + len(texts(body)) // 4 + IMAGE_TOKENS * len(pictures(body)),
            "completion_tokens": len(words),
            "prompt_tokens_details": {"cached_tokens": self.script.cached},
        }
        if body.get("stream"):
            return StreamingResponse(self.events(words, usage), media_type="text/event-stream")
        self.seen.running += 1
        self.seen.most_running = max(self.seen.most_running, self.seen.running)
        await asyncio.sleep(self.script.first)
        self.seen.running -= 1
        message = {"role": "assistant", "content": "".join(words)}
        choice = {"message": message, "finish_reason": self.script.finish}
        return JSONResponse({"choices": [choice], "usage": usage})

    async def events(self, words: list[str], usage: Json) -> AsyncIterator[bytes]:
        seen, script = self.seen, self.script
        seen.running += 1
        seen.most_running = max(seen.most_running, seen.running)
        try:
            yield event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
            await asyncio.sleep(script.first)
            for number, word in enumerate(words):
                if number == script.break_after:
                    return
                yield event({"choices": [{"index": 0, "delta": {"content": word}}]})
                await asyncio.sleep(script.between)
            yield event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
            last: Json = {"choices": [], "usage": usage} if script.usage else {"choices": []}
            yield event(last | ({"saccade": script.trace} if script.trace else {}))
            yield b"data: [DONE]\n\n"
        finally:
            seen.running -= 1


def event(data: Json) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


@contextmanager
def scripted(**script: Any) -> Iterator[ScriptedServer]:
    with ScriptedServer(Script(**script)) as server:
        yield server
