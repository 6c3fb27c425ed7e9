"""Describes the server's state in `/openapi.json`."""

from __future__ import annotations

from saccade.api.description import ApiOperation, Description
from saccade.plugins.state.handlers import ServerState

OPERATIONS = Description(
    (
        ApiOperation(
            "get",
            "/saccade/state",
            "The server and the requests in flight",
            answer="ServerState",
        ),
    ),
    types=(ServerState,),
)
