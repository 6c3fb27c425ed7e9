"""The web UI."""

from saccade.plugin import Plugin

PLUGIN = Plugin(
    "page",
    options="saccade.plugins.page.options:PageOptions",
    asked="saccade.plugins.page.options:is_enabled",
    routes="saccade.plugins.page.handlers:page_routes",
    paths=("/", "/page/{path:path}"),
    keyless=("/", "/page/"),
)
