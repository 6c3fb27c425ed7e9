"""Serves OpenAI's and Anthropic's Files API."""

from saccade.plugin import Http, Plugin, Requests

BATCHES = "batches"
"""Name of the subdirectory of uploaded files that the plugin `batches` uses."""

PLUGIN = Plugin(
    "files",
    options="saccade.plugins.files.options:FileOptions",
    http=Http(
        routes="saccade.plugins.files.handlers:file_routes",
        paths=("/v1/files", "/v1/files/{id}", "/v1/files/{id}/content"),
        operations="saccade.plugins.files.description:OPERATIONS",
    ),
    requests=Requests(uploads="saccade.plugins.files.uploads:open_uploads"),
)
