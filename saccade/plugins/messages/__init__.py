"""Anthropic's Messages API."""

from saccade.plugin import Plugin

PLUGIN = Plugin(
    "messages",
    routes="saccade.api.messages.handlers:message_routes",
    paths=("/v1/messages", "/v1/messages/count_tokens"),
)
