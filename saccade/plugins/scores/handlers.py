"""POST /v1/embeddings, /v2/embed, /rerank and /score: requests that compute a prompt without
generating tokens.

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
from saccade.edge.body import BufferedBody, while_connected
from saccade.front.read_requests import MAX_TOKENS, WasRead, rank_scores, unit_vectors
from saccade.front.readings import PromptReader
from saccade.front.score_prompts import CHATS, Scoring
from saccade.plugins.scores.read import (
    EmbedAsked,
    RankAsked,
    read_embed,
    read_embeddings,
    read_rerank,
    read_score,
)
from saccade.plugins.scores.write import (
    cohere_list,
    embedding_list,
    rank_list,
    score_list,
    token_vector_list,
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
    """The handlers of /v1/embeddings, /v2/embed, /rerank and /score."""

    handler: RequestHandler
    reader: PromptReader

    async def embeddings(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.handler.admission.admit(scope, receive) as (body, held):
            asked = await self.handler.read_body(partial(read_embeddings, self._scoring), body)
            self._check_dimensions(asked.dimensions, "dimensions")
            model, read = await self._read(asked, receive, held)
            if self._scoring.late is not None:
                written = token_vector_list(read, asked.formats[0], model)
            else:
                vectors = unit_vectors(read, asked.dimensions)
                written = embedding_list(read, vectors, asked.formats[0], model)
            await self.handler.send_scroll(send, written)

    async def embed(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.handler.admission.admit(scope, receive) as (body, held):
            asked = await self.handler.read_body(partial(read_embed, self._scoring), body)
            self._check_dimensions(asked.dimensions, "output_dimension")
            _, read = await self._read(asked, receive, held)
            vectors = unit_vectors(read, asked.dimensions)
            await self.handler.send_scroll(
                send, cohere_list(read, vectors, asked.formats, asked.texts)
            )

    async def rerank(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.handler.admission.admit(scope, receive) as (body, held):
            asked = await self.handler.read_body(partial(read_rerank, self._scoring), body)
            model, read = await self._read(asked, receive, held)
            scores = await self._scores(asked, read)
            top, documents = asked.form.top_n, asked.documents
            await send_json(send, rank_list(read, scores, model, top, documents))

    async def score(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.handler.admission.admit(scope, receive) as (body, held):
            asked = await self.handler.read_body(partial(read_score, self._scoring), body)
            model, read = await self._read(asked, receive, held)
            await send_json(send, score_list(read, await self._scores(asked, read), model))

    @property
    def _scoring(self) -> Scoring:
        return self.handler.front.scoring or CHATS

    async def _read(
        self, asked: EmbedAsked | RankAsked, receive: Receive, held: BufferedBody
    ) -> tuple[str, list[WasRead]]:
        """Run the prompts of a request. Returns the name of the requested model or adapter, and
        the results.
        """
        model, adapter = self.handler.model_of(asked.model)
        reads = [each.with_adapter(adapter) for each in asked.reads]
        late = self._scoring.late
        most = MAX_TOKENS if late is None else late.max_tokens
        work = self.reader.read_prompts(reads, held.client, held, most)
        return model, await while_connected(receive, work)

    async def _scores(self, asked: RankAsked, read: list[WasRead]) -> list[float]:
        if (late := self._scoring.late) is None:
            return rank_scores(read)
        work = partial(late.scores, read[: asked.queries], read[asked.queries :])
        return await self.handler.front.intake.in_thread(work)

    def _check_dimensions(self, wanted: int | None, field: str) -> None:
        """Raise InvalidRequest if more dimensions are requested than the model has, or if the model
        does not support fewer.
        """
        late, most = self._scoring.late, self.handler.front.intake.spec.hidden_size
        if late is not None and wanted not in (None, late.width):
            raise InvalidRequest(
                f"{field}: {wanted}; this model's vectors have {late.width} values, and were not "
                "trained to be truncated",
                field,
            )
        if wanted is not None and wanted > most:
            message = f"{field}: {wanted}; this model's embeddings have {most}"
            raise InvalidRequest(message, field)
