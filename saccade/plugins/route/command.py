"""Defines the command `saccade route`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from saccade.arguments import Tuned, flat, tuning_help
from saccade.core.logs import configure_logging
from saccade.core.options import ConnectionOptions
from saccade.core.tuning import Tuning
from saccade.plugins.route.options import RouteOptions

app = App(
    name="route",
    default_parameter=Parameter(negative="", consume_multiple=True),
    help_epilogue=tuning_help((ConnectionOptions,)),
)
Edge = Annotated[ConnectionOptions, flat(ConnectionOptions, "Connections")]


@app.default
def route(
    *,
    options: Annotated[RouteOptions | None, flat(RouteOptions, "Router")] = None,
    edge: Edge = ConnectionOptions(),  # noqa: B008 - frozen
    tune: Tuned = (),
) -> int:
    """Route each request to the server that has seen its images, or to that of its model.

    With --workers, this light proxy spreads requests over several servers. An image, a chat and a
    continued response stay with one server. If a server dies, its running answers are lost. Its
    chats continue on other servers. With --models, it starts and stops servers by model.

    Parameters
    ----------
    tune:
        A tuning value, NAME=VALUE, for measurements. Repeat the option for several.
    """
    tuning = Tuning(tune, (ConnectionOptions,))
    from saccade.plugins.route.run import route as route_requests

    configure_logging()
    return route_requests(options or RouteOptions(), tuning.of(edge))
