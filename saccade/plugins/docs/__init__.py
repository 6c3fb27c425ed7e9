"""The API description: /openapi.json, and /docs to read it."""

from saccade.plugin import Plugin

PLUGIN = Plugin(
    "docs",
    routes="saccade.plugins.docs.handlers:docs_routes",
    paths=("/openapi.json", "/docs", "/docs/docs.js", "/docs/docs.css"),
    operations="saccade.plugins.docs.description:OPERATIONS",
)
