"""Serves OpenAI's Responses API."""

from saccade.plugin import Http, Plugin

PLUGIN = Plugin(
    "responses",
    requires=("agents", "computer"),
    options="saccade.plugins.responses.options:ResponseOptions",
    http=Http(
        routes="saccade.plugins.responses.handlers:response_routes",
        paths=(
            "/v1/responses",
            "/v1/responses/input_tokens",
            "/v1/responses/{id}",
            "/v1/responses/{id}/input_items",
            "/v1/responses/{id}/cancel",
        ),
        operations="saccade.plugins.responses.description:OPERATIONS",
    ),
)
