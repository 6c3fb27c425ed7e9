"""Serves the API description: /openapi.json, and /docs to read it."""

from saccade.plugin import Http, Plugin

PLUGIN = Plugin(
    "docs",
    http=Http(
        routes="saccade.plugins.docs.handlers:docs_routes",
        paths=("/openapi.json", "/docs", "/docs/docs.js", "/docs/docs.css"),
        operations="saccade.plugins.docs.description:OPERATIONS",
    ),
)
