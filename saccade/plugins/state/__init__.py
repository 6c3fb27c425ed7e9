"""GET /saccade/state: the current activity of a server, for the web UI."""

from saccade.plugin import Http, Plugin

PLUGIN = Plugin(
    "state",
    http=Http(
        routes="saccade.plugins.state.handlers:state_routes",
        paths=("/saccade/state",),
        operations="saccade.plugins.state.description:OPERATIONS",
    ),
)
