"""The features of a server that it imports only when they are asked for, a folder each.

Finds plugins by their folders, and those of other distributions by the entry points of the group
`saccade.plugins`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules

from saccade.plugin import Plugin

GROUP = "saccade.plugins"
"""Entry points that name a `Plugin`, as in `name = "package:PLUGIN"`."""


@cache
def plugins() -> tuple[Plugin, ...]:
    """Return all installed plugins, our own first, by name."""
    folders = (each.name for each in iter_modules(__path__, f"{__name__}.") if each.ispkg)
    own = [import_module(folder).PLUGIN for folder in folders]
    foreign = sorted(entry_points(group=GROUP), key=lambda entry: entry.name)
    return (*own, *(entry.load() for entry in foreign))
