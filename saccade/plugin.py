"""What a feature states about itself: `PLUGIN`, in the `__init__.py` of a folder in plugins/."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plugin:
    """A feature, found without importing its modules. Names are written "module:name".

    A plugin's modules are imported when they are first needed: its routes at the first request for
    one of its paths.
    """

    name: str
    routes: str | None = None  # function of an `ApiContext` that returns routes
    paths: tuple[str, ...] = ()  # all that the routes answer, in Starlette's form
    asked: str | None = (
        None  # function of `ServeOptions`: mount the paths? default: if it has clients
    )
    waiting: str | None = None  # function of an `ApiContext`: is there work without a request?
    keyless: tuple[str, ...] = ()  # of the paths, those that answer without the API key
