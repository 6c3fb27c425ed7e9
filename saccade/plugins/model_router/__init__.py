"""A router for several models, which starts and stops their servers on demand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from saccade.plugin import Offer, Plugin

if TYPE_CHECKING:
    from saccade.plugins.route.options import RouteOptions


def has_models(options: RouteOptions) -> bool:
    """Return True if the options name models instead of servers."""
    return options.models is not None


PLUGIN = Plugin(
    "model_router",
    requires=("route",),
    upstreams=Offer(f"{__name__}.app:ModelRouter", f"{__name__}:has_models"),
)
