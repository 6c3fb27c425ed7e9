"""Writes the responses for embeddings, reranking and scores.

This module also computes the final values: embeddings of length 1, truncated if requested, and
scores from 0 to 1.
"""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from saccade.api.prompt_logprobs import stands_for
from saccade.api.stream import StreamedBody
from saccade.front.read_requests import Vectors, WasRead
from saccade.plugins.scores.fields import EncodingFormat

_PIECE = 64
"""Number of embeddings that are written at a time, which takes some milliseconds."""


class ScoreTokens(Struct):
    """The number of prompt tokens that were cached, and of those in images."""

    cached_tokens: int
    image_tokens: int


class ScoreUsage(Struct):
    """The number of tokens in a request's prompts."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: ScoreTokens

    @classmethod
    def of(cls, read: Sequence[WasRead]) -> ScoreUsage:
        total = sum(each.tokens for each in read)
        cached, images = sum(each.cached for each in read), sum(each.images for each in read)
        return cls(total, total, ScoreTokens(cached, images))


class EmbeddingList(Struct):
    """The response of /v1/embeddings."""

    data: list[Any]
    """The embeddings, in the order of the inputs."""
    model: str
    usage: ScoreUsage
    object: str = "list"


class EmbeddingEntry(Struct):
    """The embedding of one input: numbers, or float32 in base64."""

    index: int
    embedding: list[float | list[float]] | str
    """The values, or float32 in base64. If the model has a vector per token, a list of vectors, or
    all of them in one base64 string.
    """
    shape: tuple[int, int] | UnsetType = UNSET
    """The number of vectors, and of values in each, if the model has a vector per token."""
    object: str = "embedding"


class CohereEmbeddings(Struct):
    """The response of /v2/embed."""

    id: str
    embeddings: dict[str, list[Any]]
    """The embeddings by format, one per input."""
    texts: list[str]
    meta: dict[str, Any]
    response_type: str = "embeddings_by_type"
    """Always embeddings_by_type."""


class RankEntry(Struct):
    """A document's index in the request, and its score for the query."""

    index: int
    relevance_score: float
    """How well the document matches the query, from 0 to 1. If the model has a vector per token,
    the sum over the query's tokens, each from -1 to 1.
    """
    document: Any | UnsetType = UNSET
    """The document as you sent it."""


class RankList(Struct):
    """The response of /rerank, the best document first."""

    id: str
    model: str
    results: list[RankEntry]
    """The documents, the best first."""
    usage: ScoreUsage
    meta: dict[str, Any]


class ScoreEntry(Struct):
    """A document's score for its query."""

    index: int
    score: float
    """The score, as `relevance_score` of /rerank."""
    object: str = "score"


class ScoreList(Struct):
    """The response of /score, in the order of the documents."""

    id: str
    created: int
    model: str
    data: list[ScoreEntry]
    """The scores, in the order of the documents."""
    usage: ScoreUsage
    object: str = "list"


def embedding_list(
    read: Sequence[WasRead], vectors: Vectors, written: EncodingFormat, model: str
) -> StreamedBody:
    """Return OpenAI's response, which is written in chunks because it is long."""

    def pieces() -> Iterator[bytes]:
        before = b""
        for at in range(0, len(vectors), _PIECE):
            part = _written(vectors[at : at + _PIECE], written)
            entries = [EmbeddingEntry(at + i, each) for i, each in enumerate(part)]
            yield before + msgspec.json.encode(entries)[1:-1]
            before = b","

    body = EmbeddingList(stands_for(0), model, ScoreUsage.of(read))
    return StreamedBody(body, [pieces()])


def token_vector_list(read: Sequence[WasRead], written: EncodingFormat, model: str) -> StreamedBody:
    """Return OpenAI's response with a matrix for each input. It is written in chunks because it is
    long.
    """

    def pieces() -> Iterator[bytes]:
        before = b""
        for index, each in enumerate(read):
            (values,) = _written(each.values[None], written)
            entry = EmbeddingEntry(index, values, each.values.shape)
            yield before + msgspec.json.encode(entry)
            before = b","

    body = EmbeddingList(stands_for(0), model, ScoreUsage.of(read))
    return StreamedBody(body, [pieces()])


def cohere_list(
    read: Sequence[WasRead],
    vectors: Vectors,
    formats: Sequence[EncodingFormat],
    texts: Sequence[str],
) -> StreamedBody:
    """Return Cohere's response, which is written in chunks because it is long."""

    def pieces(written: EncodingFormat) -> Iterator[bytes]:
        before = b""
        for at in range(0, len(vectors), _PIECE):
            yield before + msgspec.json.encode(_written(vectors[at : at + _PIECE], written))[1:-1]
            before = b","

    body = CohereEmbeddings(
        secrets.token_hex(12),
        {written: stands_for(run) for run, written in enumerate(formats)},
        list(texts),
        _meta(read),
    )
    return StreamedBody(body, [pieces(written) for written in formats])


def _written(vectors: Vectors, written: EncodingFormat) -> list[Any]:
    """Return each embedding in [N, D], or each matrix in [N, T, D], in the requested format."""
    if written == "float":
        return list(vectors.tolist())
    return [base64.b64encode(each.astype("<f4").tobytes()).decode() for each in vectors]


def rank_list(
    read: Sequence[WasRead],
    scores: Sequence[float],
    model: str,
    top: int | None,
    documents: Sequence[Any],
) -> RankList:
    """Return the response of Jina and Cohere. Documents with equal scores stay in order."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[:top]
    results = [
        RankEntry(index, scores[index], _document(documents[index]) if documents else UNSET)
        for index in order
    ]
    name = f"rerank-{secrets.token_hex(12)}"
    return RankList(name, model, results, ScoreUsage.of(read), _meta(read))


def _document(sent: Any) -> Any:
    return {"text": sent} if isinstance(sent, str) else sent


def score_list(read: Sequence[WasRead], scores: Sequence[float], model: str) -> ScoreList:
    """Return vLLM's response."""
    data = [ScoreEntry(index, score) for index, score in enumerate(scores)]
    name = f"score-{secrets.token_hex(12)}"
    return ScoreList(name, int(time.time()), model, data, ScoreUsage.of(read))


def _meta(read: Sequence[WasRead]) -> dict[str, Any]:
    tokens = sum(each.tokens for each in read)
    return {"api_version": {"version": "2"}, "billed_units": {"input_tokens": tokens}}
