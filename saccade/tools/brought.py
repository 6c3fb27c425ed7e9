"""Adds the commands of `saccade-bench` and of other distributions, without importing them.

Commands of `saccade-bench` are listed even if it is not installed. They then explain how to install
it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated

from cyclopts import App, Parameter

from saccade.core.errors import ConfigError
from saccade.core.extras import how_to_install

GROUP = "saccade.commands"
"""The entry point group with which other distributions add commands to `saccade`. The name of an
entry point is the name of the command. It refers to a cyclopts App, which is imported when the
command is called.
"""
MEASURING = {
    "bench": "Measure a server and compare measurements.",
    "prove": "Check whether a server mixes up images that a cache might confuse.",
    "probe": "Find how many images one request may hold before a server fails.",
    "eval": "Measure the accuracy of a model behind a server.",
    "make-checkpoint": "Make a model folder for measurements.",
    "simulate": "Estimate hits, bytes and times without a model.",
}


MISSING = f"Not installed: {how_to_install('./bench')}."


def join(app: App) -> None:
    """Add the commands of other distributions to `app`. Commands in `MEASURING` that are not
    installed get a placeholder that explains how to install them.
    """
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):  # as with modules, the first on the path is used
        found.setdefault(entry.name, entry)
    for name, what in MEASURING.items():
        if name in found:
            app.command(found[name].value, name=name, help=what)
        else:
            app.command(absent(name), name=name, help=f"{what} {MISSING}")
    for name in sorted(found.keys() - MEASURING.keys()):
        dist = found[name].dist
        app.command(found[name].value, name=name, help=f"Added by {dist.name if dist else '?'}.")


def absent(command: str) -> Callable[..., None]:
    """Return a placeholder for a command that is not installed. It accepts any options, and raises
    ConfigError.
    """

    def tell(*_: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)]) -> None:
        raise ConfigError(f"saccade {command} is a command of saccade-bench. {MISSING}")

    return tell
