"""Describes embeddings, reranking and scores in `/openapi.json`."""

from __future__ import annotations

from saccade.api.description import ApiOperation, Description
from saccade.api.operations import EXAMPLE_CHAT
from saccade.plugins.scores import fields, write

OPERATIONS = Description(
    (
        ApiOperation(
            "post",
            "/v1/embeddings",
            "Embed texts and images, as in OpenAI's API and vLLM",
            "EmbeddingsRequest",
            "EmbeddingList",
            {"messages": EXAMPLE_CHAT},
        ),
        ApiOperation(
            "post",
            "/v2/embed",
            "Embed texts and images, as in Cohere's API",
            "EmbedRequest",
            "CohereEmbeddings",
            {"texts": ["A red square", "A blue star"], "input_type": "search_document"},
        ),
        ApiOperation(
            "post",
            "/v1/rerank",
            "Rank documents by how well they answer a query. /rerank and /v2/rerank are the same",
            "RerankRequest",
            "RankList",
            {"query": "Which is red?", "documents": ["A blue star", EXAMPLE_CHAT[0]]},
        ),
        ApiOperation(
            "post",
            "/v1/score",
            "Score how well documents answer queries. /score is the same",
            "ScoreRequest",
            "ScoreList",
            {"text_1": "Which is red?", "text_2": ["A blue star", "A red square"]},
        ),
    ),
    bodies={
        "EmbeddingsRequest": (fields.EMBEDDINGS,),
        "EmbedRequest": (fields.EMBED,),
        "RerankRequest": (fields.RERANK,),
        "ScoreRequest": (fields.SCORE,),
    },
    types=(
        write.EmbeddingList,
        write.EmbeddingEntry,
        write.CohereEmbeddings,
        write.RankList,
        write.ScoreList,
        fields.ScoredContent,
        fields.CohereInput,
    ),
    words={
        "texts": "The texts to embed.",
        "meta": "Counts for Cohere's clients.",
        "documents": "What to rank: texts, or objects with text or content.",
    },
)
