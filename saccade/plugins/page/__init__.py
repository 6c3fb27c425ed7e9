"""The web UI."""

from saccade.plugin import Http, Plugin

PLUGIN = Plugin(
    "page",
    options="saccade.plugins.page.options:PageOptions",
    asked="saccade.plugins.page.options:is_enabled",
    http=Http(
        routes="saccade.plugins.page.handlers:page_routes",
        paths=("/", "/page/{path:path}"),
        keyless=("/", "/page/"),
    ),
)
