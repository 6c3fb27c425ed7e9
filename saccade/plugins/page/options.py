"""The option for the web UI."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PageOptions:
    """The web UI."""

    disable_page: bool = False
    """Disable the web UI at /."""
