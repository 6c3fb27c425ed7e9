"""POST /v1/decisions: questions about one input, which is computed once.

`read.py` reads bodies, and `write.py` writes responses.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from saccade.api.handlers import Endpoint, RequestHandler, send_json
from saccade.api.mounting import ApiContext
from saccade.edge.body import while_connected
from saccade.front.readings import PromptReader
from saccade.plugins.decisions.read import read_decisions
from saccade.plugins.decisions.write import decision


def decision_routes(api: ApiContext) -> list[Route]:
    decisions = _Decisions(api.handler, PromptReader(api.handler.front))
    return [Route("/v1/decisions", Endpoint(decisions.create), methods=["POST"])]


@dataclass(frozen=True, slots=True)
class _Decisions:
    """The handler of POST /v1/decisions."""

    handler: RequestHandler
    reader: PromptReader

    async def create(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.handler.admission.admit(scope, receive) as (body, held):
            encode = self.handler.front.intake.tokenizer.encode
            asked = await self.handler.read_body(partial(read_decisions, encode), body)
            model = self.handler.name_of(asked.model)
            reading = self.reader.read_prompts(asked.shared, held.client, held)
            read = await while_connected(receive, reading)
            await send_json(send, decision(asked.questions, read, model))
