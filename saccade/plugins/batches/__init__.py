"""OpenAI's Batch API: a file of requests that run when the server is idle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from saccade.plugin import Http, Plugin

if TYPE_CHECKING:
    from saccade.api.mounting import ApiContext

PLUGIN = Plugin(
    "batches",
    requires=("files",),
    http=Http(
        routes="saccade.plugins.batches.handlers:batch_routes",
        paths=("/v1/batches", "/v1/batches/{id}", "/v1/batches/{id}/cancel"),
        operations="saccade.plugins.batches.description:OPERATIONS",
        waiting="saccade.plugins.batches:has_batches",
    ),
)


def has_batches(api: ApiContext) -> bool:
    """Return True if the files' directory contains batches, which may be unfinished."""
    from saccade.plugins.files import BATCHES

    return (api.handler.front.intake.media.files_folder / BATCHES).is_dir()
