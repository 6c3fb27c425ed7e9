"""OpenAI's Batch API: a file of requests, answered when the server is idle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from saccade.core.store import BATCHES
from saccade.plugin import Plugin

if TYPE_CHECKING:
    from saccade.api.mounting import ApiContext

PLUGIN = Plugin(
    "batches",
    routes="saccade.api.batches.handlers:batch_routes",
    paths=("/v1/batches", "/v1/batches/{id}", "/v1/batches/{id}/cancel"),
    waiting="saccade.plugins.batches:has_batches",
)


def has_batches(api: ApiContext) -> bool:
    """Return True once a server of these files has had a batch, which may be unfinished."""
    return (api.handler.front.intake.media.files.folder / BATCHES).is_dir()
