"""The web UI, and what it shows of the server."""

from __future__ import annotations

from saccade.core.options import ServeOptions
from saccade.plugin import Plugin

PLUGIN = Plugin(
    "page",
    routes="saccade.api.about.page:page_routes",
    paths=("/", "/page/{path:path}"),
    asked="saccade.plugins.page:is_enabled",
    keyless=("/", "/page/"),
)


def is_enabled(options: ServeOptions) -> bool:
    return options.role.role != "encode" and not options.server.disable_page
