"""OpenAI's Batch API: a file of requests that run when no other request is waiting."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from saccade.api.handlers import json_response
from saccade.api.mounting import ApiContext
from saccade.api.stored_objects import Paging
from saccade.edge.body import Bodies, read_json
from saccade.edge.headers import client_of
from saccade.plugins.batches.fields import BATCH, BatchPage
from saccade.plugins.batches.runner import BatchRunner
from saccade.plugins.batches.store import BatchStore
from saccade.plugins.files import BATCHES
from saccade.plugins.files.uploads import uploads_of

LARGEST = 1 << 16
MAX_LISTED = 100


def batch_routes(api: ApiContext) -> list[Route]:
    """Return the routes. Batches start to run once the model is loaded.

    Each line is a separate request to the app behind the API key check.
    """
    front, admission = api.handler.front, api.handler.admission
    files = uploads_of(front.intake.media)
    store = BatchStore(files.folder / BATCHES)
    runner = BatchRunner(
        api.app, store, files, front.permits, front.metrics, api.handler.names, admission.largest
    )
    api.services.add(runner)
    batches = _Batches(runner, admission.bodies)
    return [
        Route("/v1/batches", batches.create, methods=["POST"]),
        Route("/v1/batches", batches.list, methods=["GET"]),
        Route("/v1/batches/{id}", batches.retrieve, methods=["GET"]),
        Route("/v1/batches/{id}/cancel", batches.cancel, methods=["POST"]),
    ]


@dataclass(frozen=True, slots=True)
class _Batches:
    """The handlers of /v1/batches."""

    runner: BatchRunner
    bodies: Bodies

    async def create(self, request: Request) -> Response:
        with self.bodies.hold(request, LARGEST) as held:
            body = await read_json(request, held, LARGEST)
            asked = BATCH.read(body, LARGEST).batch
            return json_response((await self.runner.add_batch(asked, held.client)).body())

    async def list(self, request: Request) -> Response:
        paging = Paging.of(request.query_params, 20, MAX_LISTED)
        found = await self.runner.page(client_of(request.scope), paging)
        page = found[: paging.limit]
        first, last = (page[0].id, page[-1].id) if page else (None, None)
        return json_response(
            BatchPage([batch.body() for batch in page], first, last, len(found) > len(page))
        )

    async def retrieve(self, request: Request) -> Response:
        client = client_of(request.scope)
        found = await self.runner.find_batch(request.path_params["id"], client)
        return json_response(found.body())

    async def cancel(self, request: Request) -> Response:
        client = client_of(request.scope)
        found = await self.runner.cancel(request.path_params["id"], client)
        return json_response(found.body())
