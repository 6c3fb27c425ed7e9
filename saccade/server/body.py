"""Request bodies on their way in: how large they are, how slowly they come, and how many bytes are
held at a time.

Knows nothing of what they say. One event loop; no locks.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.requests import Request

from saccade.core.config import MIB
from saccade.core.errors import InvalidRequest, Overloaded, TooLarge
from saccade.core.metrics import Metrics
from saccade.front.client import ANYBODY, SHARE, Client
from saccade.server.tenant import client_of

BODY_PAUSE = 30.0
"""Seconds that a client may pause while it sends a body."""


class Bodies:
    """Bytes held for requests in flight, `limit` in all: what was sent until it is understood, then
    the encoded pictures.
    """

    def __init__(self, limit: int, metrics: Metrics) -> None:
        self.limit = limit
        self.held = 0
        self.of: Counter[str] = Counter()
        """By the name of the key."""
        self._metrics = metrics

    @contextmanager
    def hold(self, request: Request, largest: int) -> Iterator[Held]:
        """Room for a body, by its announced length, before any of it is read.

        Raises Overloaded when there is none.
        """
        announced = request.headers.get("content-length", "0")
        share = Held(self, client_of(request.scope))
        try:
            share.resize(min(int(announced), largest) if announced.isdigit() else 0)
            yield share
        finally:
            share.resize(0)

    def set(self, held: int) -> None:
        self.held = held
        self._metrics.set("saccade_request_bytes_held", held)


@dataclass(slots=True)
class Held:
    """One request's share."""

    bodies: Bodies
    client: Client = ANYBODY
    nbytes: int = 0

    def resize(self, nbytes: int) -> None:
        """Hold this many bytes.

        Raises Overloaded for more than is left, unless nobody else holds any.
        """
        self._check_share(nbytes)
        others = self.bodies.held - self.nbytes
        if nbytes > self.nbytes and others and others + nbytes > self.bodies.limit:
            raise Overloaded(
                f"requests in flight hold {others / MIB:.0f} MiB and this one needs "
                f"{nbytes / MIB:.0f}; the limit is "
                f"{self.bodies.limit / MIB:.0f} (--max-inflight-mb): try again, or upload "
                "pictures once with /v1/files"
            )
        self.bodies.set(others + nbytes)
        self.bodies.of[self.client.name] += nbytes - self.nbytes
        self.nbytes = nbytes

    def reserve(self, nbytes: int) -> None:
        """Hold so many bytes more: of what was not sent with the request (files, URLs), however
        often it is named.

        Raises Overloaded for more than is left now, TooLarge for more than there is in all.
        """
        if nbytes > 0 and self.nbytes + nbytes > self.bodies.limit:
            raise TooLarge(
                f"the request and its pictures have over {self.bodies.limit / MIB:.0f} MiB; this "
                "server holds no more at a time (--max-inflight-mb): send fewer, or smaller ones"
            )
        self.resize(self.nbytes + nbytes)

    def _check_share(self, nbytes: int) -> None:
        """Raises Overloaded where one of several keys would hold more than its share."""
        mine, most = self.bodies.of[self.client.name] - self.nbytes, self.bodies.limit * SHARE
        if self.client.limited and mine and nbytes > self.nbytes and mine + nbytes > most:
            raise Overloaded(
                f"requests of this key hold {mine / MIB:.0f} MiB and this one needs "
                f"{nbytes / MIB:.0f}; one of several keys may have {most / MIB:.0f} (half of "
                "--max-inflight-mb): try again"
            )


async def read_json(request: Request, held: Held, largest: int) -> bytearray:
    """The whole body.

    Raises as `pieces` does, and InvalidRequest when it does not call itself JSON.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise InvalidRequest(
            f"Content-Type is {kind}; this path takes application/json",
            code="unsupported_media_type",
        )
    body = bytearray()
    async for piece in pieces(request, held, largest):
        body += piece
    return body


async def pieces(request: Request, held: Held, largest: int) -> AsyncGenerator[bytes, None]:
    """The body as it comes.

    Raises TooLarge by its announced or its real length, Overloaded, InvalidRequest when it stops
    coming.
    """
    announced = request.headers.get("content-length", "0")
    too_large, size = announced.isdigit() and int(announced) > largest, 0
    async for piece in _steadily(request):
        size += len(piece)
        too_large = too_large or size > largest
        if not too_large:
            held.resize(max(size, held.nbytes))
            yield piece
        # A client that still sends cannot read an answer: let it finish, within reason.
        elif size > 2 * largest:
            break
    if too_large:
        raise TooLarge(f"the body is larger than {largest // MIB} MiB, the limit (--max-body-mb)")


async def _steadily(request: Request) -> AsyncGenerator[bytes, None]:
    """Pieces that keep coming: a request that is being sent holds a permit."""
    chunks = request.stream()
    while True:
        try:
            async with asyncio.timeout(BODY_PAUSE):
                chunk = await anext(chunks)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise InvalidRequest(
                f"nothing more of the body has come for {BODY_PAUSE:g} seconds", code="timeout"
            ) from None
        yield chunk
