"""Serves Anthropic's Messages API."""

from saccade.plugin import Http, Plugin, Requests, StepRule

_OVERSIZED = "saccade.plugins.messages.refuse_oversized:RefuseOversized"

PLUGIN = Plugin(
    "messages",
    requires=("agents", "computer"),
    http=Http(
        routes="saccade.plugins.messages.handlers:message_routes",
        paths=("/v1/messages", "/v1/messages/count_tokens"),
        operations="saccade.plugins.messages.description:OPERATIONS",
    ),
    requests=Requests(
        steps=(
            StepRule(
                "messages.sizes", "media", "messages.undiminished", _OVERSIZED, "check", "check"
            ),
        )
    ),
)
