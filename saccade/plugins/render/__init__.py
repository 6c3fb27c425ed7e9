"""Returns prompts as tokens and image hashes, for routers that track the caches of each server."""

from saccade.plugin import Http, Plugin

PLUGIN = Plugin(
    "render",
    requires=("messages",),
    http=Http(
        routes="saccade.plugins.render.handlers:render_routes",
        paths=("/v1/chat/completions/render", "/v1/completions/render", "/v1/messages/render"),
        operations="saccade.plugins.render.description:OPERATIONS",
    ),
)
