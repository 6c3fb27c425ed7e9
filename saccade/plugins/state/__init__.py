"""GET /saccade/state: what a server does now, for people."""

from saccade.plugin import Plugin

PLUGIN = Plugin("state", routes="saccade.api.about.page:state_routes", paths=("/saccade/state",))
