"""Options of `saccade proxy`, as in `core/options.py`."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.core.tuning import at_least, at_most
from saccade.plugins.route.options import RelayOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyOptions(RelayOptions):
    """The address that `saccade proxy` listens on, and the server that it sends requests to."""

    upstream: str
    """The server's URL: http://HOST:PORT or https://HOST, with or without a path and /v1."""
    host: str = "127.0.0.1"
    """Address to listen on. The proxy forwards API keys, which the server checks."""
    port: int = 8200
    """Port to listen on. 0 picks a free port."""

    def __post_init__(self) -> None:
        RelayOptions.__post_init__(self)
        at_least(0, self, "port")
        at_most(65535, self, "port")
