"""The options of routers and proxies.

As in `core/options.py`, each field is an option, the string below it is its help text, and None
means that the default is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from saccade.core.errors import ConfigError
from saccade.core.options import share_of_memory
from saccade.core.tuning import at_least, at_most, named


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayOptions:
    """The options that routers and proxies share."""

    max_body_mb: int = 256
    """Maximum request body, in MiB."""
    max_inflight_mb: int | None = None
    """Maximum MiB of request bodies in memory, for all requests in flight. Requests beyond it get a
    429 response. Default: a quarter of memory.
    """
    max_requests: int = 4096
    """Maximum requests in flight. Further requests get a 429 response."""
    cors_origins: tuple[str, ...] = ()
    """Browser origins that may read its own responses. "*" allows any. Set the same origins on the
    servers, because their responses are forwarded unchanged.
    """
    allowed_hosts: tuple[str, ...] = ()
    """Additional host names in requests that it accepts. If it listens on a loopback address, it
    accepts only localhost and loopback addresses by default, so that web pages cannot use it.
    """

    def __post_init__(self) -> None:
        named(self, "cors_origins", "allowed_hosts")
        at_least(1, self, "max_body_mb", "max_inflight_mb", "max_requests")

    @property
    def inflight_bytes(self) -> int:
        """The maximum bytes of request bodies in memory."""
        return share_of_memory(self.max_inflight_mb)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadOptions(RelayOptions):
    """The options that all routers share."""

    affinity: Literal["image", "none"] = "image"
    """Which server gets a request. image: the one that has seen its first image,
    or the start of its chat. none: any server, to measure the benefit of affinity.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteOptions(SpreadOptions):
    """The options of `saccade route`."""

    workers: tuple[str, ...] = ()
    """The servers, as one or more http://HOST:PORT. Every router must use the same names."""
    models: str | None = None
    """A TOML file of models by name, instead of --workers. The router starts a server for a model
    when a request names it, and stops idle servers (docs/several-models.md).
    """
    host: str = "127.0.0.1"
    """Address to listen on. The workers check keys, so give each worker the same --api-key."""
    port: int = 8100
    """Port to listen on. 0 picks a free port."""

    def __post_init__(self) -> None:
        RelayOptions.__post_init__(self)
        if bool(self.workers) == (self.models is not None):
            raise ConfigError("--workers URLS or --models FILE is required")
        named(self, "workers")
        at_least(0, self, "port")
        at_most(65535, self, "port")
