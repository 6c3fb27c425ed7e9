"""POST /v1/embeddings, /v2/embed, /rerank and /score: requests that read a prompt, but generate
nothing.

`read.py` reads bodies, and `write.py` writes responses.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from saccade.api.handlers import Endpoint, RequestHandler, send_json
from saccade.api.mounting import ApiContext
from saccade.core.errors import InvalidRequest
from saccade.edge.body import while_connected
from saccade.front.readings import PromptReader, unit_vectors
from saccade.front.score_prompts import CHATS
from saccade.plugins.scores.read import read_embed, read_embeddings, read_rerank, read_score
from saccade.plugins.scores.write import (
    cohere_list,
    embedding_list,
    rank_list,
    score_list,
)

RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")
SCORE_PATHS = ("/score", "/v1/score")


def score_routes(api: ApiContext) -> list[Route]:
    scores = _Scores(api.handler, PromptReader(api.handler.front))
    ranks = [Route(path, Endpoint(scores.rerank), methods=["POST"]) for path in RERANK_PATHS]
    pairs = [Route(path, Endpoint(scores.score), methods=["POST"]) for path in SCORE_PATHS]
    return [
        Route("/v1/embeddings", Endpoint(scores.embeddings), methods=["POST"]),
        Route("/v2/embed", Endpoint(scores.embed), methods=["POST"]),
        *ranks,
        *pairs,
    ]


@dataclass(frozen=True, slots=True)
class _Scores:
    """The request handlers."""

    handler: RequestHandler
    reader: PromptReader

    async def embeddings(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.handler.admission.admit(scope, receive) as (body, held):
            asked = await self.handler.read_body(
                partial(read_embeddings, self.handler.front.scoring or CHATS), body
            )
            model = self.handler.name_of(asked.model)
            self._check_dimensions(asked.dimensions, "dimensions")
            read = await while_connected(
                receive, self.reader.read_prompts(asked.reads, held.client, held)
            )
            vectors = unit_vectors(read, asked.dimensions)
            await self.handler.send_scroll(
                send, embedding_list(read, vectors, asked.formats[0], model)
            )

    async def embed(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.handler.admission.admit(scope, receive) as (body, held):
            asked = await self.handler.read_body(
                partial(read_embed, self.handler.front.scoring or CHATS), body
            )
            self.handler.name_of(asked.model)
            self._check_dimensions(asked.dimensions, "output_dimension")
            read = await while_connected(
                receive, self.reader.read_prompts(asked.reads, held.client, held)
            )
            vectors = unit_vectors(read, asked.dimensions)
            await self.handler.send_scroll(
                send, cohere_list(read, vectors, asked.formats, asked.texts)
            )

    async def rerank(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.handler.admission.admit(scope, receive) as (body, held):
            asked = await self.handler.read_body(
                partial(read_rerank, self.handler.front.scoring or CHATS), body
            )
            model = self.handler.name_of(asked.model)
            read = await while_connected(
                receive, self.reader.read_prompts(asked.reads, held.client, held)
            )
            await send_json(send, rank_list(read, model, asked.form.top_n, asked.documents))

    async def score(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.handler.admission.admit(scope, receive) as (body, held):
            asked = await self.handler.read_body(
                partial(read_score, self.handler.front.scoring or CHATS), body
            )
            model = self.handler.name_of(asked.model)
            read = await while_connected(
                receive, self.reader.read_prompts(asked.reads, held.client, held)
            )
            await send_json(send, score_list(read, model))

    def _check_dimensions(self, wanted: int | None, field: str) -> None:
        most = self.handler.front.intake.spec.hidden_size
        if wanted is not None and wanted > most:
            message = f"{field}: {wanted}; this model's embeddings have {most}"
            raise InvalidRequest(message, field)
