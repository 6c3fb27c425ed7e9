"""Defines the command `saccade deploy`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from saccade.arguments import flat
from saccade.plugins.ray.options import DeployOptions
from saccade.plugins.route.options import SpreadOptions

app = App(name="deploy", help="Write a config file that runs Saccade on a cluster.")


@app.command
def ray(
    model: str = "demo",
    /,
    *serve_options: Annotated[str, Parameter(allow_leading_hyphen=True)],
    options: Annotated[DeployOptions, flat(DeployOptions, "Deployment")] = DeployOptions(),  # noqa: B008
    spread: Annotated[SpreadOptions, flat(SpreadOptions, "Ingress")] = SpreadOptions(),  # noqa: B008
) -> None:
    """Write a file with which Ray Serve runs several servers.

    Write it with `saccade deploy ray MODEL > FILE`. Start the servers with `serve run FILE`. Only
    this second command needs Ray. Install Ray with `python scripts/install.py '.[ray]'`.

    Parameters
    ----------
    model:
        A directory, a Hub ID, or "demo", as for saccade serve. Each server's machine must have it.
    serve_options:
        Options for saccade serve, after --. Every server gets the same options.
    """
    from saccade.commands import app as saccade
    from saccade.commands import check_spelling
    from saccade.plugins.ray.deploy import (
        as_yaml,
        check_serve_options,
        describe_booking,
        ray_config,
        with_bookings,
    )

    check_serve_options(serve_options)
    check_spelling(serve_options)
    saccade.parse_args(["serve", model, *serve_options])
    options = with_bookings(options)
    told = as_yaml(ray_config(model, serve_options, options, spread))
    if options.output is None:
        print(told, end="")
    else:
        Path(options.output).write_text(told)
    where = options.output or "FILE"
    print(f"{describe_booking(model, options)}; next: serve run {where}", file=sys.stderr)
