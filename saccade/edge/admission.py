"""The admission of a request with a body to a server or a router. Knows nothing of the body's
content.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import Receive, Scope

from saccade.core.permits import Permits
from saccade.edge.auth import client_of
from saccade.edge.body import Bodies, Held, read_json

ReadBody = Callable[[Request, Held, int], Awaitable[bytearray]]


@dataclass(frozen=True, slots=True)
class Admission:
    """Admits requests with bodies. `largest`: bytes in a body.

    `check_ready` raises an EngineUnavailable while answers are impossible.
    """

    permits: Permits
    bodies: Bodies
    largest: int
    check_ready: Callable[[], object]

    @asynccontextmanager
    async def admit(
        self, scope: Scope, receive: Receive, read: ReadBody = read_json
    ) -> AsyncIterator[tuple[bytearray, Held]]:
        """Read the body, then take a permit.

        So a client that sends slowly leaves permits to others. A full server refuses before the
        body. Memory that the request holds counts until the end.

        Raises what `check_ready`, `Permits.acquire`, `Bodies.hold` and `read` do.
        """
        request, client = Request(scope, receive), client_of(scope)
        self.check_ready()
        self.permits.check(client)
        with self.bodies.hold(request, self.largest) as held:
            body = await read(request, held, self.largest)
            self.check_ready()
            with self.permits.acquire(client):
                yield body, held
