"""OpenAI's Responses API."""

from saccade.plugin import Plugin

PLUGIN = Plugin(
    "responses",
    routes="saccade.api.responses.handlers:response_routes",
    paths=(
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/v1/responses/{id}",
        "/v1/responses/{id}/input_items",
        "/v1/responses/{id}/cancel",
    ),
)
