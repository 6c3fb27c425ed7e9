"""The life of the router's process: listen, look at the workers, route, and end in order.

Starts and ends no worker. Knows nothing of what is routed but how to put it together.
"""

from __future__ import annotations

import asyncio

import uvloop

from saccade.core.config import MIB
from saccade.core.metrics import ROUTED, Metrics
from saccade.core.options import ConnectionOptions, RouteOptions
from saccade.route.fleet import Fleet
from saccade.route.proxy import OWN_PATHS, Proxy
from saccade.server.body import Bodies
from saccade.server.crowd import Crowd, raise_descriptors
from saccade.server.gate import RequestIds, Stamp
from saccade.server.serving import Serving, address_of, listen

OPEN_PATHS = OWN_PATHS - {"/metrics"}


def route(options: RouteOptions, edge: ConnectionOptions) -> int:
    """`saccade route`: until a signal. Returns the exit status. Raises StartupError."""
    raise_descriptors()
    return uvloop.run(run(options, edge))


async def run(options: RouteOptions, edge: ConnectionOptions) -> int:
    """The same, within an event loop."""
    metrics = Metrics(ROUTED)
    fleet = Fleet(options.workers, metrics)
    crowd = Crowd(edge, metrics)
    bodies = Bodies(options.inflight_bytes, metrics, edge.body_timeout)
    app = RequestIds(Proxy(fleet, options, metrics, bodies))
    largest = options.max_body_mb * MIB
    server = Serving(app, crowd, edge, largest, OPEN_PATHS, options.shutdown_grace, Stamp())
    bound = listen(options.host, options.port)
    try:
        await fleet.look()
        watching = asyncio.create_task(fleet.watch())
        announce(options, fleet, crowd)
        print(f"routing at {address_of(bound)}/v1", flush=True)
        try:
            await server.serve([bound])
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            for replica in fleet.replicas:
                replica.upstream.drop()
    finally:
        bound.close()
    return 0


def announce(options: RouteOptions, fleet: Fleet, crowd: Crowd) -> None:
    """What was decided, for people."""
    by = {
        "image": "the digest of a request's oldest image, else how its chat begins",
        "none": "nothing: any worker",
    }
    decided = [
        *(
            ("worker", f"{each.name}, {each.state}{f': {each.reason}' if each.reason else ''}")
            for each in fleet.replicas
        ),
        ("ranked by", by[options.affinity]),
        (
            "bodies",
            f"{options.max_body_mb} MiB at most, {options.inflight_bytes / MIB:.0f} MiB together",
        ),
        ("requests", f"{options.max_requests} at a time on {crowd.limit} connections"),
    ]
    width = max(len(name) for name, _ in decided)
    for name, value in decided:
        print(f"{name:>{width}}  {value}")
