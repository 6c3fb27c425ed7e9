"""Serves the web UI."""

from __future__ import annotations

from typing import TYPE_CHECKING

from saccade.plugin import Http, Plugin

if TYPE_CHECKING:
    from saccade.core.options import ServeOptions

PLUGIN = Plugin(
    "page",
    options="saccade.plugins.page.options:PageOptions",
    asked="saccade.plugins.page:is_enabled",
    http=Http(
        routes="saccade.plugins.page.handlers:page_routes",
        paths=("/", "/page/{path:path}"),
        keyless=("/", "/page/"),
    ),
)


def is_enabled(options: ServeOptions) -> bool:
    if not options.extras:  # no option of a plugin was set
        return True
    from saccade.plugins.page.options import PageOptions

    return options.role != "encode" and not options.of(PageOptions).disable_page
