"""Answers to many questions about one input, which is computed once."""

from saccade.plugin import Plugin

PLUGIN = Plugin(
    "decisions",
    routes="saccade.api.decisions.handlers:decision_routes",
    paths=("/v1/decisions",),
)
