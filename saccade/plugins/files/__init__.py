"""OpenAI's and Anthropic's Files API."""

from saccade.plugin import Plugin

PLUGIN = Plugin(
    "files",
    routes="saccade.api.files:file_routes",
    paths=("/v1/files", "/v1/files/{id}", "/v1/files/{id}/content"),
)
