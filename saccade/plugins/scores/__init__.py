"""Computes embeddings, reranking and scores, with the APIs of OpenAI, Cohere, Jina and vLLM."""

from saccade.plugin import Http, Plugin, Runtime

PLUGIN = Plugin(
    "scores",
    options="saccade.core.settings:PoolingSettings",
    http=Http(
        routes="saccade.plugins.scores.handlers:score_routes",
        paths=(
            "/v1/embeddings",
            "/v2/embed",
            "/rerank",
            "/v1/rerank",
            "/v2/rerank",
            "/score",
            "/v1/score",
        ),
        operations="saccade.plugins.scores.description:OPERATIONS",
    ),
    runtime=Runtime(
        state_parts=(
            ("score", "saccade.plugins.scores.worker:Scorer"),
            ("read", "saccade.plugins.scores.worker:StateReader"),
        ),
    ),
)
