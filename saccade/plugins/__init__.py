"""The optional features of a server, one package each. A plugin is imported only if it is enabled.

Plugins are found as packages of this directory, and in other distributions by the entry points of
the group `saccade.plugins`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules, resolve_name
from typing import TYPE_CHECKING, Any

from saccade.core.errors import ConfigError
from saccade.plugin import Offer, Plugin

if TYPE_CHECKING:
    from saccade.core.options import ServeOptions

GROUP = "saccade.plugins"
"""Entry points that name a `Plugin`, as in `name = "package:PLUGIN"`."""


@cache
def plugins() -> tuple[Plugin, ...]:
    """Return all installed plugins: Saccade's own, then others, each sorted by name."""
    folders = (each.name for each in iter_modules(__path__, f"{__name__}.") if each.ispkg)
    own = [import_module(folder).PLUGIN for folder in folders]
    foreign = sorted(entry_points(group=GROUP), key=lambda entry: entry.name)
    return complete((*own, *(entry.load() for entry in foreign)))


def complete(found: Sequence[Plugin]) -> tuple[Plugin, ...]:
    """Return the plugins whose required plugins are all in `found`."""
    names = {plugin.name for plugin in found}
    kept = tuple(plugin for plugin in found if names.issuperset(plugin.requires))
    return kept if len(kept) == len(found) else complete(kept)


def asked_plugins(options: ServeOptions) -> tuple[Plugin, ...]:
    """Return the plugins that these options enable. Raises ConfigError if one cannot run here."""

    def is_asked(plugin: Plugin) -> bool:
        if plugin.asked is None:
            return options.role != "encode" or bool(plugin.requests.media)
        if plugin.needs_options and not options.extras:
            return False
        asked: Callable[[ServeOptions], bool] = resolve_name(plugin.asked)
        return asked(options)

    return tuple(filter(is_asked, plugins()))


@cache
def option_groups() -> Mapping[Plugin, type[Any]]:
    """Return the option dataclasses of plugins.

    Raises TypeError if two plugins have an option of the same name.
    """
    groups: dict[Plugin, type[Any]] = {}
    owners: dict[str, str] = {}
    for plugin in plugins():
        if plugin.options is None:
            continue
        groups[plugin] = resolve_name(plugin.options)
        for option in fields(groups[plugin]):
            other = owners.setdefault(option.name, plugin.name)
            if other != plugin.name:
                raise TypeError(
                    f"the plugins {other} and {plugin.name} both have an option {option.name}"
                )
    return groups


def import_field(field: Callable[[Plugin], str | None]) -> list[Any]:
    """Import and return the objects that installed plugins name in this field of their records."""
    return [resolve_name(name) for name in map(field, plugins()) if name is not None]


def builder(
    socket: Callable[[Plugin], Offer | str | None], *of: object
) -> Callable[..., Any] | None:
    """Import and return the object that `provided` names, or None if there is none."""
    name = provided(socket, *of)
    return None if name is None else resolve_name(name)


def provided(socket: Callable[[Plugin], Offer | str | None], *of: object) -> str | None:
    """Return the dotted name that an enabled plugin provides in a field, or None if no plugin does.

    of: the arguments of `Offer.asked`, which decides whether a plugin is enabled.

    Raises ConfigError if several plugins provide it.
    """
    offers = ((plugin.name, socket(plugin)) for plugin in plugins())
    found = {
        name: each if isinstance(each, str) else each.build
        for name, each in offers
        if each is not None and (isinstance(each, str) or resolve_name(each.asked)(*of))
    }
    if len(found) > 1:
        raise ConfigError(
            f"the plugins {' and '.join(found)} provide the same part of the server: uninstall one"
        )
    return next(iter(found.values()), None)


def builders(socket: Callable[[Plugin], Offer | None], *of: object) -> list[Callable[..., Any]]:
    """Import and return the objects that enabled plugins provide in a field.

    of: the arguments of `Offer.asked`, which decides whether a plugin is enabled.
    """
    offers = [offer for offer in map(socket, plugins()) if offer is not None]
    return [resolve_name(each.build) for each in offers if resolve_name(each.asked)(*of)]
