"""The description of the API: /openapi.json, and /docs to read it."""

from saccade.plugin import Plugin

PLUGIN = Plugin(
    "docs",
    routes="saccade.api.about.docs:docs_routes",
    paths=(
        "/openapi.json",
        "/docs",
        "/docs/start.js",
        "/docs/swagger-ui-bundle.js",
        "/docs/swagger-ui.css",
    ),
)
