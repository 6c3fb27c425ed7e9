"""Anthropic's Messages API."""

from saccade.plugin import Plugin, StepRule

_OVERSIZED = "saccade.plugins.messages.refuse_oversized:RefuseOversized"

PLUGIN = Plugin(
    "messages",
    requires=("agents", "computer"),
    routes="saccade.plugins.messages.handlers:message_routes",
    paths=("/v1/messages", "/v1/messages/count_tokens"),
    operations="saccade.plugins.messages.description:OPERATIONS",
    steps=(
        StepRule("messages.sizes", "media", "messages.undiminished", _OVERSIZED, "check", "check"),
    ),
)
