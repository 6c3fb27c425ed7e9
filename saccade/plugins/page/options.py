"""The option for the web UI."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.core.options import ServeOptions


@dataclass(frozen=True, slots=True)
class PageOptions:
    """The web UI."""

    disable_page: bool = False
    """Disable the web UI at /."""


def is_enabled(options: ServeOptions) -> bool:
    return options.role != "encode" and not options.of(PageOptions).disable_page
