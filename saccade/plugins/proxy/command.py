"""Defines the command `saccade proxy`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from saccade.arguments import Tuned, flat, tuning_help
from saccade.core.logs import configure_logging
from saccade.core.options import ConnectionOptions
from saccade.core.tuning import Tuning
from saccade.plugins.proxy.options import ProxyOptions

app = App(
    name="proxy",
    default_parameter=Parameter(negative="", consume_multiple=True),
    help_epilogue=tuning_help((ConnectionOptions,)),
)
Edge = Annotated[ConnectionOptions, flat(ConnectionOptions, "Connections")]


@app.default
def proxy(
    *,
    options: Annotated[ProxyOptions, flat(ProxyOptions, "Proxy")],
    edge: Edge = ConnectionOptions(),  # noqa: B008 - frozen
    tune: Tuned = (),
) -> int:
    """Upload each image to a server once. Run it on the machine of your clients.

    Clients send their requests to the proxy instead of the server. It replaces images that the
    server has by their digests. Requests to servers other than Saccade are forwarded unchanged.

    Parameters
    ----------
    tune:
        A tuning value, NAME=VALUE, for measurements. Repeat the option for several.
    """
    tuning = Tuning(tune, (ConnectionOptions,))
    from saccade.plugins.proxy.run import proxy as run_proxy

    configure_logging()
    return run_proxy(options, tuning.of(edge))
