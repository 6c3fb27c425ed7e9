"""Answers many questions about one input, which is computed once."""

from saccade.plugin import Http, Plugin

PLUGIN = Plugin(
    "decisions",
    requires=("responses",),
    http=Http(
        routes="saccade.plugins.decisions.handlers:decision_routes",
        paths=("/v1/decisions",),
        operations="saccade.plugins.decisions.description:OPERATIONS",
    ),
)
