"""Prepares uploads before the first question: encodes and prefills them while the engine is idle.

The queue is limited to `MOST` uploads in total, and to half as many for each of several API keys.
Keys are served round-robin. One upload is computed at a time, by the engine's rules for idle work
(`sched/turns.py`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import replace

from saccade.core.client import SHARE, Client
from saccade.core.errors import Overloaded, RequestError
from saccade.core.metrics import Metrics
from saccade.front.answer_update import AnswerUpdate
from saccade.front.prepared import PreparedRequest
from saccade.front.prompt_encoder import GenerationRequest

log = logging.getLogger("saccade")

MOST = 64
"""Maximum number of queued uploads. Each one stores the prefix that was sent with it."""

Prepare = Callable[[GenerationRequest, Client], Coroutine[None, None, PreparedRequest]]
Generate = Callable[[PreparedRequest], AsyncGenerator[AnswerUpdate, None]]
Spawn = Callable[[Coroutine[None, None, None]], None]


class WarmUps:
    """Prepares uploads one after another.

    prepare, generate: as in the request manager.
    spawn: runs a task until the server stops.
    """

    def __init__(
        self, prepare: Prepare, generate: Generate, spawn: Spawn, metrics: Metrics
    ) -> None:
        self._prepare = prepare
        self._generate = generate
        self._spawn = spawn
        self._metrics = metrics
        self._clients: dict[str, deque[tuple[GenerationRequest, Client]]] = {}
        self._busy = False

    def check(self, client: Client) -> None:
        """Raise Overloaded if the queue is full, or if the client's part of it is."""
        mine = len(self._clients.get(client.name, ()))
        most = int(MOST * SHARE) if client.limited else MOST
        if mine >= most or self._waiting >= MOST:
            raise Overloaded(
                f"warm: {self._waiting} uploads are queued to be encoded in advance, {mine} of "
                f"this API key; the limit is {MOST}, {most} of one key: upload without warm, or "
                "try again later"
            )

    def add(self, request: GenerationRequest, client: Client) -> None:
        """Queue `request`. Raises Overloaded if the queue is full, or if the client's part of it
        is.
        """
        self.check(client)
        self._clients.setdefault(client.name, deque()).append((request, client))
        self._tell()
        if not self._busy:
            self._busy = True
            self._spawn(self._run())

    @property
    def _waiting(self) -> int:
        return sum(map(len, self._clients.values()))

    def _tell(self) -> None:
        self._metrics.set("saccade_warm_waiting", self._waiting)

    async def _run(self) -> None:
        try:
            while self._clients:
                name, mine = next(iter(self._clients.items()))
                request, client = mine.popleft()
                del self._clients[name]
                if mine:
                    self._clients[name] = mine  # move the client to the end
                self._tell()
                await self._warm(request, client)
        finally:
            self._busy = False

    async def _warm(self, request: GenerationRequest, client: Client) -> None:
        outcome = "failed"
        try:
            prepared = await self._prepare(request, client)
            made = prepared.request
            idle = replace(made, caching=replace(made.caching, idle=True))
            async with aclosing(self._generate(replace(prepared, request=idle))) as events:
                async for _ in events:
                    pass
            outcome = "done"
        except RequestError as error:
            log.info("an upload was not encoded in advance: %s", error.message)
        except Exception:  # a background task must not affect other requests
            log.exception("an upload was not encoded in advance")
        finally:
            self._metrics.inc("saccade_warm_total", outcome=outcome)
